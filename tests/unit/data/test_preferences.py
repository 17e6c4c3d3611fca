"""Rows of preferences: each form is read as the plain one is, and what is no pair or no judged answer is refused."""

import copy
import json

import pytest

from brigade.train.data import messages
from brigade.train.recipe.objectives import JUDGED, PAIRS


def user(text):
    return {"role": "user", "content": text}


def says(text, **more):
    return {"role": "assistant", "content": text, **more}


BRIEF, ASK, GOOD, BAD = {"role": "system", "content": "Be brief."}, user("How warm?"), says("Very."), says("Less.")
CALL = says("", tool_calls=[{"function": {"name": "f", "arguments": {"x": 1}}}])
RESULT = {"role": "tool", "content": "30"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
PLAIN = {"prompt": "How warm?", "chosen": "Very.", "rejected": "Less."}
LONG = {"history": [["a?", "b."]], "system": "Be brief."} | PLAIN
LONG_CHAT = [BRIEF, user("a?"), says("b."), ASK]
HH = {key: f"\n\nHuman: How warm?\n\nAssistant: {PLAIN[key]}" for key in ("chosen", "rejected")}
AGAIN = {"chosen": "How warm? Very.", "rejected": "How warm?\nLess."}
ZEPHYR = "<|system|>\nS</s>\n<|user|>\nHow warm?</s>\n<|assistant|>\n"
SWIFT = [*LONG_CHAT, GOOD]


def content(found):
    assert not found.bad, found.bad[0][1].args
    return found.tokens.tolist(), found.supervised.tolist(), found.samples["desirable"].tolist()


def learned(tokenizer, found):
    """What is supervised of each sample."""
    ends = found.samples["length"].cumsum()
    parts = zip([0, *ends[:-1]], ends, strict=True)
    return [tokenizer.decode(found.tokens[a:b][found.supervised[a:b]]) for a, b in parts]


def test_what_columns_names_is_asked_before_what_they_do_not(encode, tokenizer):
    row = {"prompt": "P", "conv": [ASK], "chosen": "Very.", "rejected": "Less."}
    assert content(encode(row, columns={"messages": "conv"})) == content(encode(PLAIN))


def test_a_better_answer_that_the_recipe_names_for_something_else_is_no_better_answer(encode):
    (_, error), *_ = encode(PLAIN, columns={"completion": "chosen"}).bad
    assert error.args[0].endswith("'chosen', which data.columns names for something else")


@pytest.mark.parametrize("row, columns, plain", [
    ({"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}, {}, PLAIN),
    ({"prompt": [ASK], "chosen": GOOD, "rejected": "Less."}, {}, PLAIN),
    ({"prompt": "How warm?", "chosen": [GOOD], "rejected": [BAD]}, {}, PLAIN),
    ({"prompt": "How warm?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, {}, PLAIN),
    ({"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, {}, PLAIN),
    ({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, {}, PLAIN),
    ({"messages": [ASK], "chosen": GOOD, "rejected": BAD}, {}, PLAIN),
    ({"messages": '[{"role": "user", "content": "How warm?"}]', "chosen": "Very.", "rejected": "Less."}, {}, PLAIN),
    ({"prompt": "How warm?", "chosen": json.dumps([ASK, GOOD]), "rejected": repr([ASK, BAD])}, {}, PLAIN),
    ({"prompt": json.dumps([ASK]), "chosen": json.dumps(GOOD), "rejected": {"messages": [BAD]}}, {}, PLAIN),
    ({"messages": json.dumps([ASK, GOOD]), "rejected_response": repr([BAD])}, {}, PLAIN),
    ({"prompt": repr([ASK]), "completion": json.dumps([GOOD]), "rejected_response": "Less."}, {}, PLAIN),
    ({"messages": [{"from": "human", "value": "How warm?"}], "chosen": {"from": "gpt", "value": "Very."},
      "rejected": {"from": "gpt", "value": "Less."}}, {}, PLAIN),
    ({"chosen_messages": [ASK, GOOD], "rejected_messages": [ASK, BAD]}, {}, PLAIN),
    ({"messages": [ASK, GOOD], "rejected_response": "Less."}, {}, PLAIN),
    ({"messages": [ASK, GOOD], "rejected_messages": [ASK, BAD]}, {}, PLAIN),
    ({"prompt": "How warm?", "completion": "Very.", "rejected_response": "Less."}, {}, PLAIN),
    ({"input": {"messages": [ASK]}, "preferred_output": [GOOD], "non_preferred_output": [BAD]}, {}, PLAIN),
    ({"asked": "How warm?", "good": "Very.", "bad": "Less."}, {"prompt": "asked", "chosen": "good", "rejected": "bad"}, PLAIN),
    ({"instruction": "How", "input": "warm?", "chosen": "Very.", "rejected": "Less."}, {"prompt": "instruction"},
     PLAIN | {"prompt": "How\nwarm?"}),
    ({"system": "Be brief.", "chosen": [*LONG_CHAT[1:], GOOD], "rejected": [*LONG_CHAT[1:], BAD]}, {}, LONG),
    ({"chosen": SWIFT, "rejected": [*LONG_CHAT, BAD]}, {}, LONG), ({"messages": SWIFT, "rejected_response": "Less."}, {}, LONG),
    ({"messages": LONG_CHAT, "chosen": GOOD, "rejected": BAD}, {}, LONG),
    ({"input": {"messages": LONG_CHAT}, "preferred_output": [GOOD], "non_preferred_output": [BAD]}, {}, LONG),
    (PLAIN | {"rejected_messages": [], "messages": None, "label": None}, {}, PLAIN),
    ({"chosen": [ASK | {"id": "c1"}, GOOD | {"id": "c2"}], "rejected": [ASK | {"id": "r1"}, BAD]}, {}, PLAIN),
    ({"prompt": [ASK | {"ts": 1}], "chosen": [ASK | {"ts": 2}, GOOD], "rejected": [ASK | {"ts": 3}, BAD]}, {}, PLAIN),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("rows", [PAIRS, JUDGED])
def test_each_form_is_read_as_the_plain_one(encode, tokenizer, row, columns, plain, rows):
    """And KTO learns the two answers of a pair as a good one and a bad one."""
    ours, theirs = encode(row, rows, columns), encode(plain, rows)
    assert content(ours) == content(theirs) and ours.samples["desirable"].tolist() == [True, False]
    assert learned(tokenizer, ours) == ["Very.<|im_end|>", "Less.<|im_end|>"], "no answer of the prompt is learned"


@pytest.mark.parametrize("row", [
    {"prompt": "How warm?", "completion": "Very.", "label": True}, {"prompt": [ASK], "completion": [GOOD], "label": True},
    {"messages": [ASK, GOOD], "label": True}, {"messages": [ASK, GOOD], "kto_tag": True},
    {"prompt": "How warm?", "completion": "Very.", "kto_tag": True},
], ids=str)  # fmt: skip
def test_judged_answers(encode, tokenizer, row):
    key = "label" if "label" in row else "kto_tag"
    plain = content(encode({"prompt": "How warm?", "completion": "Very."}, "answers"))
    for value in (True, "true", "True", 1, "1", 1.0):
        assert content(encode(row | {key: value}, JUDGED)) == (*plain[:2], [True])
    for value in (False, "false", "False", 0, "0", 0.0):
        assert content(encode(row | {key: value}, JUDGED)) == (*plain[:2], [False])
    assert encode(row, JUDGED).unread == [()]
    named = {"good?" if name == key else name: value for name, value in row.items()}
    assert content(encode(named, JUDGED, {"label": "good?"})) == (*plain[:2], [True])


def test_a_judged_chat_is_learned_from_its_last_question_on(encode, tokenizer):
    whole = [BRIEF, user("a?"), says("b."), ASK, CALL, RESULT, GOOD]
    (text,) = learned(tokenizer, encode({"messages": whole, "label": False}, JUDGED, template="qwen3"))
    assert "b." not in text and '"x": 1' in text and text.endswith("Very.<|im_end|>")
    history = {"history": [["a?", "b."]], "prompt": "How warm?", "completion": "Very.", "label": True}
    assert learned(tokenizer, encode(history, JUDGED)) == ["Very.<|im_end|>"]


def test_a_prompt_may_end_with_a_tools_result_and_an_answer_may_call(encode, tokenizer):
    row = {"tools": TOOLS, "chosen": [ASK, CALL, RESULT, GOOD], "rejected": [ASK, CALL, RESULT, BAD]}
    assert learned(tokenizer, encode(row, template="qwen2.5")) == ["Very.<|im_end|>", "Less.<|im_end|>"]
    row = {"tools": TOOLS, "chosen": [ASK, CALL, RESULT, GOOD], "rejected": [ASK, BAD]}
    better, worse = learned(tokenizer, encode(row, template="qwen2.5"))
    assert '"x": 1' in better and better.endswith("Very.<|im_end|>") and worse == "Less.<|im_end|>"
    row = {"input": {"messages": [ASK], "tools": TOOLS}, "preferred_output": [CALL], "non_preferred_output": [BAD]}
    found = encode(row, template="qwen2.5")
    assert '"x": 1' in learned(tokenizer, found)[0]
    assert tokenizer.decode(found.tokens).count('"name": "f", "parameters"') == 2


def test_what_replaces_an_answer_replaces_all_of_it(encode, tokenizer):
    """ms-swift's rejected_response stands for everything behind the last user's turn."""
    row = {"tools": TOOLS, "messages": [*LONG_CHAT, CALL, RESULT, GOOD], "rejected_response": "Less."}
    found = encode(row, template="qwen2.5")
    better, worse = learned(tokenizer, found)
    assert '"x": 1' in better and better.endswith("Very.<|im_end|>") and worse == "Less.<|im_end|>"
    assert tokenizer.decode(found.tokens).count("<tool_response>") == 1


def test_calls_of_the_prompt_may_differ_in_their_ids(encode, tokenizer):
    chats = [
        [ASK, says("", tool_calls=[CALL["tool_calls"][0] | {"id": name}]), RESULT | {"tool_call_id": name}]
        for name in "ab"
    ]
    row = {"tools": TOOLS, "chosen": [*chats[0], GOOD], "rejected": [*chats[1], BAD]}
    assert learned(tokenizer, encode(row, template="qwen2.5")) == ["Very.<|im_end|>", "Less.<|im_end|>"]


def test_prompts_that_differ_in_what_the_template_writes_are_refused(encode):
    row = {"chosen": [ASK | {"name": "Ada"}, GOOD], "rejected": [ASK | {"name": "Bo"}, BAD]}
    assert not encode(row).bad
    named = (
        "{% for m in messages %}{{ m.name }}{{ m.content }}{% generation %}{% if m.role == 'assistant' %}{{ m.content }}"
        "{% endif %}{% endgeneration %}{% endfor %}"
    )
    ((_, error),) = encode(row, template=named).bad
    assert "begin differ in name, which the chat template writes" in error.args[0] and "alike" in error.args[1]


def test_texts_are_joined_where_there_is_no_template(encode, tokenizer):
    found = encode(PLAIN | {"chosen": " Very.", "rejected": " Less."}, template=None)
    assert learned(tokenizer, found) == [" Very.<|im_end|>", " Less.<|im_end|>"]
    assert tokenizer.decode(found.tokens) == "How warm? Very.<|im_end|>How warm? Less.<|im_end|>"
    assert found.samples["joined"].tolist() == [1, 0]
    assert "no place" not in str(encode(PLAIN | {"system": "x"}, template=None).bad[0][1])
    assert "column 'system' beside two texts" in encode(PLAIN | {"system": "x"}, template=None).bad[0][1].args[0]


def test_what_a_message_says_in_one_form_it_says_when_read_again():
    second = {"role": "function_call", "content": '{"name": "g", "arguments": {}}'}
    whole = [ASK, CALL, second, RESULT, says("b", weight=0)]
    once = messages.turns(copy.deepcopy(whole), set())
    assert messages.turns(copy.deepcopy(once), set()) == once and once[1]["tool_calls"][1]["function"]["name"] == "g"


# ---- what of an answer is learned --------------------------------------------------------------------------------
def test_thoughts_are_cut_of_both_answers(encode, tokenizer):
    chosen, rejected = says("<think>Hm.</think>Very."), says("Less.", reasoning_content="Oh.")
    row = {"prompt": [ASK], "chosen": chosen, "rejected": rejected}
    found = encode(row, template="qwen3", thinking="cut")
    assert "Hm." not in tokenizer.decode(found.tokens) and "Oh." not in tokenizer.decode(found.tokens)
    assert found.samples["thoughts"].sum() == 2
    same = {"prompt": [ASK], "chosen": says("<think>Hm.</think>Very."), "rejected": GOOD}
    assert "are the same" in encode(same, thinking="cut").bad[0][1].args[0] and not encode(same).bad


def test_of_answers_of_several_turns_the_last_is_learned_where_the_recipe_says_so(encode, tokenizer):
    row = {"chosen": [ASK, GOOD, user("And?"), says("So.")], "rejected": [ASK, BAD, user("And?"), says("No.")]}
    assert learned(tokenizer, encode(row)) == ["Very.<|im_end|>So.<|im_end|>", "Less.<|im_end|>No.<|im_end|>"]
    assert learned(tokenizer, encode(row, train_on_last_turn_only=True)) == ["So.<|im_end|>", "No.<|im_end|>"]


@pytest.mark.parametrize("rows", [PAIRS, JUDGED])
@pytest.mark.parametrize("prompt, chosen, rejected, said", [
    ("a " * 40, "Very.", "Less.", "nothing of the chosen answer is left within max_length (32 tokens)"),
    ("a", "Very. " * 30, "Very. " * 31, "chosen and rejected are the same within max_length (32 tokens)"),
    ("a", "Very.", "b " * 40 + "c", ""),
], ids=["nothing left", "the same left", "one cut"])  # fmt: skip
def test_a_pair_of_which_nothing_is_left_is_refused(encode, rows, prompt, chosen, rejected, said):
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    found = encode(row, rows, max_length=32)
    if said:
        ((_, error),) = found.bad
        assert error.args == (said, "raise max_length, or drop the row") and not len(found.samples)
    else:
        assert not found.bad and found.samples["fate"].tolist() == [0, 1] and found.samples["length"].max() == 32
    long = encode(row, rows, max_length=32, truncation=False)
    assert "max_length is 32 and truncation is off" in long.bad[0][1].args[0]


def test_an_answer_of_which_nothing_is_learned_is_refused(encode):
    pair = {"prompt": [ASK], "chosen": says("Very.", weight=0), "rejected": BAD}
    ((_, error),) = encode(pair).bad
    assert error.args == ("no token of the chosen answer is learned", "drop the row")
    judged = {"prompt": "a " * 40, "completion": "Very.", "label": True}
    ((_, error),) = encode(judged, JUDGED, max_length=32).bad
    assert "nothing of the answer is left within max_length (32 tokens)" in error.args[0]
    assert not encode(judged | {"prompt": "a"}, JUDGED, max_length=32).bad


# ---- refused -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row, said, cure", [
    (PLAIN | {"rejected": "Very."}, "are the same", "drop"), (PLAIN | {"rejected": "Very. "}, "", ""),
    ({"chosen": [ASK, GOOD], "rejected": [ASK, GOOD]}, "are the same", "drop"),
    ({"messages": [ASK, GOOD], "rejected_response": "Very."}, "are the same", "drop"),
    ({"chosen": [ASK, GOOD], "rejected": [user("b"), BAD]}, "is empty, so it is no prompt", "begin with the same turns"),
    ({"chosen": [ASK, GOOD, user("a"), BAD], "rejected": [ASK, GOOD, user("b"), BAD]}, "ends with message 2", "same turns"),
    ({"chosen": [BRIEF, ASK, GOOD], "rejected": [BRIEF, user("b"), BAD]}, "whose role is 'system'", "same turns"),
    ({"chosen": [ASK, GOOD], "rejected": [ASK]}, "answer in column 'rejected' is empty", "add the answer"),
    ({"chosen": [ASK, GOOD], "rejected": [BAD]}, "one of chosen and rejected is a whole chat", "alike"),
    ({"prompt": "Why?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "do not begin with the row's prompt", "ignore"),
    ({"prompt": [BRIEF, ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "do not begin with", "ignore"),
    (PLAIN | {"rejected": ""}, "answer in column 'rejected' is empty", "drop"),
    (PLAIN | {"chosen": " \n"}, "answer in column 'chosen' is empty", "drop"),
    (PLAIN | {"rejected": "\u200b"}, "answer in column 'rejected' is empty", "drop"),
    ({"conversations": [ASK], "chosen": GOOD, "rejected": BAD}, "no column says what was asked", "{prompt: conversations}"),
    (PLAIN | {"chosen": None}, "answer in column 'chosen' is empty", "drop"),
    (PLAIN | {"rejected": []}, "rejected is [], not a list of turns", "write"),
    ({"prompt": [ASK], "chosen": [says("")], "rejected": [BAD]}, "answer in column 'chosen' is empty", "drop"),
    ({"prompt": [ASK], "chosen": 3, "rejected": [BAD]}, "chosen is 3, not a list", "write"),
    ({"chosen": "Very.", "rejected": "Less."}, "no column says what was asked", "{prompt: NAME}"),
    ({"prompt": "How warm?", "rejected": "Less."}, "a column 'rejected' without 'chosen'", "chosen"),
    ({"prompt": "How warm?", "chosen": "Very."}, "no better and worse answer here, only 'prompt', 'chosen'", "rejected"),
    ({"prompt": "How warm?", "completion": "Very."}, "only 'prompt', 'completion'", '"chosen": ...'),
    ({"text": "It is warm."}, "no better and worse answer here, only 'text'", "columns: {chosen"), ({}, "only nothing", "write"),
    ({"messages": [ASK], "rejected_response": "Less."}, "column 'messages' ends with a question", "add the answer"),
    ([1], "not an object of columns", "write"), (PLAIN | {"rejected_response": "Or."}, "'rejected_response' is one of", "ignore"),
    (PLAIN | {"label": False}, "column 'label' is False", "ignore"), (PLAIN | {"images": ["a.png"]}, "pictures", "ignore"),
    (PLAIN | {"context": "b"}, "column 'context' belongs to the question", "ignore"),
    (PLAIN | {"chosen": "Very.<|im_end|>"}, "the assistant turn ends with '<|im_end|>'", "without a template's marks"),
    (HH, "are whole chats in one text, which begins with 'Human:'", "as turns"),
    (HH | {"prompt": "How warm?"}, "'chosen' and 'rejected' are whole chats", "as turns"),
    (PLAIN | AGAIN, "both answers begin with the prompt's own", "without it"),
    ({"prompt": [ASK]} | AGAIN, "both answers begin with the prompt's own", "without it"),
    (PLAIN | {"prompt": "Warm", "chosen": "Warm, yes", "rejected": "Warm, no"}, "", ""),
    (PLAIN | {"prompt": ZEPHYR}, "the user turn ends with '<|assistant|>', a mark of Zephyr", "chat_template: none"),
    (PLAIN | {"chosen": "Very.</s>"}, "the assistant turn ends with '</s>'", "without a template's marks"),
    ({"prompt": [user(ZEPHYR)], "chosen": [GOOD], "rejected": [BAD]}, "the user turn ends with '<|assistant|>'", "marks"),
    (PLAIN | {"history": ["a"]}, "column 'history' is ['a']", "pairs of texts"),
    (PLAIN | {"history": "a"}, "column 'history' is 'a', not the turns before the prompt", "columns: {ignore: history}"),
    (PLAIN | {"chosen": "\ud800"}, r"the row has half a surrogate pair (\ud800)", "drop"),
    ({"prompt": [ASK, GOOD], "chosen": [GOOD], "rejected": [BAD]}, "roles do not alternate", "drop turns"),
], ids=str)  # fmt: skip
def test_what_is_no_pair_is_refused(encode, row, said, cure):
    found = encode(row)
    if not said:
        assert not found.bad
        return
    ((_, error),) = found.bad
    assert said in error.args[0] and cure in error.args[1], error.args
    assert found.dropped.tolist() == [[0, 4, 0]] and not len(found.samples)


JUDGE = {"prompt": "How warm?", "completion": "Very."}


@pytest.mark.parametrize("row, said, cure", [
    (JUDGE, "no column 'label', only 'prompt', 'completion'", "columns: {label"),
    (JUDGE | {"label": None}, "column 'label' holds nothing", "label: true or false"),
    *((JUDGE | {"label": value}, "neither true nor false", "true or false") for value in (2, "good", 0.5, "", [1])),
    (JUDGE | {"label": True, "completion": ""}, "answer in column 'completion' is empty", "add"),
    ({"messages": [ASK], "label": True}, "answer in column 'messages' is empty", "add"),
    ({"messages": [ASK, GOOD, ASK], "label": True}, "answer in column 'messages' is empty", "add"),
    ({"text": "It is warm.", "label": True}, "a text answers nothing", "completion"),
    ({"x": 1, "label": True}, "none of the columns", "columns"),
    ({"prompt": "a", "label": True}, "without a column 'completion'", ""),
    (PLAIN | {"rejected": "Very."}, "are the same", "drop"),
], ids=str)  # fmt: skip
def test_what_is_no_judged_answer_is_refused(encode, row, said, cure):
    ((_, error),) = encode(row, JUDGED).bad
    assert said in error.args[0] and cure in error.args[1], error.args


def test_answers_are_refused_pairs_with_the_objective_as_cure(encode):
    assert "objective: dpo" in encode(PLAIN, "answers").bad[0][1].args[1]
    assert "objective: kto" in encode(JUDGE | {"label": False}, "answers").bad[0][1].args[1]
