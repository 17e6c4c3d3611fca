"""Chats to labels: the assistant's tokens and no others, encoded once per content; mistakes in data told by line."""

import copy
import json
import os
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brigade.data import build as building
from brigade.data import builtin, encode, report, rows, samples, sources
from brigade.data import prepare as preparing
from brigade.data.cache import cache_directory
from brigade.data.chat_template import TEMPLATES
from brigade.data.rows import RowChunk
from brigade.data.store import IGNORED

CHATML = TEMPLATES / "chatml.jinja"


@pytest.fixture(scope="module")
def built():
    return builtin.ensure(cache_directory())


@pytest.fixture(scope="module")
def tokenizer(built):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(built.tokenizer)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("BRIGADE_CACHE", str(folder))
    return folder


def chat(*contents, roles=("user", "assistant")):
    return {"messages": [{"role": roles[i % len(roles)], "content": text} for i, text in enumerate(contents)]}


class only:
    """A Prepared of one source, its held-out samples and facts by attribute."""

    def __init__(self, prepared):
        self.train, self.fingerprint, self.stands_in = (
            prepared.train,
            prepared.fingerprint,
            prepared.chat_format.stands_in,
        )
        (self.heldout,) = prepared.heldout.values()
        self.facts = prepared.facts
        self.cut, self.dropped = prepared.facts["cut"], prepared.facts["dropped"]


def same(some, others):
    return [row["input_ids"].tolist() for row in some] == [row["input_ids"].tolist() for row in others]


CHATS = [chat(f"What is {i}?", f"The number {i}.") for i in range(20)]
HELD = [chat(f"Which is {i}?", f"{i}.") for i in range(20)]


@pytest.fixture
def prepare(load, tokenizer, tmp_path):
    """prepare(chats, heldout, max_length=...): the samples of such data; chats may be the text of a file."""

    def write(name, chats):
        path = tmp_path / name
        if isinstance(chats, bytes):
            path.write_bytes(chats)
        else:
            path.write_text(chats if isinstance(chats, str) else "".join(json.dumps(c) + "\n" for c in chats))
        return str(path)

    def call(chats=CHATS, heldout=None, tokenizer=tokenizer, **data):
        files = {"dataset_name": None, "train_file": write("train.jsonl", chats)}
        files |= {"validation_file": write("heldout.jsonl", heldout)} if heldout is not None else {}
        return only(preparing.prepare(load(data=files | data), tokenizer))

    return call


def words(tokenizer, samples):
    """What is supervised in each sample, as text."""
    return [tokenizer.decode([int(label) for label in row["labels"] if label != IGNORED]) for row in samples]


# ---- labels ------------------------------------------------------------------------------------------------------
text = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20).map(str.strip)
turns = st.lists(st.tuples(text, text), min_size=1, max_size=3).map(
    lambda pairs: [(role, content) for pair in pairs for role, content in zip(("user", "assistant"), pair, strict=True)]
)


@given(turns)
def test_labels_cover_exactly_the_assistants_tokens(tokenizer, turns):
    messages = [{"role": role, "content": content} for role, content in turns]
    machine = encode.LoadedEncoder(
        encode.Encoder(tokenizer.backend_tokenizer.to_str(), CHATML.read_text(), None, {}, None, 4096, True)
    )
    found = machine.encode(RowChunk([{"messages": messages}], "here", 1, 1, None), {})
    labels = np.where(found.supervised, found.tokens, IGNORED).tolist()
    sample = {"input_ids": found.tokens.tolist(), "labels": labels}
    whole = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    assert sample["input_ids"] == tokenizer(whole)["input_ids"]
    assert len(sample["labels"]) == len(sample["input_ids"]) and sample["labels"][0] == IGNORED
    assert all(label in (IGNORED, token) for label, token in zip(sample["labels"], sample["input_ids"], strict=True))
    answers = [f"{content}<|im_end|>" for role, content in turns if role == "assistant"]
    assert words(tokenizer, [sample]) == ["".join(answers)]
    # Where they stand, too: each run of labels begins after its "assistant\n" and ends before the newline.
    runs = "".join("x" if label != IGNORED else " " for label in sample["labels"]).split()
    assert len(runs) == len(answers)


def test_the_end_of_the_turn_is_learnt(tokenizer, prepare):
    assert words(tokenizer, prepare([chat("a", "b")], [chat("c", "d")]).train) == ["b<|im_end|>"]


def test_a_template_of_the_users_own(tokenizer, prepare, tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text(
        "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %} {% endfor %}"
    )
    data = prepare([chat("abc", "def")], [chat("ghi", "jkl")], chat_template=str(own))
    assert words(tokenizer, data.train)[0].replace(" ", "") == "abcdef"


# ---- cutting, dropping, splitting --------------------------------------------------------------------------------
def test_cut_and_dropped_are_counted(tokenizer, prepare):
    long_question = chat("why? " * 100, "so.")
    long_answer = chat("a", "b c d e f " * 100)
    data = prepare([*CHATS, long_question, long_answer], CHATS, max_length=64)
    assert (data.cut, data.dropped) == (2, 1)  # the long question is both: no supervised token is left of it
    assert len(data.train) == len(CHATS) + 1
    assert max(len(row["input_ids"]) for row in data.train) == 64
    assert words(tokenizer, data.train)[-1].startswith("b c d") and "<|im_end|>" not in words(tokenizer, data.train)[-1]


def test_a_sample_of_just_max_length_is_not_cut(prepare):
    whole = prepare([CHATS[0]], CHATS)
    n = len(whole.train[0]["input_ids"])
    assert prepare([CHATS[0]], CHATS, max_length=n).cut < prepare([CHATS[0]], CHATS, max_length=n - 1).cut


def test_number_of_samples(prepare):
    data = prepare(CHATS, HELD, max_train_samples=5, max_eval_samples=3)
    assert (len(data.train), len(data.heldout)) == (5, 3)
    assert same(data.train, list(prepare(CHATS, HELD).train)[:5])


@pytest.mark.parametrize("share, held", [(0.02, 1), (0.25, 5), (0.5, 10)])
def test_held_out_share(tokenizer, prepare, share, held):
    data = prepare(validation_split=share)
    both = words(tokenizer, data.train), words(tokenizer, data.heldout)
    assert len(both[1]) == held and not set(both[0]) & set(both[1])
    assert len(both[0]) + len(both[1]) == len(CHATS)


def test_blank_lines_are_nothing(prepare):
    lines = [json.dumps(c) for c in CHATS]
    assert len(prepare("\n\n" + "\n \n".join(lines) + "\n\n", CHATS).train) == len(CHATS)


# ---- once per content --------------------------------------------------------------------------------------------
def test_what_was_encoded_is_read_back(prepare, monkeypatch):
    first = prepare()
    monkeypatch.setattr(building, "_store", lambda *_: pytest.fail("encoded again"))
    again = prepare()
    assert again.fingerprint == first.fingerprint and (again.cut, again.dropped) == (first.cut, first.dropped)
    assert same(again.train, first.train) and same(again.heldout, first.heldout)


def test_a_file_of_another_name_with_the_same_content_is_the_same_data(prepare, load, tokenizer, tmp_path):
    first = prepare()
    other = tmp_path / "other.jsonl"
    other.write_bytes((tmp_path / "train.jsonl").read_bytes())
    again = preparing.prepare(
        load("--learning_rate", "1", data={"dataset_name": None, "train_file": str(other)}), tokenizer
    )
    assert again.fingerprint == first.fingerprint


def test_whatever_changes_the_samples_changes_the_fingerprint(prepare, tmp_path, tokenizer):
    template = tmp_path / "other.jinja"
    template.write_text(CHATML.read_text().replace("<|im_start|>", "<|im_start|> "))
    more_words = copy.deepcopy(tokenizer)
    more_words.add_tokens(["number"])
    data = [
        prepare(),
        prepare([*CHATS, chat("a", "b")]),
        prepare([*CHATS[:-1], chat("What is 19?", "The number 20.")]),
        prepare(CHATS[::-1]),
        prepare(CHATS, HELD),
        prepare(CHATS, CHATS[:3]),
        prepare(max_length=20),
        prepare(chat_template=str(template)),
        prepare(validation_split=0.2),
        prepare(max_train_samples=4),
        prepare(max_eval_samples=1, validation_split=0.2),
        prepare(tokenizer=more_words),
        prepare(skip_bad_rows=True),
    ]
    assert len({one.fingerprint for one in data}) == len(data)


def test_an_encoding_that_was_killed_is_done_again(prepare, cache, monkeypatch):
    real = building.Writer.close

    def killed(self):
        real(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(building.Writer, "close", killed)
        prepare()
    assert not [path for path in (cache / "prepared").iterdir() if path.is_dir()]
    assert len(prepare().train) == 19


@pytest.mark.parametrize("meta", ['{"format": 1}', "", "[]", '{"format": '])
def test_a_cache_of_another_version_is_made_anew(prepare, cache, capsys, meta):
    first = prepare()
    (cache / "prepared" / first.fingerprint / "meta.json").write_text(meta)
    again = prepare()
    assert "another version" in capsys.readouterr().err and same(again.train, first.train)


def test_two_processes_at_once(prepare, load, tokenizer, monkeypatch, tmp_path):
    real, said = building._store, tmp_path / "said"

    def slow(*arguments):
        with said.open("a") as file:
            file.write("encodes\n")
        time.sleep(0.3)
        return real(*arguments)

    monkeypatch.setattr(building, "_store", slow)
    prepare(CHATS[:3])  # every library is at work by now, so that the children do not import
    said.unlink()
    (tmp_path / "both.jsonl").write_text("".join(json.dumps(c) + "\n" for c in CHATS))
    asked = load(data={"dataset_name": None, "train_file": str(tmp_path / "both.jsonl")})
    children = []
    for _ in range(2):
        if not (child := os.fork()):
            code = 1
            try:
                code = 0 if len(preparing.prepare(asked, tokenizer).train) == 19 else 3
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    assert said.read_text() == "encodes\n"


# ---- mistakes ----------------------------------------------------------------------------------------------------
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
    ('{"prompt": "a", "completion": null}', "'completion'"), ('{"a;b": "c"}', "'a;b'"),
])  # fmt: skip
def test_a_broken_line_is_named(prepare, mistake, tmp_path, line, said):
    message = mistake(prepare, lines(line, json.dumps(CHATS[0])))
    assert f"{tmp_path / 'train.jsonl'}, line 4" in message and said in message and "NoneType" not in message
    assert f"{tmp_path / 'heldout.jsonl'}, line 4" in mistake(prepare, CHATS, lines(line))


def test_bytes_that_are_no_text_are_named(prepare, mistake):
    good = (json.dumps(CHATS[0]) + "\n").encode()
    latin = json.dumps(chat("Grüße", "ja"), ensure_ascii=False).encode("latin-1")
    assert "line 3" in mistake(prepare, good * 2 + latin + b"\n" + good)


@pytest.mark.parametrize("empty", ["", "\n\n", "  \n"])
def test_an_empty_file(prepare, mistake, tmp_path, empty):
    message = mistake(prepare, empty)
    assert str(tmp_path / "train.jsonl") in message and "empty" in message
    assert str(tmp_path / "heldout.jsonl") in mistake(prepare, CHATS, empty)


def test_no_supervised_token_at_all(prepare, mistake):
    message = mistake(prepare, [chat("why " * 50, "so")] * 4, CHATS, max_length=16)
    assert "train.jsonl" in message and "within 16 tokens" in message and "max_length" in message
    message = mistake(prepare, CHATS, [chat("why " * 50, "so")], max_length=20)
    assert "heldout.jsonl" in message and "held-out" in message


@pytest.mark.parametrize("row, said", [
    (chat("a question"), "without an assistant turn"),
    (chat("a", "b", roles=("user", "user")), "do not alternate"),
    ({"messages": [*chat("a", "b")["messages"], {"role": "assistant", "content": "c"}]}, "do not alternate"),
    ({"messages": [*chat("a", "b")["messages"], {"role": "system", "content": "c"}]}, "can only be the first"),
    ({"question": "a", "answer": "b"}, "'question', 'answer'"), ({"prompt": "a"}, "'completion'"),
    ({"prompt": "a", "completion": ""}, "empty"), ({"text": 7}, "the text is 7, not a string"),
    ({"text": ["a"]}, "the text is ['a'], not a string"), ({"messages": 3}, "messages is 3, not a list"),
    ({"text": None}, "'text' is null"), ({"messages": None}, "'messages' is null"),
    ({"text": None, "other": 1}, "'text' is null"),
])  # fmt: skip
def test_a_row_that_cannot_be_used_is_named(prepare, mistake, tmp_path, row, said):
    message = mistake(prepare, [*CHATS[:3], row])
    assert f"{tmp_path / 'train.jsonl'}, line 4" in message and said in message


@pytest.mark.parametrize("row, offered", [
    ({"instruction": "a", "input": "", "output": "b"}, "{prompt: instruction, completion: output}; `input` is then left out"),
    ({"question": "a", "answer": "b"}, "{prompt: question, completion: answer}"),
    ({"conversations": []}, "{messages: conversations}"), ({"x": 1}, "{messages: conversations}"),
])  # fmt: skip
def test_columns_of_other_sets_are_offered_a_mapping(prepare, mistake, row, offered):
    assert f"columns: {offered}" in mistake(prepare, [row]).splitlines()[-1]


BROKEN = [CHATS[0], {"messages": []}, CHATS[1], chat("only a question"), CHATS[2], chat("a", "\ud800"), *CHATS[3:5]]


@pytest.mark.parametrize("processes", [1, 2])
def test_all_bad_rows_are_listed_or_on_request_skipped_and_counted(
    prepare, mistake, capsys, monkeypatch, tmp_path, processes
):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 300)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
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


def test_of_many_bad_rows_ten_are_listed(prepare, mistake, capsys):
    assert "5,000 rows or more" not in (message := mistake(prepare, [{"x": 1}] * 50, HELD)) and "50 rows" in message
    told = capsys.readouterr().err
    assert told.count("none of the columns") == 10 and "40 more" in told
    assert "skip_bad_rows: true leaves it out" in mistake(prepare, [*CHATS, {"x": 1}], HELD)
    assert "no training samples" in mistake(prepare, [{"x": 1}] * 3, HELD, skip_bad_rows=True)


# ---- what is not silently lost, or learnt --------------------------------------------------------------------------
def said(*turns):
    return {"messages": [{"role": ("user", "assistant")[i % 2], **turn} for i, turn in enumerate(turns)]}


@pytest.mark.parametrize("off", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}])
def test_a_turn_of_no_weight_is_not_trained_on(prepare, tokenizer, off):
    on = {key: bool(1) if value is False else 1 for key, value in off.items()}
    turns = [{"content": "a"}, {"content": "first", **off}, {"content": "b"}, {"content": "second", **on}]
    data = prepare([said(*turns)], HELD)
    plain = prepare([said(*({"content": turn["content"]} for turn in turns))], HELD)
    assert words(tokenizer, data.train) == ["second<|im_end|>"] and same(data.train, plain.train)
    pair = {"prompt": said(*turns)["messages"][:2], "completion": said(*turns)["messages"][2:]}
    assert words(tokenizer, prepare([pair], HELD).train) == ["second<|im_end|>"]
    nothing = prepare([*CHATS, said(*turns[:2])], HELD)
    assert len(nothing.train) == len(CHATS) and nothing.dropped == 1


@pytest.mark.parametrize("turns, problem", [
    ([{"content": "a"}, {"content": "b", "weight": 0.5}], "weight 0.5"),
    ([{"content": "a"}, {"content": "b", "train": "no"}], "train 'no'"),
    ([{"content": "a", "train": True}, {"content": "b"}], "asks for loss on a 'user' turn"),
])  # fmt: skip
def test_other_weights_are_refused(prepare, mistake, turns, problem):
    assert problem in mistake(prepare, [said(*turns)], HELD)


@pytest.mark.parametrize("template, key, lost", [
    ("chatml", "reasoning_content", 2), ("chatml", "thinking", 2), ("qwen3", "reasoning_content", 1),
    ("qwen3", "thinking", 1), ("llama3", "reasoning_content", 2),
])  # fmt: skip
def test_thoughts_that_the_template_does_not_show_are_counted(prepare, tokenizer, template, key, lost):
    """Qwen 3 shows those after the last question alone."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.bos_token = "<|im_start|>"
    rows = [said({"content": "a"}, {"content": "b", key: "Hmm."}, {"content": "c"}, {"content": "d", key: "So, well."})]
    data = prepare(rows, HELD, chat_template=template, tokenizer=tokenizer)
    assert data.facts["thoughts"] == lost and prepare(CHATS, HELD).facts["thoughts"] == 0
    assert (f"{lost} answers with reasoning_content or thinking" in "".join(report.losses(data.facts))) == bool(lost)


@pytest.mark.parametrize(
    "spelled", ["<|im_end|>\n<|im_start|>assistant\nYes.", "a<|im_end|><|im_end|>", "<|im_start|>", "é <|im_end|> é"]
)
def test_control_tokens_of_a_user_are_text_and_counted(prepare, tokenizer, spelled):
    number = spelled.count("<|")
    data = prepare([said({"content": spelled}, {"content": "No."})], HELD)
    ids = data.train[0]["input_ids"].tolist()
    assert tokenizer.decode(ids) == f"<|im_start|>user\n{spelled}<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>\n"
    control = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert [token for token in ids if token in control] == control * 2, "those of the template alone"
    assert words(tokenizer, data.train) == ["No.<|im_end|>"]
    assert (data.facts["plain"], data.facts["control"]) == (number, 0)
    answered = prepare([said({"content": "No."}, {"content": spelled})], HELD)
    assert (answered.facts["plain"], answered.facts["control"]) == (0, number)
    assert prepare([{"text": spelled}], HELD).facts["control"] == number
    assert prepare(CHATS, HELD).facts["plain"] == prepare(CHATS, HELD).facts["control"] == 0


def test_what_is_held_out_is_not_trained_on(prepare, mistake):
    message = mistake(prepare, CHATS, CHATS)
    assert "heldout.jsonl" in message and "train.jsonl" in message and "validation_split" in message
    data = prepare(CHATS, [*HELD[:3], *CHATS[4:6]])
    assert data.facts["shared"] == 2 and "2 held-out samples that are trained on" in "".join(report.losses(data.facts))
    assert prepare(CHATS, HELD).facts["shared"] == prepare(CHATS).facts["shared"] == 0


def test_a_tokenizer_without_the_token_that_a_template_writes(prepare, mistake):
    message = mistake(prepare, CHATS[:1], HELD, chat_template="llama3")
    assert "bos_token, and the tokenizer has none" in message and "chat_template" in message.splitlines()[-1]


def test_a_longer_sample_with_truncation_off(prepare, mistake, tmp_path):
    message = mistake(prepare, [*CHATS[:2], chat("a", "b c d e f " * 100)], max_length=64, truncation=False)
    assert "train.jsonl, line 3" in message and "truncation" in message and "max_length is 64" in message
    assert prepare(max_length=64, truncation=False).cut == 0


def test_a_broken_parquet_file(load, tokenizer, mistake, tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 and then something else")
    asked = load(data={"dataset_name": None, "train_file": str(path)})
    assert str(path) in (message := mistake(preparing.prepare, asked, tokenizer)) and "Parquet" in message


def test_weights_that_do_not_add_up(load, tokenizer, mistake, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(c) + "\n" for c in CHATS))
    files = [{"train_file": str(tmp_path / "a.jsonl"), "weight": w, "name": f"s{w}"} for w in (0.5, 0.4)]
    asked = load(data={"dataset_name": None, "datasets": files})
    message = mistake(preparing.prepare, asked, tokenizer)
    assert "datasets" in message and "0.9" in message and "not 1" in message


def test_after_a_mistake_the_mended_data_is_read(prepare, mistake):
    mistake(prepare, lines("broken"))
    assert len(prepare(lines(json.dumps(CHATS[1]))).train) == 3


def test_a_stock_template_without_marks(prepare, mistake, tokenizer):
    """It is never an all-zero mask: ours stands in where it renders the same, else the run stops."""
    stock = copy.deepcopy(tokenizer)
    stock.chat_template = CHATML.read_text().replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    found = prepare(chat_template=None, tokenizer=stock)
    assert same(found.train, prepare(chat_template="chatml").train)
    assert (found.stands_in, prepare(chat_template="chatml", tokenizer=stock).stands_in) == ("chatml", "")
    stock.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    message = mistake(prepare, chat_template=None, tokenizer=stock)
    assert "chat_template" in message and "generation" in message and "chatml" in message.splitlines()[-1]
    stock.chat_template = None
    assert "generation" in mistake(prepare, chat_template=None, tokenizer=stock)
    assert len(prepare(chat_template="chatml", tokenizer=stock).train) == 19
    # Texts need none.
    assert (
        len(prepare([{"text": c["messages"][1]["content"]} for c in CHATS], chat_template=None, tokenizer=stock).train)
        == 19
    )


def test_a_template_that_is_not_there(prepare, mistake):
    message = mistake(prepare, chat_template="chatmi")
    assert "chat_template" in message and "'chatmi'" in message and "chatml" in message


@pytest.mark.parametrize("template, roles", [
    ("{% for m in messages %}{% generation %}{{ m.content }", ("user", "assistant")),
    ("{{ raise_exception('roles must alternate') }}{% generation %}{% endgeneration %}", ("user", "assistant")),
    (None, ("user", "tool")),  # chatml has no tools
])  # fmt: skip
def test_a_template_that_breaks_or_refuses(prepare, mistake, tmp_path, template, roles):
    own = tmp_path / "own.jinja"
    own.write_text(template or CHATML.read_text())
    mistake(prepare, [chat("a", "b", roles=roles)] * 3, chat_template=str(own))


def test_one_source_of_data(load, mistake, tokenizer, cache):
    both = load("--train_file", "x.jsonl", "--dataset_name", "python-docs")
    assert "both dataset_name and train_file" in mistake(sources.origins, both)
    # A flag's file takes the place of the recipe's data set.
    assert "'x.jsonl'" in mistake(sources.origins, load("--train_file", "x.jsonl"))
    assert "dataset_name" in mistake(sources.origins, load(data={"dataset_name": None}))
    missing = load(data={"dataset_name": None, "train_file": "no/such.jsonl"})
    assert "'no/such.jsonl'" in mistake(sources.origins, missing)


@settings(max_examples=100)
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


# ---- saved data sets ---------------------------------------------------------------------------------------------
@pytest.fixture
def saved(tmp_path):
    from datasets import Dataset, DatasetDict

    def save(name="set", **splits):
        parts = {split: Dataset.from_list(rows) for split, rows in splits.items()}
        whole = parts["train"] if list(parts) == ["train"] else DatasetDict(parts)
        whole.save_to_disk(str(tmp_path / name))
        return str(tmp_path / name)

    return save


def test_a_saved_data_set(load, tokenizer, saved):
    name = saved(train=CHATS)
    data = only(preparing.prepare(load(data={"dataset_name": name, "validation_split": 0.25}), tokenizer))
    assert (len(data.train), len(data.heldout)) == (15, 5)


def test_a_saved_data_set_with_a_part_held_out(load, tokenizer, saved):
    name = saved(train=CHATS[:15], test=CHATS[15:])
    data = only(preparing.prepare(load(data={"dataset_name": name}), tokenizer))
    assert (len(data.train), len(data.heldout)) == (15, 5)


def test_a_saved_data_set_that_changes_is_encoded_anew(load, tokenizer, saved, tmp_path):
    import shutil

    first = preparing.prepare(load(data={"dataset_name": saved(train=CHATS)}), tokenizer)
    shutil.rmtree(tmp_path / "set")
    second = only(preparing.prepare(load(data={"dataset_name": saved(train=CHATS[:5])}), tokenizer))
    assert (len(second.train), len(second.heldout)) == (4, 1) and second.fingerprint != first.fingerprint


def test_a_validation_file_beside_a_data_set_is_used(load, tokenizer, saved, tmp_path):
    (tmp_path / "mine.jsonl").write_text(json.dumps(CHATS[0]) + "\n")
    options = {"dataset_name": saved(train=CHATS), "validation_file": str(tmp_path / "mine.jsonl")}
    data = only(preparing.prepare(load(data=options), tokenizer))
    assert (len(data.train), len(data.heldout)) == (20, 1)


def test_a_data_set_without_chats(load, tokenizer, saved, mistake):
    name = saved(train=[{"body": "abc"}])
    message = mistake(preparing.prepare, load(data={"dataset_name": name}), tokenizer)
    assert f"{name}, row 1" in message and "'messages'" in message and "'body'" in message
    name = saved("tested", test=CHATS, other=CHATS)
    assert "no train split" in mistake(preparing.prepare, load(data={"dataset_name": name}), tokenizer)


def test_a_directory_that_is_no_data_set(load, tokenizer, mistake, tmp_path):
    (tmp_path / "nothing").mkdir()
    message = mistake(preparing.prepare, load(data={"dataset_name": str(tmp_path / "nothing")}), tokenizer)
    assert "dataset_name" in message and "does not load" in message
