"""Rows that cannot be used are named by file and line, all of them, or skipped on request and counted."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brigade.train.data import rows, samples
from testing.chats import CHATS, HELD, chat, same


def lines(*wrong):
    return "".join(f"{json.dumps(CHATS[0])}\n" for _ in range(3)) + "".join(f"{line}\n" for line in wrong)


@pytest.mark.parametrize("line, said", [
    ('{"messages": [', "not JSON"), ("hello", "'hello'"), ('{"body": "abc"}', "'body'"),
    ('{"messages": []}', "messages"),
    ('{"messages": "hi"}', "messages"), ("[1, 2]", "messages"), ("null", "messages"), ('{"messages": ["hi"]}', "role"),
    ('{"messages": [{"role": "bot", "content": "x"}]}', "'bot'"), ('{"messages": [{"content": "x"}]}', "role"),
    ('{"messages": [{"role": ["user"], "content": "x"}]}', "role"), ('{"messages": [{"role": "user"}]}', "content"),
    ('{"messages": [{"role": "user", "content": ["x"]}]}', "['x'], not text"),
    ('{"messages": [{"role": "user", "content": null}]}', "content of 'user' is missing"),
    ('{"a;b": "c"}', "'a;b'"),
])  # fmt: skip
def test_a_broken_line_is_named(prepare, mistake, tmp_path, line, said):
    message = mistake(prepare, lines(line, json.dumps(CHATS[0])))
    assert f"{tmp_path / 'train.jsonl'}, line 4" in message and said in message and "NoneType" not in message
    assert f"{tmp_path / 'heldout.jsonl'}, line 4" in mistake(prepare, CHATS, lines(line))


def test_a_text_that_no_token_can_end(prepare, mistake, tokenizer):
    """The model would learn to go on for ever. A chat ends as its template says."""
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    for row in ({"text": "So."}, {"prompt": "a", "completion": "b"}):
        message = mistake(prepare, [row] * 3, HELD, tokenizer=endless, chat_template="none")
        assert "no token that ends a text (eos_token)" in message and "tokenizer_config.json" in message
    assert len(prepare(CHATS, HELD, tokenizer=endless).train) == len(CHATS)


@pytest.mark.parametrize("empty", ["", "\n\n", "  \n"])
def test_an_empty_file(prepare, mistake, tmp_path, empty):
    message = mistake(prepare, empty)
    assert str(tmp_path / "train.jsonl") in message and "empty" in message
    assert str(tmp_path / "heldout.jsonl") in mistake(prepare, CHATS, empty)


@pytest.mark.parametrize("row, said", [
    (chat("a question"), "without an assistant turn"),
    ({"prompt": chat("a")["messages"], "completion": chat("b")["messages"]}, "no assistant turn"),
    *((chat("a", "b", roles=(role, role)), "do not alternate") for role in ("user", "assistant")),
    ({"messages": [*chat("a", "b")["messages"], {"role": "assistant", "content": "c"}]}, "do not alternate"),
    ({"messages": [*chat("a", "b")["messages"], {"role": "system", "content": "c"}]}, "can only be the first"),
    ({"question": "a", "answer": "b"}, "'question', 'answer'"), ({"prompt": "a"}, "'completion'"), ({}, "nothing"),
    ({"prompt": "a", "completion": 3}, "two lists"), ({"text": "\ud800"}, "train.jsonl"),
    ({"prompt": "a", "completion": ""}, "empty"), ({"text": 7}, "the text is 7, not text"),
    ({"text": ["a"]}, "the text is ['a'], not text"), ({"messages": 3}, "messages is 3, not a list"),
    ({"text": None}, "'text' is null"), ({"messages": None}, "'messages' is null"),
    ({"text": None, "other": 1}, "'text' is null"), ({"prompt": "a", "completion": None}, "column 'completion' is null"),
    ({"prompt": "a", "completion": "\u200b"}, "empty"), ({"prompt": "a", "completion": ["b"]}, "is ['b'], not a list of"),
    ({"prompt": '["a"]', "completion": '["b"]'}, "each a text in a list, spelled as JSON"),
    (CHATS[0] | {"system": '[{"role": "system", "content": "S"}]'}, "column 'system' is [{"),
])  # fmt: skip
def test_a_row_that_cannot_be_used_is_named(prepare, mistake, tmp_path, row, said):
    message = mistake(prepare, [*CHATS[:3], row])
    assert f"{tmp_path / 'train.jsonl'}, line 4" in message and said in message


@pytest.mark.parametrize("row, offered", [
    ({"instruction": "a", "input": "", "output": "b"}, "{prompt: instruction, completion: output}"),
    ({"question": "a", "answer": "b"}, "{prompt: question, completion: answer}"),
    ({"conversations": []}, "{messages: conversations}"),
    ({"files": ["a.png"], "talk": [{"role": "user", "content": "a"}]}, "{messages: talk}"),
    ({"title": "t", "paragraphs": [{"context": "c"}]}, "{messages: NAME}, {prompt: NAME, completion: NAME} or {text: NAME}"),
    ({"x": 1}, "{messages: NAME}, {prompt: NAME, completion: NAME} or {text: NAME}"),
    ({"Question": "a", "Solution": "b"}, "{prompt: Question, completion: Solution}"),
    ({"id": 3, "log": [{"role": "user", "content": "a"}]}, "{messages: log}"),
    ({"log": str(CHATS[0]["messages"])}, "{messages: log}"),
    ({"prompt": "a", "reply": "b"}, "{completion: NAME}"), ({"prompt": "a", "response": "b"}, "{completion: response}"),
])  # fmt: skip
def test_columns_of_other_sets_are_offered_a_mapping(prepare, mistake, row, offered):
    assert f"columns: {offered}" in mistake(prepare, [row]).splitlines()[-1]


BROKEN = [CHATS[0], {"messages": []}, CHATS[1], chat("only a question"), CHATS[2], chat("a", "\ud800"), *CHATS[3:5]]


@pytest.mark.parametrize("processes", [1, 2])
def test_all_bad_rows_are_listed_or_on_request_skipped_and_counted(
    prepare, mistake, capsys, monkeypatch, tmp_path, processes
):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 300)
    text = "".join(f"{json.dumps(row)}\n" for row in BROKEN) + "{no json\n" + f"{json.dumps(chat('b', 'long ' * 99))}\n"
    options = {"heldout": HELD, "dataset_num_proc": processes, "max_length": 64, "truncation": False}
    message = mistake(prepare, text, **options)
    assert "train.jsonl, line 2" in message and "5 rows cannot be used" in message and "skip_bad_rows: true" in message
    told = capsys.readouterr().err
    assert [line in told for line in (f"{tmp_path}/train.jsonl, line {n}: " for n in range(1, 11))] == [
        n in (2, 4, 6, 9, 10) for n in range(1, 11)
    ]
    data = prepare(text, **options, skip_bad_rows=True)
    assert same(data.train, prepare(CHATS[:5], **options).train) and data.facts["skipped"] == 5
    assert f"skipped: {tmp_path}/train.jsonl, line 9: not JSON" in capsys.readouterr().err
    mistake(prepare, text, **options)  # also when it lies in the cache without them


def test_of_many_bad_rows_each_reason_is_listed_once(prepare, mistake, capsys, tmp_path):
    assert "5,000 rows or more" not in (message := mistake(prepare, [{"x": 1}] * 50, HELD)) and "50 rows" in message
    told, file = capsys.readouterr().err, tmp_path / "train.jsonl"
    assert told.count("none of the columns") == 1 and f"all 50 rows from {file}, line 1 on: none of" in told
    mistake(prepare, [*CHATS, *[{"x": 1}] * 7, {"text": 3}, {"x": 1}], HELD)
    told = capsys.readouterr().err
    assert f"{file}, line 21: none of the columns" in told and "only 'x' (and 7 more such rows)" in told
    assert told.splitlines()[-1] == f"{file}, line 28: the text is 3, not text"
    mistake(prepare, [{f"x{i}": 1} for i in range(25)], HELD)
    told = capsys.readouterr().err
    assert told.count("none of the columns") == 10 and "... and 15 more" in told and "all 25" not in told
    assert "skip_bad_rows: true leaves it out" in mistake(prepare, [*CHATS, {"x": 1}], HELD)
    assert "no training samples" in mistake(prepare, [{"x": 1}] * 3, HELD, skip_bad_rows=True)


def test_after_a_mistake_the_mended_data_is_read(prepare, mistake):
    mistake(prepare, lines("broken"))
    assert len(prepare(lines(json.dumps(CHATS[1]))).train) == 3


@settings(max_examples=40)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["messages", "role", "content", "x"]), inner, max_size=3)
        ),
    )
)
def test_any_json_is_a_chat_or_a_users_mistake(row):
    try:
        text = samples.convert(row, {}, lambda messages, tools: samples.Text(json.dumps(messages), [(0, 1)]))
    except samples.BadRow as error:
        assert len(error.args) == 2
    else:
        assert all(m["role"] in samples.ROLES.values() and isinstance(m["content"], str) for m in json.loads(text.text))
