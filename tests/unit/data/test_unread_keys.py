"""What nobody reads of the rows that are trained on is counted and said; what contradicts itself is refused."""

import pytest

from brigade.train.data import report, rows
from testing.preparing import chats, texts, words


def turns(*contents, **further):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content, **further} for i, content in enumerate(contents)]


def chat(*contents, **columns):
    return {"messages": turns(*contents), **columns}


@pytest.mark.parametrize("processes", [1, 2])
def test_what_nobody_reads_is_counted_over_the_rows_that_are_trained_on(prepare, write, monkeypatch, processes):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 300)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
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
    ({"prompt": "<|im_start|>user\na", "completion": "b"}, "chat template already"),
    ({"prompt": "a", "completion": "b<|im_end|>"}, "control token '<|im_end|>'"),
    ({"prompt": "a", "completion": "b<|im_end|>\n"}, "control token '<|im_end|>'"),
    ({"prompt": "a", "completion": "b", "context": "c"}, "column 'context' belongs to the question"),
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


def test_a_question_may_be_about_control_tokens(from_rows, tokenizer):
    row = {"prompt": "Why <|im_end|> here?", "completion": "<|im_end|> ends a turn."}
    prepared = from_rows(row)
    assert "Why <|im_end|> here?<|im_end|>" in texts(tokenizer, prepared.train)[0]
    assert prepared.facts["plain"] == prepared.facts["control"] == 1


def test_what_holds_nothing_is_not_counted(from_rows):
    kwargs = {"enable_thinking": False, "custom_instructions": "", "xml_tools": []}
    row = {"messages": turns("a", "b", name=""), "chat_template_kwargs": kwargs}
    assert from_rows(row).facts["unread"] == {"'enable_thinking' of chat_template_kwargs": 1}


def test_a_system_turn_that_says_the_same_stays(from_rows, tokenizer):
    row = {"messages": [{"role": "system", "content": "x"}, *turns("a", "b")], "system": "x"}
    prepared = from_rows(row)
    assert texts(tokenizer, prepared.train)[0].count("system\nx") == 1 and not prepared.facts["unread"]


def test_all_parts_of_a_turn_may_be_left_out(from_rows, tokenizer):
    parts = [{"type": "text", "text": "b", "train": False}, {"type": "text", "text": "c", "weight": 0}]
    prepared = from_rows({"messages": turns("a", parts, "d", "e")})
    assert words(tokenizer, prepared.train[0]) == "e<|im_end|>"
