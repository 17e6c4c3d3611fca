"""Lists of turns that arrive as text, as CSV and repeated encoding leave them: read as turns, never learned as letters."""

import json

import numpy as np
import pytest

from brigade.train.data.messages import turns, turns_from_text
from brigade.train.data.rows import BadRow
from testing.preparing import words

CHAT = [{"role": "user", "content": 'Ada\'s "city"?\n'}, {"role": "assistant", "content": "Paris.", "tool_calls": None}]
SHAREGPT = [{"from": "human", "value": "Which city?"}, {"from": "gpt", "value": "Paris."}]
CALL = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"deep": True}}]}]


def array(values):
    """Objects as pandas holds a list of structs from Parquet."""
    made = np.empty(len(values), object)
    made[:] = values
    return made


@pytest.mark.parametrize("chat, text", [
    (CHAT, json.dumps(CHAT)), (CHAT, repr(CHAT)), (SHAREGPT, json.dumps(SHAREGPT, indent=1)), (SHAREGPT, f"\n {SHAREGPT} "),
    (CHAT, json.dumps(json.dumps(CHAT))), (CHAT, repr(json.dumps(CHAT))), (CHAT, json.dumps(repr(CHAT))),
    (CHAT, {"messages": CHAT}), (CHAT, json.dumps({"messages": json.dumps(CHAT)})), (SHAREGPT, repr({"conversations": SHAREGPT})),
    (CHAT, [json.dumps(turn) for turn in CHAT]), (CHAT, json.dumps([repr(turn) for turn in CHAT])),
    (SHAREGPT, {"from": ["human", "gpt"], "value": ["Which city?", "Paris."]}),
    (CHAT[:1], CHAT[0]), (CHAT[1:], repr(CHAT[1])), (CALL, json.dumps(CALL)), (CHAT, CHAT),
    (CHAT, "\ufeff" + json.dumps(CHAT)), (CHAT, "\n".join(map(json.dumps, CHAT))),
    (CHAT, str(array(CHAT))), (CHAT, repr(array(CHAT))), (CHAT, repr({"messages": array(CHAT)})),
    ([CALL[0] | {"content": [{"type": "text", "text": "x"}] * 2}],
     str(array([CALL[0] | {"content": array([{"type": "text", "text": "x"}] * 2)}]))),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_turns_in_any_spelling(chat, text):
    assert turns_from_text(text) == chat


@pytest.mark.parametrize("value", [
    "Paris.", "", "[]", "[1, 2]", '{"a": 1}', '[{"role": "CEO", "content": "Ada"}]', '[{"role": "user", "since": 2020}]',
    '{"model": "m", "messages": [{"role": "user", "content": "Hi"}]}', '{"role": "user", "content": "x"} is how one looks',
    '[INST] "role": "user"', '"role": "user", she said', "{'from': 'a', 'to': 'b'}", '[{"role": "user", "content": "x"}, 3]',
    '{"role": "user", "content": "x"}\n{"id": 3}', '[{"role": "Actor", "content": "x"}]', "Message(role='CEO')",
    '{"from": "Rome", "value": 3}', None, 3, ["a", "b"], [],
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_answers_may_be_other_json(value):
    assert turns_from_text(value) == value


TWICE = '[{"role": "user", "content": "x"}, {"role": "assistant", "content": "a", "content": "b"}]'
CUT = (TWICE, json.dumps(CHAT)[:-9], repr(CHAT)[:-9], repr(CHAT).replace("Paris", "'Paris"), repr(CHAT)[:-1] + " ...]")


@pytest.mark.parametrize("text, said", [
    *((text, "chosen seems to be a list of turns") for text in CUT),
    (json.dumps({"messages": CHAT, "tools": []}), "an object of messages and tools, as a whole row is"),
    (json.dumps({"id": 3, "conversations": SHAREGPT}), "an object of conversations and id"),
    (json.dumps(CHAT).replace("user", "User"), "one has the role 'User'"),
    (json.dumps(CHAT).replace("assistant", "bot"), "'bot'"),
    ("ChatCompletionMessage(content='A', role='assistant', tool_calls=None)", "what Python prints of an object"),
    ("[OrderedDict([('role', 'user'), ('content', 'Q')])]", "what Python prints of an object"),
], ids=str)  # fmt: skip
def test_turns_that_cannot_be_read_or_are_known_and_not_read_are_refused(text, said):
    with pytest.raises(BadRow, match=said):
        turns_from_text(text, "chosen")


@pytest.mark.parametrize("row", [
    {"messages": repr(SHAREGPT)}, {"messages": json.dumps({"messages": SHAREGPT})}, {"messages": {"conversations": SHAREGPT}},
    {"prompt": json.dumps(SHAREGPT[:1]), "completion": repr(SHAREGPT[1:])},
    {"prompt": "Which city?", "completion": repr(SHAREGPT[1])},
    {"prompt": SHAREGPT[:1], "completion": "Paris."}, {"instruction": "Which", "input": "city?", "completion": SHAREGPT[1:]},
], ids=str)  # fmt: skip
def test_each_column_of_turns_may_hold_a_text(from_rows, tokenizer, row):
    prepared = from_rows(row, columns={"prompt": "instruction"} if "instruction" in row else {})
    assert words(tokenizer, prepared.train[0]) == "Paris.<|im_end|>" and not prepared.facts["unread"]


@pytest.mark.parametrize("spell", [json.dumps, repr, lambda value: json.dumps(json.dumps(value))])
def test_other_columns_of_a_table_in_csv(encode, spell):
    pair = {"prompt": "q", "completion": "x"}
    function = {
        "name": "f",
        "parameters": {"properties": {"it's": {"type": "string", "default": None}}},
        "strict": True,
    }
    tools, kwargs = [{"type": "function", "function": function}], {"enable_thinking": False}
    for columns in (
        {"tools": tools},
        {"functions": [function]},
        {"history": [["a", "b"]]},
        {"history": []},
        {"chat_template_kwargs": kwargs},
    ):
        ((key, value),) = columns.items()
        one, other = (encode({**pair, key: given}, "answers", template="qwen3") for given in (value, spell(value)))
        assert not one.bad and not other.bad and (one.tokens == other.tokens).all(), key


@pytest.mark.parametrize("spell", [
    json.dumps, repr, lambda parts: str(array(parts)), lambda parts: json.dumps(parts, indent=1),
    lambda parts: f"\n {parts}", lambda parts: json.dumps(json.dumps(parts, indent=1)), lambda parts: repr(array(parts)),
])  # fmt: skip
def test_parts_of_a_content_may_be_a_text(spell):
    parts = [{"type": "text", "text": "Par"}, {"type": "text", "text": "is."}]
    read = turns([{"role": "user", "content": "q"}, {"role": "assistant", "content": spell(parts)}], set())
    assert read[1]["content"] == "Paris."
    with pytest.raises(BadRow, match="a part of type 'image' is a picture"):
        turns([{"role": "user", "content": spell([{"type": "image"}, *parts])}], set())
    for role, content in (
        ("tool", spell(parts)),
        ("assistant", '[{"type": "city", "city": "Paris"}]'),
        ("assistant", "[{type}]"),
    ):
        assert turns([{"role": role, "content": content}], set())[0]["content"] == content


@pytest.mark.parametrize("kind", ["input_text", "output_text"])
def test_parts_under_another_name_are_refused_as_text_too(kind):
    for role in ("user", "assistant"):
        for content in (parts := [{"type": kind, "text": "x"}]), json.dumps(parts):
            with pytest.raises(BadRow, match=f"a part of type '{kind}'"):
                turns([{"role": role, "content": content}], set())
    with pytest.raises(BadRow, match="which is not read from a list of parts"):
        turns(
            [{"role": "assistant", "content": json.dumps([{"type": "text", "text": "x"}, {"type": "tool_use"}])}], set()
        )


@pytest.mark.parametrize(
    "content", [[{"type": "text", "content": "x"}], [{"type": "tool_use", "name": "f", "input": {}}]]
)
def test_parts_that_an_assistant_may_have_been_asked_for_are_counted(content):
    unread = set()
    (turn,) = turns([{"role": "assistant", "content": json.dumps(content)}], unread)
    assert turn["content"] == json.dumps(content)
    assert unread == {"contents of 'assistant' that are a list of parts as text, read as letters"}


QUOTED = {"contents that are all JSON of texts, read with its quotes and escapes"}
TYPELESS = [[{"type": "text", "text": "q"}], "x"], ["q\n", "x"]


@pytest.mark.parametrize("said", TYPELESS, ids=str)
def test_contents_of_a_table_that_has_lost_its_types_are_counted(said, from_rows):
    """As datasets' to_csv() leaves a column whose values are of several kinds."""
    contents = [json.dumps(each) for each in said]
    user, assistant = (
        {"role": role, "content": text} for role, text in zip(("user", "assistant"), contents, strict=True)
    )
    row = {"messages": repr([user, assistant])}
    apart = {"prompt": repr([user]), "completion": repr([assistant])}
    texts = {"prompt": contents[0], "completion": contents[1]}
    for each in (row, apart) if "[" in contents[0] else (row, apart, texts):
        assert {*from_rows(each).facts["unread"]} == QUOTED, each
    assert {*from_rows(texts, chat_template="none").facts["unread"]} == QUOTED


@pytest.mark.parametrize(
    "said", [('"q"', "x"), ("q", '"x"'), ('"a", "b"', '"x"'), ("[1]", "[2]"), ('"q', 'x"'), ("7", '"x"')]
)
def test_other_contents_in_quotes_are_texts(said):
    unread = set()
    turns([{"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=True)], unread)
    assert not unread


def test_a_text_of_turns_is_not_learned_as_letters(from_rows, mistake):
    message = mistake(from_rows, {"text": "A story."}, {"text": json.dumps(CHAT)})
    assert "line 2" in message and "'text' is a list of turns" in message and "columns: {messages: text}" in message


@pytest.mark.parametrize("text", [
    json.dumps(CHAT), repr(CHAT), json.dumps({"messages": CHAT}), json.dumps(SHAREGPT), json.dumps(CHAT[1]),
    json.dumps(CHAT)[:-9],
])  # fmt: skip
def test_turns_within_a_turn_are_counted(text):
    """They may be what was asked for."""
    for role in ("user", "assistant"):
        unread = set()
        turns([{"role": role, "content": text}], unread)
        assert unread == {f"contents of {role!r} that are a list of turns as text, read as letters"}
    unread = set()
    turns([{"role": "tool", "content": text}, {"role": "assistant", "content": f"Here: {text}"}], unread)
    turns(
        [{"role": "assistant", "content": '[{"name": "user"}]'}, {"role": "user", "content": '{"role": "a judge"}'}],
        unread,
    )
    assert not unread


@pytest.mark.parametrize("odd, said", [
    ({"role": "prompter", "content": "x"}, "the role 'prompter'"), ({"role": "ipython", "content": "x"}, "the role 'ipython'"),
    ({"role": "assistant", "text": "x"}, "says nothing that is read"), ({"from": "gpt", "text": "x"}, "says nothing"),
    ({"role": "assistant", "message": "x"}, "says nothing"), ({"role": "tool", "name": "f"}, "says nothing"),
])  # fmt: skip
def test_a_list_with_an_odd_turn_is_refused(odd, said):
    for text in (json.dumps([*CHAT, odd]), repr([odd, CHAT[1]])):
        with pytest.raises(BadRow, match=said):
            turns_from_text(text, "completion")


@pytest.mark.parametrize("answer", [
    [{"name": "Ann", "role": "user"}, {"name": "Bob", "role": "admin"}],
    [{"role": "admin", "content": "full"}, {"role": "user", "content": "read"}],
    [{"role": "nurse", "message": "hi"}, {"role": "system", "message": "disk"}],
    {"name": "Bob", "role": "user", "message": "hello"}, {"from": "system", "to": "ann", "body": "Disk full"},
], ids=str)  # fmt: skip
def test_what_has_roles_and_no_assistant_is_an_answer(answer):
    text = json.dumps(answer)
    assert turns_from_text(text) == text
