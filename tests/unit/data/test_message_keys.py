"""Keys of messages, calls and definitions of tools in the spellings of other tools: read, counted or refused, never lost; and
keys of their data sets, as docs/evidence/peer-keys.md says."""

import datetime
import decimal
import json

import pytest

from benchmarks.peer_keys import CASES, PREFERENCES
from brigade.train.data.messages import turns
from brigade.train.data.order import check_order
from brigade.train.data.rows import BadRow
from brigade.train.data.tool_calls import tool_definitions

QUESTION = {"role": "user", "content": "q"}


def read(message, unread=None):
    return turns([QUESTION, message], set() if unread is None else unread)[1]


def answer(**keys):
    return {"role": "assistant", "content": "a", **keys}


def calls(*given):
    return [call["function"] for call in read(answer(tool_calls=list(given)))["tool_calls"]]


def refusal(made, *arguments):
    with pytest.raises(BadRow) as error:
        made(*arguments)
    assert all(error.value.args)
    return error.value.args[0]


@pytest.mark.parametrize("call", [
    {"name": "f", "arguments": {"x": None}}, {"name": "f", "parameters": {"x": None}}, {"name": "f", "input": {"x": None}},
    {"function": {"name": "f", "parameters": '{"x": null}'}}, {"function": {"name": "f"}, "arguments": {"x": None}},
    {"name": "f", "args": {"x": None}, "id": "1", "type": "tool_call"}, {"name": "f", "arguments": {}, "parameters": {"x": None}},
    {"type": "tool_use", "id": "1", "name": "f", "input": {"x": None}}, {"name": "f", "arguments": json.dumps('{"x": null}')},
    {"name": "f", "function": {"name": "f", "arguments": {"x": None}}}, '{"name": "f", "arguments": {"x": null}}',
    {"name": "f", "arguments": {"x": None}, "parameters": '{"x": null}'},
], ids=str)  # fmt: skip
def test_arguments_of_a_call_in_any_spelling(call):
    assert calls(call) == [{"name": "f", "arguments": {"x": None}}]
    text = json.dumps(call) if isinstance(call, dict) else call
    assert read({"from": "function_call", "value": text})["tool_calls"][0]["function"]["arguments"] == {"x": None}
    assert read(answer(tool_calls=json.dumps([call])))["tool_calls"] == read(answer(tool_calls=[call]))["tool_calls"]


@pytest.mark.parametrize("call", [
    {"name": "f"},
    {"name": "f", "result": {"x": 1}},
    {"name": "f", "call_id": "1", "status": "completed"},
    {"name": "f", "arguments": None},
    {"name": "f", "arguments": ""},
    {"name": "f", "arguments": "{}"},
    # What is said about a call is none of its arguments.
    {"function": {"name": "f", "arguments": "{}"}, "caller": {"type": "direct"}}, {"function": {"name": "f"}, "approved": True},
    {"function": {"name": "f", "arguments": None}, "cache_control": {"type": "ephemeral"}},
    {"name": "f", "arguments": None, "approved": True}, {"name": "f", "arguments": {}, "days": 3},
], ids=str)  # fmt: skip
def test_a_call_without_arguments(call):
    assert calls(call) == [{"name": "f", "arguments": {}}]


@pytest.mark.parametrize("call, said", [
    ({"name": "f", "arguments": {"x": 1}, "parameters": {"x": 2}}, "arguments and parameters of the call 'f' contradict"),
    ({"function": {"name": "f", "arguments": {"x": 1}}, "input": {"x": 2}}, "contradict"),
    ({"function": {"name": "f", "arguments": {"x": 1}}, "arguments": {"x": 2}}, "arguments and arguments beside the function"),
    ({"name": "g", "function": {"name": "f"}}, "has the name 'f', and beside its function 'g'"),
    ({"name": "f", "arguments": {"x": [float("nan")]}}, "hold what JSON cannot say: Out of range float"),
    ({"name": "f", "arguments": '{"x": -Infinity}'}, "hold what JSON cannot say: Out of range float"),
    ({"name": "f", "arguments": {"x": datetime.date(2024, 5, 1)}}, "cannot say: Object of type date"),
    ({"name": "f", "arguments": [1]}, "are [1], not an object"), ({"name": "f", "input": "5"}, "are 5, not an object"),
    ({"name": "f", "arguments": "{'x': 1}"}, "are not JSON"),
    ({"name": "f", "arguments": '{"x": {"y": 1, "y": 2}}'}, "are not JSON: the key 'y' twice in one object"),
    ({"name": 3}, "without a function's name"),
    (3, "without a function's name"), ({"name": "f", "kwargs": {"x": 1}}, "has no arguments, and 'kwargs', which is not read"),
    ({"name": "f", "arguments": "", "kwargs": {"x": 1}}, "has no arguments, and 'kwargs', which is not read"),
    ({"name": "f", "arguments": None, "params": '{"x": 1}'}, "'params'"),
    ({"function": {"name": "f", "inputs": {"x": 1}}}, "'inputs'"), ({"name": "f", "city": "Rome"}, "and 'city', which"),
    ({"function": {"name": "f", "days": 3}}, "'days'"), ({"name": "f", "arguments": "{}", "params": {"x": 1}}, "'params'"),
    ({"function": {"name": "f", "arguments": "", "parsed_arguments": {"x": 1}}}, "'parsed_arguments'"),
], ids=str)  # fmt: skip
def test_calls_that_contradict_themselves_are_refused(call, said):
    assert said in refusal(calls, call)


@pytest.mark.parametrize("text", [
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "I look. <function=f></function>", '[TOOL_CALLS][{"name": "f"}]',
    '<|python_tag|>{"name": "f"}', "<\uff5ctool\u2581calls\u2581begin\uff5c>f", "<|tool_calls_section_begin|>f",
    '{"name": "f", "arguments": {}}',
], ids=str)  # fmt: skip
def test_a_call_that_the_text_beside_it_spells_is_refused(text):
    """The template writes the call itself: the model would learn to call twice."""
    call = {"name": "f", "arguments": {}}
    assert "spells a call" in refusal(read, answer(content=text, tool_calls=[call]))
    assert read(answer(content=text))["content"] == text and read(answer(content="I call f.", tool_calls=[call]))
    as_turns = [QUESTION, answer(content=text), {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}]
    assert "spells a call" in refusal(turns, as_turns, set())


@pytest.mark.parametrize("text", [
    "Usage: <function_name>(x).", "#include <function_traits>", "It needs <tool_call_id>, in <tool_call_result>.",
    "<think>I answer in <tool_call> tags.</think>I look.",
])  # fmt: skip
def test_a_text_beside_calls_may_speak_of_them(text):
    assert read(answer(content=text, tool_calls=[{"name": "f", "arguments": {}}]))["content"] == text


@pytest.mark.parametrize("content", [
    '[{"type": "text", "name": "city", "value": "Bern"}]', '[{"type": "text", "content": "a"}]', '[{"type": "image"}]',
    '[{"type": "text", "bbox": [1, 2], "content": "a"}]', '[{"type": "image", "bbox": [1, 2]}]',
])  # fmt: skip
def test_an_answer_in_json_is_learned_as_it_is(content):
    assert read(answer(content=content))["content"] == content


def test_unread_keys_of_calls_are_counted():
    unread = set()
    call = {"id": "1", "index": 0, "type": "function", "result": "5", "error": None}
    call |= {"function": {"name": "f", "why": "x", "arguments": {}}}
    read(answer(tool_calls=[call]), unread)
    assert unread == {"key 'result' of tool calls", "key 'why' of tool calls"}


@pytest.mark.parametrize("role", ["user", "system", "tool", "observation", "human"])
def test_only_the_assistant_calls_tools(role):
    for key in ("tool_calls", "function_call"):
        call = {"name": "f", "arguments": {}}
        given = {"role": role, "content": "c", key: [call] if key == "tool_calls" else call}
        assert f"a {role!r} turn has tool calls" in refusal(turns, [given], set())
        assert turns([given | {key: None}], set())[0]["content"] == "c"


@pytest.mark.parametrize("message, content", [
    ({"role": "assistant", "content": "", "value": "a"}, "a"), ({"from": "gpt", "value": "", "content": "a"}, "a"),
    ({"role": "assistant", "content": None, "value": "a"}, "a"), ({"role": "assistant", "content": "a", "value": "a"}, "a"),
    ({"role": "assistant", "from": "gpt", "content": [], "value": "a"}, "a"), ({"role": None, "from": "gpt", "value": "a"}, "a"),
    ({"role": "assistant", "content": "", "value": None}, ""),
    (answer(content=[{"type": "text", "text": "", "value": "a"}]), "a"),
], ids=str)  # fmt: skip
def test_the_key_that_says_something_is_read(message, content):
    assert read(message)["content"] == content


@pytest.mark.parametrize("message, said", [
    ({"role": "assistant", "content": "a", "value": "b"}, "content and value of a 'assistant' turn contradict"),
    ({"role": "assistant", "content": [{"type": "text", "text": "a", "value": "b"}]}, "text and value of a part in"),
    ({"role": "assistant", "from": "human", "content": "a"}, "role is 'assistant', and its from 'human'"),
    ({"role": "assistant", "from": "function_call", "content": "{}"}, "its from 'function_call'"),
    ({"role": "assistant", "content": datetime.datetime(2024, 5, 1)}, "is a date (2024-05-01 00:00:00), not text"),
    ({"role": "assistant", "content": datetime.timedelta(1)}, "is a time (1 day, 0:00:00), not text"),
    ({"role": "assistant", "content": [{"type": "text", "text": b"a"}]}, "is bytes (b'a'), not text"),
    ({"role": "assistant", "value": decimal.Decimal("1.5")}, "is a decimal number (1.5), not text"),
], ids=str)  # fmt: skip
def test_messages_that_contradict_themselves_are_refused(message, said):
    assert said in refusal(read, message)


@pytest.mark.parametrize("calls, results, told", [
    (["a", "b"], ["b", "a"], True), (["a", "b"], ["a", "b"], False), (["a", "b"], ["b"], False), (["a", "b"], ["x", "a"], False),
    (["a", "a"], ["a", "a"], False), ([None, "b"], ["b", None], False), ([None, None], [None, None], False),
    (["a", "b"], ["a", "a"], "tool_call_id"), (["a"], ["a", "a"], False), (["a", "b"], ["a", "a", "b"], "tool_call_id"),
])  # fmt: skip
@pytest.mark.parametrize("key", ["tool_call_id", "name"])
def test_results_stand_in_the_order_of_their_calls(calls, results, told, key):
    """Most templates write neither ids nor names: the model would read the one result as the other's. A tool may say more behind
    its result, and a call has one."""
    functions = calls if key == "name" else ["f"] * len(calls)
    asked = answer(
        content=None,
        tool_calls=[{"id": name, "function": {"name": own or "g"}} for name, own in zip(calls, functions, strict=True)],
    )
    given = [{"role": "tool", "content": "r", key: name} for name in results]
    whole = turns(
        [QUESTION, asked, *given, answer(content="x"), QUESTION, asked, *given[:1]], set()
    )  # places of their own
    if told in (True, key):
        assert "message 4 is the result of an earlier call" in refusal(check_order, whole)
    else:
        check_order(whole)


def test_a_name_in_from_is_counted():
    unread = set()
    assert read(answer(**{"from": "Ada"}), unread)["content"] == "a" and unread == {"key 'from' of messages"}


@pytest.mark.parametrize("flag, learned", [
    ("weight", 1), ("train", True), ("training", 1), ("loss", True), ("loss_weight", 1.0), ("loss_scale", 1), ("loss_mask", 1),
    ("step_loss_mask", 1), ("trainable", True), ("calculate_loss", True), ("compute_loss", 1), ("output_with_loss", True),
    ("masked", False), ("no_loss", 0), ("ignore_loss", False), ("mask_loss", 0),
])  # fmt: skip
def test_loss_flags_of_other_tools(flag, learned):
    other = type(learned)(not learned)
    assert "train" not in read(answer(**{flag: learned})) and "train" not in read(answer(**{flag: None}))
    assert read(answer(**{flag: other}))["train"] is False
    part = {"type": "text", "text": "a", flag: other}
    assert read(answer(content=[part, part]))["train"] is False
    assert f"{flag} {other!r} of one part" in refusal(read, answer(content=[part, part | {flag: learned}]))
    assert f"{flag} 0.5 of a 'assistant' turn is neither" in refusal(read, answer(**{flag: 0.5}))
    assert f"{flag} {learned!r} asks for loss on a 'user' turn" in refusal(read, QUESTION | {flag: learned})
    read(QUESTION | {flag: other})
    if flag != "train":
        assert "contradict each other" in refusal(read, answer(train=True, **{flag: other}))


@pytest.mark.parametrize("key", ["learn", "train_on", "is_masked", "supervised", "includeInLoss", "should_train"])
def test_what_may_be_a_loss_flag_is_refused(key):
    assert f"{key} False of a 'assistant' turn may say whether it is learned" in refusal(read, answer(**{key: False}))
    assert "mask 0" not in refusal(read, answer(mask=0)) and "marks what is learned" in refusal(read, answer(mask=0))
    assert read(answer(constrained=False, glossary=True, flossed=False))
    assert turns([QUESTION | {key: False}], set()) and read(answer(**{key: "words"}))


@pytest.mark.parametrize("key", ["tool_call", "toolCalls", "function_calls", "functionCall"])
def test_calls_under_another_name_are_refused(key):
    assert "holds calls, which are not read under this name" in refusal(read, answer(**{key: {"name": "f"}}))


def test_what_a_call_of_its_own_turn_says_besides_is_not_lost():
    called = {"role": "tool_call", "content": '{"name": "f"}'}
    joined = turns([QUESTION, answer(), called | {"id": 7}], set())
    assert len(joined) == 2 and joined[1]["id"] == 7 and joined[1]["content"] == "a" and joined[1]["tool_calls"]
    thinks = {"reasoning_content": "Hm."}
    assert turns([QUESTION, answer(**thinks), called | thinks], set())[1]["reasoning_content"] == "Hm."
    assert turns([QUESTION, called | thinks, called], set())[1]["reasoning_content"] == "Hm."
    apart = turns([QUESTION, answer(), called | thinks], set())
    assert "roles do not alternate: message 3" in refusal(check_order, apart)


@pytest.mark.parametrize("key", ["tools", "functions"])
def test_tools_of_a_turn_are_refused_where_the_template_does_not_read_them(encode, key):
    row = {"messages": [{"role": "system", "content": "s", key: [{"name": "f"}]}, QUESTION, answer()]}
    ((_, error),) = encode(row, "answers").bad
    assert f"the key {key!r} of a turn holds tools" in error.args[0]
    row["messages"][0][key] = []
    assert not encode(row, "answers").bad
    ((_, error),) = encode({"messages": [QUESTION, answer()], "tool_schemas": [{"name": "f"}]}, "answers").bad
    assert "holds definitions of tools" in error.args[0] and "columns: {tools: tool_schemas}" in error.args[1]
    for bad in (0, "0", False):
        ((_, error),) = encode({"prompt": "q", "completion": "a", "kto_tag": bad}, "answers").bad
        assert "says that the answer is a bad one" in error.args[0]


def test_a_refusal_stands_beside_a_content_that_is_null():
    assert read(answer(content=None, refusal="No.")) == {"role": "assistant", "content": "", "refusal": "No."}


@pytest.mark.parametrize("tool", [
    {"name": "f", "input_schema": {"default": None}}, {"name": "f", "inputSchema": '{"default": null}'},
    {"name": "f", "parameters": {"default": None}, "input_schema": None}, '{"name": "f", "parameters": {"default": null}}',
], ids=str)  # fmt: skip
def test_definitions_of_tools_in_any_spelling(tool):
    wanted = {"name": "f", "parameters": {"default": None}}
    assert tool_definitions([tool]) == [wanted]
    assert tool_definitions(json.dumps([tool])) == [wanted]
    assert tool_definitions([{"function": tool}]) == [{"function": wanted}]
    wrapped = {"type": "function", "function": wanted}
    assert tool_definitions(None, [tool]) == tool_definitions(None, [{"function": tool}]) == [wrapped]


@pytest.mark.parametrize("tools, said", [
    ([{"name": "f", "parameters": {"a": 1}, "input_schema": {"a": 2}}], "parameters and input_schema of the tool 'f' contradict"),
    ([{"name": "f", "parameters": {"default": float("nan")}}], "tools hold what JSON cannot say"),
    ([3], "not a list of definitions"), ([{"function": "f"}], "a function in tools is 'f', not a definition"),
    ([{"function": [1]}], "a function in tools is [1], not a definition"),
    ([{"function": '{"name": "f", "x": NaN}'}], "tools hold what JSON cannot say"),
    ([{"name": "f", "parameters": {"properties": "none"}}], "properties in the parameters of the tool 'f' are not JSON"),
    ([{"name": "f", "parameters": {"$defs": "3"}}], "$defs in the parameters of the tool 'f' are 3, not an object"),
    ([{"name": "f", "parameters": {"properties": {"p": '{"type"'}}}], "'p' in the properties in the parameters of the tool"),
    ([{"name": "f", "parameters": {"properties": {"p": {"items": '{"default": NaN}'}}}}], "tools hold what JSON cannot say"),
], ids=str)  # fmt: skip
def test_definitions_that_cannot_be_read_are_refused(tools, said):
    assert said in refusal(tool_definitions, tools)


SCHEMA = {
    "type": "object",
    "properties": {"p": {"type": ["array", "null"], "items": {"$ref": "#/$defs/d"}, "default": "[1]"}},
    "required": ["p"],
    "$defs": {"d": {"enum": ["{", "["], "anyOf": [{"type": "string"}], "description": "{x}"}},
}


def texts_within(value):
    """The value in which one object or list after another is JSON in a text, or its repr."""
    inner = list(value.items() if isinstance(value, dict) else enumerate(value))
    for key, each in inner:
        copy = dict(value) if isinstance(value, dict) else list(value)
        if isinstance(each, (dict, list)):
            for copy[key] in json.dumps(each), json.dumps(each, indent=1), repr(each), *texts_within(each):
                yield dict(copy) if isinstance(copy, dict) else list(copy)


def test_schemas_of_a_table_that_has_lost_its_types():
    """JSON within JSON where a schema has an object or a list: the model would be shown a text."""
    definition = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    spelled = list(texts_within([definition]))
    assert len(spelled) > 30
    quoted = json.dumps(definition).replace('"string"', json.dumps('"string"'))
    for tools in ([definition], str([definition]), *spelled, json.dumps(str([definition])), f"[{quoted}]"):
        assert tool_definitions(tools) == [definition], tools
    bare = {
        "city": {"type": "str", "default": "{}"},
        "type": {"type": "str"},
        "days": "a number",
        "note": "{of any kind}",
    }
    bare["definitions"] = {"type": "str", "description": "{x} y"}
    for parameters in bare, bare | {"city": json.dumps(bare["city"])}, repr(bare):
        assert tool_definitions([{"name": "f", "parameters": parameters}]) == [{"name": "f", "parameters": bare}]


@pytest.mark.parametrize("properties, read", [
    ({"city": "[required] the city"}, {"city": "[required] the city"}), ({"days": {"items": "[string, int]"}},) * 2, ("null", {}),
])  # fmt: skip
def test_words_in_brackets_in_a_schema_are_no_json(properties, read):
    (definition,) = tool_definitions([{"name": "f", "parameters": {"type": "object", "properties": properties}}])
    assert definition["parameters"]["properties"] == read


# ---- keys of peers ---------------------------------------------------------------------------------------------------
def supervised(tokenizer, found):
    """The supervised parts, each without the token that ends it."""
    parts, before = [], False
    for token, own in zip(found.tokens.tolist(), found.supervised.tolist(), strict=True):
        parts += [[]] * (own and not before)
        parts[-1:] = [[*parts[-1], token]] if own else parts[-1:]
        before = own
    return [tokenizer.decode(part).removesuffix("<|im_end|>") for part in parts]


@pytest.mark.parametrize("case", [*CASES, *PREFERENCES], ids=lambda case: f"{case['by']} {case['key']}"[:60])
def test_a_key_of_another_tool(encode, tokenizer, case):
    found = encode(case["row"], case.get("rows", "answers"), case.get("columns"), case.get("template", "chatml"))
    if case["is"] == "refused":
        ((_, error),) = found.bad
        problem, cure = error.args
        assert case["says"] in problem and cure
        return
    assert not found.bad, found.bad[0][1].args
    unread = found.unread[found.samples["unread"][0]]
    counted = case["says"] if case["is"] == "ignored" else case.get("ignored", "")
    assert ", ".join(unread) == counted
    text = tokenizer.decode(found.tokens)
    assert all(part in text for part in case.get("text", [])), text
    if "learned" in case:
        assert supervised(tokenizer, found) == case["learned"]
    if case.get("rows", "answers") != "answers":
        assert found.samples["desirable"].tolist() == case.get("labels", [True, False])


OF_A_CITY = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.mark.parametrize("tool, key", [
    ({"type": "function", "function": {"name": "f", "arguments": OF_A_CITY}}, "arguments"),
    ({"type": "function", "function": {"name": "f"}, "parameters": OF_A_CITY}, "parameters"),
    ({"name": "f", "args_schema": json.dumps(OF_A_CITY)}, "args_schema"), ({"name": "f", "schema": OF_A_CITY}, "schema"),
    ({"name": "f", "args": OF_A_CITY["properties"]}, "args"),
])  # fmt: skip
def test_a_schema_where_no_template_reads_it_is_refused(tool, key):
    assert f"the key {key!r} of the tool 'f'" in refusal(tool_definitions, [tool])


@pytest.mark.parametrize("more", [
    {"returns": OF_A_CITY}, {"parameters": OF_A_CITY, "schema": OF_A_CITY}, {"cache_control": {"type": "ephemeral"}},
    {"parameters": {}}, {"response": OF_A_CITY}, {"parameters": {}, "response_schema": OF_A_CITY},
    {"annotations": {"title": "F", "readOnlyHint": True}}, {"examples": {}},
])  # fmt: skip
def test_a_tool_without_arguments_may_say_other_things(more):
    assert tool_definitions([{"name": "f", **more}])
