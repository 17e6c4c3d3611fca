"""Small files that expand beyond all measure, and what takes for ever, end in one message, soon and in little memory."""

import asyncio
import json
import os
import resource
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet
import pytest
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.utils.chat_template_utils import render_jinja_template

from brigade import __main__ as verbs
from brigade.errors import UserError
from brigade.report import library
from brigade.train.data import chat_template, json_rows, rows, sources, table_rows
from brigade.train.data.chat_template import ChatTemplates
from brigade.train.data.data_files import paths_of
from brigade.train.data.encode import Encoder, LoadedEncoder
from brigade.train.host import files, limits
from brigade.train.local import coordinator
from brigade.train.model import base_weights
from brigade.train.model.config_json import read_config
from brigade.train.recipe import flags
from brigade.train.recipe.files import read_yaml
from brigade.train.run import events
from brigade.train.step.checkpoints import Checkpoints
from brigade.train.strategy import deepspeed_config
from testing.ranks import REPOSITORY

MIB = 2**20


# ---- YAML and JSON -----------------------------------------------------------------------------------------------
def laughs(levels: int = 12) -> str:
    """Each line is an alias of the line above, nine times."""
    lines = ["training:", "  a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


MERGES = "a0: &a0 {x: 1}\n" + "\n".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 12))


@pytest.mark.parametrize("text", [laughs(), MERGES], ids=["aliases", "merges"])
def test_aliases_that_stand_for_billions_are_refused(text, tmp_path, mistake):
    (tmp_path / "r.yaml").write_text(text)
    began = time.monotonic()
    assert "100,000 keys" in mistake(read_yaml, tmp_path / "r.yaml")
    assert "100,000 keys" in mistake(flags.load, ["--recipe", str(tmp_path / "r.yaml")])
    assert time.monotonic() - began < 2


def test_a_ds_config_of_aliases_in_a_recipe_is_refused(write_recipe, mistake):
    path = write_recipe(laughs().replace("training:", "cluster:\n ds_config:").replace("\n  a", "\n   a"))
    assert "100,000 keys" in mistake(flags.load, ["--recipe", str(path)])


def test_few_aliases_are_read(tmp_path):
    (tmp_path / "r.yaml").write_text("a: &a {x: 1}\nb: *a\nc:\n  <<: *a\n  y: 2\n")
    assert read_yaml(tmp_path / "r.yaml") == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}


@pytest.mark.parametrize("text", ["a: " + "9" * 200_000, "a: x\n" * 300_000, "a: '" + "x" * 2_000_000 + "'"])
def test_numbers_depths_and_sizes_of_yaml_end_in_a_message(text, tmp_path, mistake):
    (tmp_path / "r.yaml").write_text(text)
    mistake(read_yaml, tmp_path / "r.yaml")


def test_json_that_nests_too_deep_ends_in_a_message(tmp_path, mistake):
    path = tmp_path / "config.json"
    path.write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    mistake(read_config, path)
    mistake(deepspeed_config.read, str(path), "flag --ds_config")
    path.write_text('{"a": "' + "x" * limits.CONFIG_BYTES + '"}')
    assert "1,000,000 bytes" in mistake(deepspeed_config.read, str(path), "flag --ds_config")


def test_a_line_of_events_that_nests_too_deep_is_left_out(tmp_path):
    (tmp_path / events.FILE).write_text("[" * 100_000 + '\n{"event": "step"}\n')
    assert events.read(tmp_path) == [{"event": "step"}]


def test_weights_whose_header_claims_gigabytes_are_damaged(tmp_path, mistake):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 10 * 2**30) + b"{}")
    assert "header too large" in mistake(base_weights.check, str(tmp_path), False)


# ---- rows --------------------------------------------------------------------------------------------------------
def parquet(path, texts: int, size: int):
    """A file of some hundred bytes in which one text of `size` bytes stands so many times."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * texts, pa.int32()), pa.array(["a" * size]))
    how = {"compression": "zstd", "store_schema": False, "dictionary_pagesize_limit": 2**30}
    pa.parquet.write_table(pa.table({"text": column}), path, **how)
    return path


# Arrow's usual pool asks the kernel for a GiB at a time, and each of its threads takes 8 MiB. The limit is of what a process asks
# for: room that others' tests have left in its heap would hold a row.
EXACT_MEMORY = """
import sys
from pathlib import Path
import pyarrow as pa
from brigade.errors import UserError
from brigade.train.data import table_rows

pa.set_memory_pool(pa.system_memory_pool())
pa.set_cpu_count(1)
pa.set_io_thread_count(1)
table_rows.DECODED_BYTES = 50 * 2**20
rows, row = map(Path, sys.argv[1:])
before = pa.total_allocated_bytes()
chunks = table_rows.Parquet([rows]).chunks()
first = [next(chunks) for _ in range(3)]
assert [len(list(chunk.rows())) for chunk in first] == [1, 1, 1]
assert [chunk.after for chunk in first] == [(0, 1), (0, 2), (0, 3)]
assert first[2].where.place(0) == f"{rows}, row 3"
assert pa.total_allocated_bytes() - before < table_rows.DECODED_BYTES
del chunks, first
try:
    list(table_rows.Parquet([row]).chunks())
except UserError as error:
    print(error)
"""


def test_a_parquet_file_that_expands_is_read_row_by_row_and_a_row_beyond_all_measure_is_named(tmp_path):
    rows, row = parquet(tmp_path / "rows.parquet", 1000, MIB // 5), parquet(tmp_path / "row.parquet", 1, 120 * MIB)
    assert rows.stat().st_size < 1000
    done = subprocess.run(
        [sys.executable, "-c", EXACT_MEMORY, rows, row], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stderr
    assert f"{row}, row 1\n" in done.stdout, done.stdout


def test_reading_row_by_row_gives_the_same_rows(tmp_path):
    table = pa.table({"text": [str(n) for n in range(25)]})
    pa.parquet.write_table(table, tmp_path / "x.parquet", row_group_size=10)
    one = table_rows.Parquet([tmp_path / "x.parquet"])
    found = [(done, batch.to_pylist()[0]["text"]) for batch, done in one._batches(one.paths[0], 7, rows=1)]
    assert found == [(n + 1, str(n)) for n in range(7, 25)]


def test_a_line_without_end_is_named(tmp_path, monkeypatch, mistake):
    monkeypatch.setattr(json_rows, "ROW_BYTES", 3 * MIB)
    path = tmp_path / "x.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "a"}\n{"text": "b"}\n{"text": "')
        file.truncate(10 * MIB)
    said = mistake(list, json_rows.JsonLines([path]).chunks())
    assert f"{path}, line 3" in said and "3 MiB" in said and "ROW_BYTES" in said


def test_a_sparse_document_of_a_terabyte_is_refused(tmp_path, monkeypatch, mistake):
    monkeypatch.setattr(json_rows, "ROW_BYTES", MIB)
    path = tmp_path / "x.json"
    path.write_text("[")
    os.truncate(path, 2**40)
    assert json_rows.is_document(path)
    assert "1024 GiB" in mistake(list, json_rows.JsonDocuments([path]).chunks())


def test_a_cell_without_end_is_named(tmp_path, monkeypatch, mistake):
    monkeypatch.setattr(table_rows, "ROW_BYTES", 1000)
    path = tmp_path / "x.csv"
    path.write_text("text\nshort\n" + "x" * 2000 + "\n")
    assert f"{path}, line 3" in mistake(list, table_rows.Csv([path]).chunks())


def test_a_number_of_a_million_digits_is_a_bad_row(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": ' + "9" * 10**6 + "}\n")
    [(_, row)] = next(json_rows.JsonLines([path]).chunks()).rows()
    assert isinstance(row, rows.BadRow)


# ---- templates ---------------------------------------------------------------------------------------------------
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
CHAT = [{"role": "user", "content": "a"}]
MARKS = "{% generation %}{{ messages[0].content }}{% endgeneration %}"


def encoder(template: str) -> LoadedEncoder:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str()
    return LoadedEncoder(Encoder(words, ChatTemplates(template), {}, 0, 64, True, True))


@pytest.mark.parametrize("trap", [NESTED, "{{ 9 ** (9 ** 9) }}"], ids=["ranges", "powers"])
def test_a_template_that_takes_for_ever_is_stopped(trap, monkeypatch, mistake):
    monkeypatch.setattr(chat_template, "TEMPLATE_SECONDS", 0.2)
    began = time.monotonic()
    assert "longer than 0.2 s" in mistake(encoder(trap + MARKS).chats.render, rows.Chat(CHAT))
    assert time.monotonic() - began < 2


def test_the_tokenizers_own_template_is_stopped_too(monkeypatch, load, mistake):
    class Tokenizer:
        chat_template = NESTED

        def apply_chat_template(self, **how):
            return render_jinja_template([CHAT], chat_template=how["chat_template"])

    monkeypatch.setattr(chat_template, "TEMPLATE_SECONDS", 0.2)
    settings = load("--chat_template", "null")
    assert "TEMPLATE_SECONDS" in mistake(chat_template.load, settings, Tokenizer())


def test_a_template_that_wants_all_memory_is_stopped(tmp_path, monkeypatch, mistake):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}))
    chunk = next(json_rows.JsonLines([path]).chunks())
    said = mistake(encoder("{{ 'a' * 10 ** 11 }}" + MARKS).encode, chunk, {})
    assert f"{path}, line 1" in said and "4 GiB" in said


LARGE = {
    "product": "{{ 'a' * 10 ** 7 }}",
    "replaced": "{{ ('a' * 1000) | replace('a', 'b' * 10000) }}",
    "joined": "{{ range(99999) | join('a' * 100) }}",
    "padded": "{{ '%10000000d' % 1 }}",
    "centred": "{{ 'a' | center(10 ** 7) }}",
    "doubled": "{% set n = namespace(t='a') %}{% for a in range(24) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
    "list": "{{ [1] * 10 ** 6 }}",
    "indented": "{{ ('a\\n' * 1000) | indent(10000) }}",
}


@pytest.mark.parametrize("trap", LARGE.values(), ids=LARGE)
def test_a_template_that_writes_far_more_than_its_chat_is_refused(trap):
    with pytest.raises(rows.BadRow, match="letters for a chat that has"):
        encoder(trap + MARKS).chats.render(rows.Chat(CHAT))


def test_a_long_chat_is_rendered():
    chat = [{"role": "user", "content": "a" * 2**20}]
    assert len(encoder(MARKS).chats.render(rows.Chat(chat)).text) == 2**20


@pytest.mark.parametrize("trap", ["{{ 'a' * 10 ** 11 }}", "{{ [0] * 10 ** 10 }}", "{{ '%100000000000d' % 1 }}"])
def test_a_question_and_a_trial_of_a_template_have_a_limit_of_memory(trap, mistake):
    assert "more than 1 GiB" in mistake(encoder(trap + MARKS).prompt, CHAT)
    render = chat_template.bounded_template()(lambda: render_jinja_template([CHAT], chat_template=trap))
    assert "TEMPLATE_BYTES" in mistake(render)


# ---- the limits themselves ---------------------------------------------------------------------------------------
def test_a_limit_of_time_leaves_nothing_behind():
    with limits.time_limit(0.05):
        pass
    time.sleep(0.1)
    with pytest.raises(TimeoutError, match="longer than"), limits.time_limit(0.05):
        time.sleep(1)


def test_a_thread_has_no_limit_of_time():
    found = []

    def work():
        with limits.time_limit(0.01):
            time.sleep(0.05)
        found.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found


def test_a_limit_of_memory_is_lifted_again():
    with pytest.raises(MemoryError), limits.memory_limit(50 * MIB):
        bytearray(500 * MIB)
    assert len(bytearray(100 * MIB)) == 100 * MIB


def test_an_error_of_the_body_passes():
    with pytest.raises(UserError), limits.memory_limit(), limits.time_limit(9):
        raise UserError("place", "problem", "cure")


@pytest.mark.parametrize("name", ["pipe", "zeros"])
def test_data_that_never_ends_is_refused(name, tmp_path, mistake):
    path = tmp_path / f"{name}.jsonl"
    os.mkfifo(path) if name == "pipe" else path.symlink_to("/dev/zero")
    assert "a pipe, a socket or a device" in mistake(sources.files_of, str(path), "flag --train_file")


# ---- limits of what strangers name -----------------------------------------------------------------------------------
def test_a_connection_that_cannot_be_accepted_is_a_line(capfd):
    async def refuse():
        asyncio.get_running_loop().set_exception_handler(coordinator._say)
        message = "socket.accept() out of system resource"
        asyncio.get_running_loop().call_exception_handler(
            {"message": message, "exception": OSError(24, "Too many open files")}
        )

    asyncio.run(refuse())
    said = capfd.readouterr().err
    assert said == "coordinator: socket.accept() out of system resource: [Errno 24] Too many open files\n"


def test_a_small_file_is_read_with_little_memory(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    tracemalloc.start()
    assert files.read(tmp_path / "file") == b"x" * 100_000
    assert tracemalloc.get_traced_memory()[1] < 2**20  # of 256 MiB that it may have
    tracemalloc.stop()
    with pytest.raises(OSError, match="larger than 99,999 bytes"):
        files.read(tmp_path / "file", 99_999)
    assert files.read(tmp_path / "file", 100_000) == b"x" * 100_000


def test_report_says_that_its_pictures_need_addresses(monkeypatch, mistake):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2_000_000 << 10, -1))
    said = mistake(library.picture, {"config": {}}, "")
    assert "ulimit -v 2000000" in said and "--page_only" in said


def test_a_verb_without_memory_ends_with_a_message(monkeypatch, capsys):
    def none(_):
        raise MemoryError

    monkeypatch.setattr("brigade.report.command.run", none)
    assert verbs.main(["report", "somewhere"]) == 1
    assert "no more memory" in capsys.readouterr().err


@pytest.mark.parametrize("named, kept", [
    ("/home/stranger/model/checkpoint-4", False), ("../../secret", False), ("checkpoint-4/..", False),
    ("/elsewhere/moved/checkpoint-8", True), ("outputs/before/checkpoint-8", True),
])  # fmt: skip
def test_the_best_checkpoint_is_one_of_the_run_that_continues(named, kept, tmp_path, capsys, monkeypatch):
    """A state's path is where the run lay when it was written, or what somebody wrote into it."""
    newest = tmp_path / "checkpoint-12"
    for folder in (tmp_path / "checkpoint-8", newest):
        folder.mkdir()
    best = {"best_metric": 1.0, "best_model_checkpoint": named, "best_global_step": 8}
    TrainerState(train_batch_size=8, **best).save_to_json(str(newest / "trainer_state.json"))
    monkeypatch.setattr(TrainerState, "init_training_references", lambda *_: None)
    of_transformers = SimpleNamespace(
        callback_handler=SimpleNamespace(callbacks=[]),
        control=TrainerControl(),
        args=TrainingArguments(str(tmp_path), use_cpu=True),
        _train_batch_size=8,
        _load_callback_state=lambda: None,
    )
    Trainer._init_training_state(of_transformers, 20, 20, 1, str(newest), None)
    state = of_transformers.state
    run = SimpleNamespace(
        settings=SimpleNamespace(remote="", resume_from_checkpoint=None), world=SimpleNamespace(is_main_rank=True)
    )
    trainer = SimpleNamespace(run=run, state=state, args=SimpleNamespace(output_dir=str(tmp_path)))
    Checkpoints(trainer, 0).begin(newest)
    if kept:
        assert (state.best_model_checkpoint, state.best_global_step) == (str(tmp_path / "checkpoint-8"), 8)
    else:
        assert state.best_metric is state.best_model_checkpoint is state.best_global_step is None
        said = capsys.readouterr().out
        assert "is not beside it" in said and Path(named).name in said


def test_what_a_recipe_has_fetched_is_said(tmp_path, own_cache, capsys):
    (tmp_path / "rows.jsonl").write_text("{}")
    for said in (f"fetching 'file://{tmp_path}/rows.jsonl' (theirs.yaml: data.train_file)", ""):
        (copy,) = paths_of(f"file://{tmp_path}/rows.jsonl", "theirs.yaml: data.train_file")
        assert copy.read_text() == "{}" and capsys.readouterr().out.strip() == said
