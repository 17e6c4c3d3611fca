"""What nobody reads of the rows that are trained on is counted and said; what contradicts itself is refused."""

import json
import math

import pytest

from brigade.train.data import report, rows
from testing.preparing import chats, texts, words


def turns(*contents, **further):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content, **further} for i, content in enumerate(contents)]


def chat(*contents, **columns):
    return {"messages": turns(*contents), **columns}


def test_tools_in_a_turn_beside_those_of_the_row_are_counted_and_none_are_none(from_rows, mistake):
    tools = [{"name": "f", "description": "Finds it."}]
    for row in (chat("a", "b"), chat("a", "b", tools=tools)):
        row["messages"][0] |= {"tools": tools if "tools" in row else "[]"}
        assert "key 'tools' of messages" in from_rows(row, chat_template="qwen3").facts["unread"]
    alone = {"messages": [turns("a")[0] | {"tools": tools}, turns("a", "b")[1]]}
    assert "write them into a column" in mistake(from_rows, alone, chat_template="qwen3")


@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}]], ids=["a text", "parts"])
def test_a_system_turn_that_says_what_its_column_says_stays(from_rows, tokenizer, content):
    row = {"messages": [{"role": "system", "content": content}, *turns("a", "b")]}
    for column in ("Be brief.", json.dumps([{"type": "text", "text": "Be brief."}])):
        prepared = from_rows(row | {"system": column})
        assert texts(tokenizer, prepared.train)[0].count("system\nBe brief.") == 1 and not prepared.facts["unread"]


@pytest.mark.parametrize("processes", [1, 2])
def test_what_nobody_reads_is_counted_over_the_rows_that_are_trained_on(prepare, write, monkeypatch, processes):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 300)
    named = {"messages": turns("a", "b", name="Ada")}
    content = [chat(f"a{i}", "b", source="web", tags=[]) for i in range(6)] + [
        named,
        named | {"id": 0},
        chat("a", "b", id=None),
    ]
    text = {"text": "word " * 40, "id": 7}  # several samples of one row
    held = write("h.jsonl", [chat("h", "i", held=1)])
    data = {"validation_file": held, "max_length": 32, "dataset_num_proc": processes}
    prepared = prepare(train_file=write("a.jsonl", [*content, text]), **data)
    assert prepared.facts["unread"] == {"column 'source'": 6, "key 'name' of messages": 2, "column 'id'": 2}
    said = "column 'source' (6 rows), column 'id' (2 rows), key 'name' of messages (2 rows)"
    assert report.unread(prepared.facts) == said
    few = prepare(train_file=write("b.jsonl", content), max_train_samples=2, **data)
    assert report.unread(few.facts) == "column 'source' (2 rows)"
    many = prepare(train_file=write("c.jsonl", [chat("a", "b", **{f"x{i:02}": 1 for i in range(15)})]), **data)
    assert report.unread(many.facts).endswith("column 'x11' (1 row), and 3 more")
    assert report.unread(prepare(train_file=write("d.jsonl", chats("a", 3)), **data).facts) == ""


def test_a_column_is_left_out_on_purpose(from_rows, tokenizer):
    row = {"prompt": "How?", "chosen": "So.", "rejected": "No.", "image": "a.png", "id": 3}
    for ignored in (["rejected", "image", "id"], ["rejected", "image"]):
        prepared = from_rows(row, columns={"completion": "chosen", "ignore": ignored})
        assert words(tokenizer, prepared.train[0]) == "So.<|im_end|>"
        assert report.unread(prepared.facts) == ("" if "id" in ignored else "column 'id' (1 row)")
    assert from_rows(chat("a", "b", image="a.png"), columns={"ignore": "image"}).facts["unread"] == {}


def test_a_column_that_no_row_has_is_told(prepare, write, mistake):
    """A misspelt name would leave the column out without a word."""
    data = {"validation_file": write("h.jsonl", [chat("h", "i")])}
    file = write("a.jsonl", [chat("a", "b"), chat("a", "b", sys="Be brief.")])
    assert len(prepare(train_file=file, columns={"system": "sys"}, **data).train) == 2
    message = mistake(prepare, train_file=file, columns={"system": "sis", "ignore": "id"}, **data)
    assert f"{file}" in message and "no row has a column 'sis', which data.columns names" in message
    assert len(prepare(train_file=file, columns={"system": "sys"}, max_train_samples=1, **data).train) == 1


def test_a_key_of_messages_is_read_where_the_template_writes_it(from_rows, tokenizer, tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text(
        "{% for m in messages %}{{ m.name if m.role == 'user' and m.name }}: {% if m.role == 'user' %}{{ m.content }}"
        "{{ mood }}{% else %}{% generation %}{{ m.content }}{{ mood }}<|im_end|>{% endgeneration %}{% endif %}{% endfor %}"
        "{{ ': ' if add_generation_prompt }}"
    )
    row = {"messages": turns("a", "b", name="Ada"), "chat_template_kwargs": '{"mood": "!", "tone": 1}'}
    prepared = from_rows(row, chat_template=str(own))
    assert texts(tokenizer, prepared.train)[0].replace(" ", "") == "Ada:a!:b!<|im_end|>"
    assert prepared.facts["unread"] == {"'tone' of chat_template_kwargs": 1}
    asked = {"messages": [turns("a")[0], turns("a", "b", name="Ada")[1]]}  # an answer's name, which it does not write
    assert from_rows(asked, chat_template=str(own)).facts["unread"] == {"key 'name' of messages": 1}


@pytest.mark.parametrize("text, refused", [
    ("<image>\nWhat is it?", True), ("What is it?\n<image>", True), ("<video>What is it?", True), (" <audio><image>What?", True),
    ("<video> tags do not play", False), ("Why does <image> fail?", False), ("<image>\n<url>a</url>\n</image>", False),
])  # fmt: skip
def test_marks_of_pictures(from_rows, mistake, text, refused):
    if refused:
        assert "stands for a picture" in mistake(from_rows, *chats("a", 2), chat(text, "A dog."))
    else:
        (name,) = from_rows(chat(text, "A dog.")).facts["unread"]
        assert name.endswith("> in texts, read as letters")
    answered = from_rows(chat("Write a feed.", text)).facts["unread"]
    assert all("read as letters" in name for name in answered) and answered


@pytest.mark.parametrize("row, said", [
    ({"messages": [turns("a")[0], turns("a", "b", weight=1, train=False)[1]]}, "weight 1 and train False of one turn"),
    ({"messages": [{"role": "system", "content": "x"}, *turns("a", "b")], "system": "y"}, "say different things"),
    (chat("a", "b", system=3), "column 'system' is 3, not text"), (chat("a", "b", train=False), "is not to be learned"),
    (chat("a", "b", chat_template_kwargs={"add_generation_prompt": True}), "sets add_generation_prompt"),
    (chat("a", "b", chat_template_kwargs=[1]), "not an object of variables"),
    (chat("a", "b", tools=[{"function": {"name": "f", "parameters": "{"}}]), "parameters of the tool 'f' are not JSON"),
    ({"messages": turns("a", [{"type": "text", "text": None}])}, "is missing, not text"),
    ({"messages": turns("a", [{"type": "text", "text": {"a": 1}}])}, "is {'a': 1}, not text"),
    ({"messages": turns([{"type": "text", "text": "a", "loss": True}], "b")}, "loss of parts True asks for loss"),
    ({"prompt": "a", "completion": "b", "history": ["c"]}, "pairs of texts"),
    ({"prompt": "<|im_start|>user\na", "completion": "b"}, "through a template already"),
    ({"prompt": "a", "completion": "b<|im_end|>"}, "the assistant turn ends with '<|im_end|>'"),
    ({"prompt": "a", "completion": "b<|im_end|>\n"}, "the assistant turn ends with '<|im_end|>'"),
    ({"prompt": "a", "completion": "b", "input": "c"}, "column 'input' belongs to the question"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_what_contradicts_itself_or_says_nothing_is_refused(from_rows, mistake, tmp_path, row, said):
    message = mistake(from_rows, *chats("a", 2), row)
    assert f"{tmp_path / 'train.jsonl'}, line 3" in message and said in message


def test_what_a_text_has_no_place_for_is_refused(from_rows, mistake):
    row = {"prompt": "a", "completion": "b", "system": "Be brief."}
    message = mistake(from_rows, row, chat_template="none")
    assert "column 'system' beside two texts" in message and "chat_template" in message.splitlines()[-1]
    assert len(from_rows(row | {"system": ""}, chat_template="none").train) == 1
    assert "the data has chats" in mistake(from_rows, chats("a", 1)[0], chat_template="none")


def test_what_holds_nothing_is_not_counted(from_rows):
    kwargs = {"enable_thinking": False, "custom_instructions": "", "xml_tools": []}
    row = {"messages": turns("a", "b", name=""), "chat_template_kwargs": kwargs}
    assert from_rows(row).facts["unread"] == {"'enable_thinking' of chat_template_kwargs": 1}


@pytest.mark.parametrize("row, column", [
    ({"prompt": "a", "completion": "None"}, "completion"), ({"prompt": "NULL", "completion": "b"}, "prompt"),
    ({"text": " NaN\n"}, "text"), (chat("a", "nan"), "messages"), (chat("<NA>", "b"), "messages"),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "null"}]}, "conversations"),
    ({"prompt": "a", "completion": "b", "system": "nan"}, "system"),
    ({"instruction": "a", "input": "NaN", "completion": "b"}, "input"),
    ({"prompt": [turns("a")[0]], "completion": "undefined"}, "completion"),
])  # fmt: skip
def test_what_tables_print_of_a_missing_value_is_counted(from_rows, row, column):
    named = {"messages": "conversations", "prompt": "instruction"}
    columns = {ours: name for ours, name in named.items() if name in row}
    (said,) = from_rows(row, columns=columns).facts["unread"]
    assert f"as a text of column {column!r}" in said
    honest = {"prompt": "Is it null?", "completion": "None of them is NaN.", "id": None}
    assert not from_rows(honest).facts["unread"]


def test_a_missing_value_names_who_made_it(prepare, mistake, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.csv").write_text("prompt,completion\na,b\nc,None\n")
    message = mistake(prepare, dataset_name=str(tmp_path / "set"))
    assert "'completion' is null" in message and "train_file reads them as texts" in message
    (tmp_path / "held.csv").write_text("text\nheld out\n")
    files = {"train_file": str(tmp_path / "set" / "train.csv"), "validation_file": str(tmp_path / "held.csv")}
    assert len(prepare(**files).train) == 2


def test_all_parts_of_a_turn_may_be_left_out(from_rows, tokenizer):
    parts = [{"type": "text", "text": "b", "train": False}, {"type": "text", "text": "c", "weight": 0}]
    prepared = from_rows({"messages": turns("a", parts, "d", "e")})
    assert words(tokenizer, prepared.train[0]) == "e<|im_end|>"


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": None}}}]}
ASKED = {"role": "user", "content": "a"}
SYSTEM = {"columns": {"system": "persona"}}


@pytest.mark.parametrize("row, said, data", [
    # What tables write for keys and columns that a row does not have.
    (chat("a", "b", system=None, tools=None, weight=None, id=None, images=None, chat_template_kwargs={"x": None}), "", {}),
    ({"messages": turns("a", "b", weight=None, name=None, tool_calls=None, reasoning_content=None)}, "", {}),
    ({"prompt": "a", "completion": "b", "history": None, "input": None, "system": None}, "", {}),
    # pandas' number in its place
    (chat("a", "b", images=math.nan, documents=math.nan, objects=math.nan, weight=math.nan), "", {}),
    (chat("a", "b", system=math.nan, tools=math.nan), "null in column {}, read as no value", {}),
    ({"prompt": "a", "completion": "b", "history": math.nan}, "null in column 'history', read as no value", {}),
    # where the recipe says that a column holds something
    (chat("a", "b", persona=None), "null in column 'persona', read as no value", SYSTEM),
    (chat("a", "b", persona=""), "", SYSTEM),
    # within an object, where null may be meant
    ({"messages": [ASKED, CALL]}, "null in arguments of tool calls, learned as null", {"chat_template": "qwen3"}),
    (
        chat("a", "b", tools=[{"name": "f", "parameters": {"properties": {"x": None}}}]),
        "null in definitions of tools, shown to the model as null",
        {"chat_template": "qwen3"},
    ),
    (
        chat("a", "b", tools=[{"name": "f", "parameters": {"properties": {"x": {"default": None, "enum": [1, None]}}}}]),
        "",
        {"chat_template": "qwen3"},
    ),
])  # fmt: skip
def test_null_is_counted_where_it_may_hide_something(from_rows, row, said, data):
    names = ("system", "tools") if "{" in said else ("",)
    assert from_rows(row, **data).facts["unread"] == {said.format(repr(name)): 1 for name in names if said}
