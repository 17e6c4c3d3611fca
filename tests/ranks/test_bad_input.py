"""Whatever is wrong ends with exit code 2 and one short message by one rank, before the model is built, and leaves
no process behind; a fault in training ends all ranks with one traceback."""

import datetime
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from transformers import TrainerCallback

from brigade.distributed.ranks import fail
from testing.command_line import as_flags

REPOSITORY = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_name("bad_input")
BIN = Path(sys.executable).parent
HOST = socket.gethostname()
MESSAGE_LINES = 4
TRACEBACK_LINES = 45
GOOD = ["--dataset_name=", "--train_file", "good.jsonl", "--max_length", "32"]


# ---- commands in processes of their own ----------------------------------------------------------------------------
@dataclass
class Ended:
    """How a command ended. told: what its ranks, not their launcher, wrote to stderr; seconds: it took; at: when."""

    code: int
    stdout: str
    stderr: str
    told: list[str]
    seconds: float
    at: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launched(launcher: str) -> list[str]:
    """The words before `train.py`, for two ranks on this host."""
    ddp = REPOSITORY / "accelerate_configs" / "ddp_1x2.yaml"
    return {
        "python": [sys.executable],
        "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2"],
        "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", str(free_port())],
        "accelerate": [
            str(BIN / "accelerate"),
            "launch",
            "--config_file",
            str(ddp),
            "--main_process_port",
            str(free_port()),
        ],
    }[launcher]


def train(launcher: str, folder: Path, *flags: str, fault: str = "") -> Ended:
    """Run train.py in `folder`; fails when it leaves a process behind."""
    mark = uuid.uuid4().hex
    environment = os.environ | {
        "BRIGADE_TEST_MARK": mark,
        "BRIGADE_TEST_FAULT": fault,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(FAULTS),
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }
    command = [*launched(launcher), str(REPOSITORY / "train.py"), "--output_dir", str(folder / "run"), *flags]
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        encoding="utf-8",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        stdout, stderr = process.communicate(timeout=300)
        at = time.time()
        seconds = time.monotonic() - began
        left = surviving(mark, patience=2)
        assert not left, f"left behind: {left}\n{stderr}"
    finally:
        for survivor in marked(mark):
            survivor.kill()
    return Ended(process.returncode, stdout, stderr, ranks_part(stderr), seconds, at)


def ranks_part(stderr: str) -> list[str]:
    """The lines before those of torchrun's and accelerate's own, and without what a busy machine adds: that a rank waits."""
    launcher = re.compile(r"^[WE]\d{4} .*torch/distributed/(elastic|run)")
    lines = [line for line in stderr.rstrip().splitlines() if " is waiting for " not in line]
    return lines[: next((n for n, line in enumerate(lines) if launcher.match(line)), len(lines))]


def marked(mark: str) -> list[psutil.Process]:
    """The running processes that descend from a command, whatever session they moved to."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("BRIGADE_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def surviving(mark: str, patience: float) -> list[str]:
    deadline = time.monotonic() + patience
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [str(process) for process in left]


def assert_one_message(ended: Ended, launcher: str, rank: int, *words: str) -> None:
    """The ranks wrote the message of one of them to stderr and nothing else anywhere; the exit code fits."""
    told = "\n".join(ended.told)
    assert ended.code == (1 if launcher in ("torchrun", "accelerate") else 2), ended.stderr
    assert len(ended.told) <= MESSAGE_LINES, told
    size = 1 if launcher == "python" else 2
    assert ended.told[0].startswith(f"error on {HOST}, rank {rank} of {size}: "), told
    assert ended.told[-1].startswith("  cure: "), told
    assert ended.stderr.count("error on ") == ended.stderr.count("cure: ") == 1, ended.stderr
    for word in words:
        assert word in told
    aside = [line for line in ended.stdout.splitlines() if not re.match(r"^\[.*\] \[(INFO|WARNING|ERROR)\] \[", line)]
    assert not aside, ended.stdout
    if launcher in ("torchrun", "accelerate"):  # their last words quote ours
        root = ended.stderr.partition("Root Cause")[2]
        assert f"rank      : {rank} " in root and "(reported above)" in root and words[0] in root, root


def chats(path: Path, count: int = 40) -> Path:
    lines = []
    for n in range(count):
        answer = {"role": "assistant", "content": f"{n + 1} follows {n}."}
        lines.append(json.dumps({"messages": [{"role": "user", "content": f"What follows {n}?"}, answer]}) + "\n")
    path.write_text("".join(lines))
    return path


def broken(path: Path) -> Path:
    lines = chats(path).read_text().splitlines()
    path.write_text("\n".join([*lines[:2], lines[2][:30], *lines[3:]]))
    return path


@pytest.fixture
def folder(tmp_path):
    """A directory with chats, the same with a broken third line, and a ds_config that contradicts the recipe."""
    chats(tmp_path / "good.jsonl")
    broken(tmp_path / "broken.jsonl")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "config.json").write_text('{"model_type": "bert"}')
    config = json.loads((REPOSITORY / "ds_configs/zero2.json").read_text())
    (tmp_path / "clip.json").write_text(json.dumps(config | {"gradient_clipping": 0.5}))
    return tmp_path


TYPO = (["--lerning_rate", "3"], ["--lerning_rate", "did you mean 'learning_rate'?"])
CONTRADICTION = (
    ["--ds_config", "clip.json"], ["clip.json: gradient_clipping", "0.5", "max_grad_norm is ", '"auto"'],
)  # fmt: skip
BROKEN_LINE = (["--dataset_name=", "--train_file", "broken.jsonl"], ["broken.jsonl, line 3", "not JSON", "fix"])


NO_GPU = (["--attn_implementation", "flash_attention_2"], ["flag --attn_implementation", "needs a GPU", "sdpa"])
CASES = {  # one mistake of each stage under each launcher; "late": rank 0, which tells it, comes four seconds late
    "flag": (TYPO, ["python", "torchrun", "deepspeed", "accelerate"], ""),
    "ds_config": (CONTRADICTION, ["python"], ""),
    "ds_config, late": (CONTRADICTION, ["torchrun", "deepspeed", "accelerate"], "slow"),
    "device": (NO_GPU, ["python", "torchrun", "deepspeed", "accelerate"], ""),
    "data": (BROKEN_LINE, ["python", "torchrun", "deepspeed", "accelerate"], ""),
}


ONCE = {
    ("flag", "accelerate"),
    ("ds_config", "python"),
    ("device", "python"),
    ("data", "torchrun"),
}  # in `make test`


@pytest.mark.parametrize(
    "case, launcher",
    [
        pytest.param(case, launcher, marks=() if (case, launcher) in ONCE else pytest.mark.slow)
        for case in CASES
        for launcher in CASES[case][1]
    ],
)
def test_one_rank_tells_a_mistake_that_all_make(case, launcher, folder):
    (flags, words), _, fault = CASES[case]
    ended = train(launcher, folder, *flags, fault=fault)
    assert_one_message(ended, launcher, 0, *words)
    assert not (folder / "run").exists()
    assert not fault or ended.seconds > 4


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "accelerate"])
def test_the_only_rank_that_sees_a_mistake_tells_it(launcher, folder):
    ended = train(launcher, folder, "--dataset_name=", "--train_file", "good.jsonl", fault="elsewhere")
    assert_one_message(ended, launcher, 1, "--train_file", "no data file 'good.jsonl'", "spelling")
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    "launcher, strategy",
    [("torchrun", "none"), pytest.param("deepspeed", "ds_configs/zero2.json", marks=pytest.mark.slow)],
)
def test_a_fault_in_training_ends_all_ranks_with_one_traceback(launcher, strategy, folder):
    flags = [*GOOD, *as_flags(max_steps=30, global_batch_size=4, save_steps=None, eval_steps=None)]
    ended = train(launcher, folder, *flags, "--ds_config", strategy, fault="step")
    told = "\n".join(ended.told)
    assert ended.code == 1, ended.stderr
    starts = [n for n, line in enumerate(ended.told) if line.startswith("error on ")]
    assert len(starts) == 1 and told.count("Traceback (most recent call last)") == 1, told
    assert ended.told[starts[0]].startswith(f"error on {HOST}, rank 1 of 2: ValueError"), told
    assert "ValueError: the third step fails on this rank" in told
    others = [line for line in ended.told if line.startswith("rank 0 ")]
    assert len(others) <= 1 and all("another rank failed first" in line for line in others), told
    assert len(ended.told) - len(others) <= TRACEBACK_LINES, told
    assert not (folder / "run" / "success.json").exists()
    assert ended.at - float((folder / "failed_at").read_text()) < 30


@pytest.mark.slow
@pytest.mark.parametrize("launcher, strategy", [("deepspeed", "ds_configs/zero2.json"), ("accelerate", "none")])
def test_a_rank_that_hangs_is_named_under_launchers_that_know_nothing_of_it(launcher, strategy, folder):
    flags = [*GOOD, *as_flags(max_steps=30, global_batch_size=4, save_steps=None, eval_steps=None, hang_timeout=10)]
    ended = train(launcher, folder, *flags, "--ds_config", strategy, fault="sleeping-data")
    assert ended.code == 1, ended.stderr
    assert f"error: rank 1 on {HOST} has waited in data loading since step 3; rank 0 waits for it in " in ended.stderr


# ---- mistakes in this process: importing the stack once ------------------------------------------------------------
@pytest.fixture
def main(folder, monkeypatch):
    """train.main in `folder` on a host without a GPU; an error after the model was begun fails the test."""
    import torch

    import brigade.distributed.ranks
    import train

    def too_late(error, *_):
        raise AssertionError(f"told only after the model was begun: {error!r}") from error

    monkeypatch.chdir(folder)
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"):
        monkeypatch.setenv(key, "")  # so that it is restored whatever train.main sets
        monkeypatch.delenv(key)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(brigade.distributed.ranks, "fail", too_late)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return train.main


@pytest.fixture
def told(main, capfd):
    """told(*flags): what train.main says of a mistake with these flags; it must leave before the model is built."""

    def call(*flags: str) -> str:
        flags = flags if "--output_dir" in flags else (*flags, "--output_dir", "run")
        with pytest.raises(SystemExit) as left:
            main([*flags])
        said = capfd.readouterr()
        lines = said.err.splitlines()
        assert left.value.code == 2, said.err
        assert len(lines) <= MESSAGE_LINES and lines[0].startswith(f"error on {HOST}, rank 0 of 1: "), said.err
        assert lines[-1].startswith("  cure: ") and said.err.count("error on") == 1, said.err
        assert not said.out
        return said.err

    return call


ZERO = '{"zero_optimization": {"stage": 2%s}%s}'
RECIPE = """
model: {model_name_or_path: recipes/tiny, from_scratch: true, tokenizer_name_or_path: python-docs}
data: {dataset_name: python-docs, chat_template: chatml, max_length: 64}
training: {global_batch_size: 4%s}
"""
ON_FILE = ["--dataset_name=", "--train_file", "FILE"]
ON_DS_CONFIG = ["--ds_config", "FILE"]
ON_RECIPE = ["--recipe", "FILE"]

MISTAKES = {
    # name: flags, content of FILE (bytes or text) or None, words of the message
    "unknown flag": (["--lerning_rate=3"], None, ["--lerning_rate", "learning_rate"]),
    "a flag's other name": (["--gradient_accumulation_steps", "3"], None, ["global_batch_size"]),
    "unknown recipe key": (ON_RECIPE, RECIPE % ", lerning_rate: 3", ["FILE", "lerning_rate", "3", "'learning_rate'"]),
    "unknown recipe section": (ON_RECIPE, "trainin: {}\n" + RECIPE % "", ["FILE: trainin", "'training'"]),
    "wrong type in the recipe": (ON_RECIPE, RECIPE % ", bf16: maybe", ["FILE: training.bf16", "'maybe'", "boolean"]),
    "wrong type in a flag": (["--max_steps", "many"], None, ["flag --max_steps", "'many'", "integer"]),
    "not one of the choices": (["--optim", "adam"], None, ["flag --optim", "'adam'", "adamw_torch"]),
    "recipe that is no YAML": (ON_RECIPE, "model:\n\tx: 1\n", ["FILE, line 2", "not YAML"]),
    "missing recipe": (["--recipe", "nowhere.yaml"], None, ["--recipe", "'nowhere.yaml'", "spelling"]),
    "missing ds_config": (["--ds_config", "nowhere.json"], None, ["--ds_config", "'nowhere.json'", "spelling"]),
    "missing accelerate config": (["--accelerate_config", "nowhere.yaml"], None, ["'nowhere.yaml'", "spelling"]),
    "ds_config as accelerate config": (["--accelerate_config", "FILE"], ZERO % ("", ""), ["FILE: distributed_type"]),
    "ds_config that is no JSON": (ON_DS_CONFIG, '{\n"bf16": }', ["FILE, line 2", "not JSON"]),
    "ds_config against the recipe": (ON_DS_CONFIG, ZERO % ("", ', "train_batch_size": 7'),
                                     ["FILE: train_batch_size", "7", "global_batch_size is ", "auto"]),
    "key that DeepSpeed rejects": (ON_DS_CONFIG, ZERO % (', "overlap_com": true', ""),
                                   ["FILE: zero_optimization.overlap_com", "true", "'overlap_comm'"]),
    "key that DeepSpeed dropped": (ON_DS_CONFIG, ZERO % (', "mics_shard_size": 2', ""),
                                   ["FILE: zero_optimization.mics_shard_size"]),
    "value that DeepSpeed rejects": (ON_DS_CONFIG, ZERO % (', "reduce_bucket_size": "big"', ""),
                                     ["FILE: zero_optimization.reduce_bucket_size", '"big"', "whole number"]),
    "key under two names": (ON_DS_CONFIG, ZERO % (', "max_live_parameters": 1, "stage3_max_live_parameters": 1', ""),
                            ["FILE: zero_optimization.stage3_max_live_parameters", "another name"]),
    "key twice in JSON": (ON_DS_CONFIG, ZERO % (', "stage": 3', ""), ["FILE: stage", "twice"]),
    "key twice in YAML": (ON_RECIPE, RECIPE % "" + "data: {max_length: 8}\n", ["FILE, line 5", "'data'", "twice"]),
    "block that is no table": (ON_DS_CONFIG, ZERO % (', "offload_optimizer": "cpu"', ""),
                               ["FILE: zero_optimization.offload_optimizer", "'cpu'"]),
    "missing data file": (["--dataset_name=", "--train_file", "nowhere.jsonl"], None,
                          ["--train_file", "'nowhere.jsonl'"]),
    "data file that is a directory": (["--dataset_name=", "--train_file", "elsewhere"], None,
                                      ["'elsewhere'", "directory"]),
    "two data sources": (["--train_file", "good.jsonl", "--dataset_name", "python-docs"], None,
                         ["both dataset_name and train_file"]),
    "empty data file": (ON_FILE, "", ["FILE", "empty"]),
    "blank data file": (ON_FILE, "\n\n", ["FILE", "empty"]),
    "broken data line": (ON_FILE, '\n{"messages": [', ["FILE, line 2", "not JSON", "fix"]),
    "data that is no text": (ON_FILE, b"\x89PNG\xff", ["FILE, line 1", "not UTF-8"]),
    "data without the column": (ON_FILE, '{"body": "x"}', ["FILE, line 1", "'messages'", "'body'"]),
    "unknown role": (ON_FILE, '{"messages": [{"role": "bot", "content": ""}]}', ["FILE, line 1", "'bot'", "assistant"]),
    "no assistant turn": (ON_FILE, '{"messages": [{"role": "user", "content": "alone"}]}',
                          ["FILE, line 1", "without an assistant turn", "supervised"]),
    "template without marks": (["--chat_template", "FILE"], "{{ messages }}", ["--chat_template", "generation"]),
    "template that breaks": (["--chat_template", "FILE"], "{% generation %}\n{% if %}", ["template, line 2"]),
    "sequence too long": (["--max_length", "1000000"], None, ["--max_length", "1000000", "positions for"]),
    "an encoder": (["--model_name_or_path", "encoder"], None, ["--model_name_or_path", "'bert' is an encoder"]),
    "revision of a directory": (["--revision", "main"], None, ["flag --revision", "'main'", "'recipes/tiny'"]),
    "argument that the optimizer lacks": (["--optim_args", "foo=1"], None, ["--optim_args", "adamw", "'foo'"]),
    "argument that is no number": (["--optim", "sgd", "--optim_args", "momentum=much"], None, ["momentum is 'much'"]),
    "more warm-up than steps": (["--warmup_steps", "9", "--max_steps", "8"], None, ["--warmup_steps", "9", "8 steps"]),
    "more warm-up than the steps of a flag": ([*ON_RECIPE, "--max_steps", "8"], RECIPE % ", warmup_steps: 100",
                                              ["FILE: training.warmup_steps", "flag --max_steps", "--warmup_steps 0"]),
    "more warm-up than an epoch has": (["--warmup_steps", "99999"], None, ["--warmup_steps", "99999", "share"]),
    "no such model": (["--model_name_or_path", "elsewhere"], None, ["--model_name_or_path", "'elsewhere'", "config"]),
    "model without weights": (["--from_scratch", "false"], None,
                              ["model.model_name_or_path", "weights", "from_scratch"]),
    "output directory of something else": (["--output_dir", "."], None, [".", "not a run's", "--fresh"]),
    "output directory that is a file": (["--output_dir", "good.jsonl"], None, ["good.jsonl", "is a file"]),
    "output directory below a file": (["--output_dir", "good.jsonl/run"], None,
                                      ["good.jsonl/run", "cannot be written"]),
    "checkpoint that is none": (["--resume_from_checkpoint", "elsewhere"], None,
                                ["'elsewhere'", "trainer_state.json"]),
    "flex attention without a GPU": (["--attn_implementation", "flex_attention"], None, ["backward pass", "sdpa"]),
    "quantised ZeRO without a GPU": (["--ds_config", "ds_configs/zeropp.json"], None,
                                    ["--ds_config", "GPU", "zero3_hpz"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_told_before_the_model_is_built(name, told, folder):
    flags, content, words = MISTAKES[name]
    file = f"bad{'.jinja' if 'template' in name else '.yaml' if flags == ON_RECIPE else '.json'}"
    if content is not None:
        (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    message = told(*(file if flag == "FILE" else flag for flag in flags))
    for word in words:
        assert word.replace("FILE", file) in message
    assert not (folder / "run").exists()


def test_without_a_compiler_there_is_nothing_to_compile_with(told, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    message = told("--torch_compile")
    assert "flag --torch_compile" in message and "g++" in message


def test_a_cache_that_cannot_be_written_is_told(told, monkeypatch):
    monkeypatch.setenv("BRIGADE_CACHE", "good.jsonl/cache")
    message = told("--dataset_name=", "--train_file", "good.jsonl")
    assert "good.jsonl/cache" in message and "Not a directory" in message and "BRIGADE_CACHE" in message


def test_a_directory_for_kernels_that_cannot_be_written_is_told(told, monkeypatch, folder):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "good.jsonl" / "kernels"))
    message = told("--dataset_name=", "--train_file", "good.jsonl", "--ds_config", "ds_configs/zero2.json")
    assert "good.jsonl/kernels" in message and "Not a directory" in message and "TORCH_EXTENSIONS_DIR" in message


def test_a_world_size_that_somebody_left_is_told_while_it_waits(main, monkeypatch, capfd):
    for key, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(key, str(value))
    monkeypatch.setattr("brigade.distributed.ranks.PATIENCE", 0.01)
    monkeypatch.setattr("brigade.distributed.ranks.RENDEZVOUS_TIMEOUT", datetime.timedelta(seconds=3))
    with pytest.raises(SystemExit):
        main(["--output_dir", "run"])
    waiting, *rest = capfd.readouterr().err.splitlines()
    assert all(word in waiting for word in ("rank 0", "1 other rank", "127.0.0.1:", "unset RANK WORLD_SIZE")), waiting
    assert rest[-1].startswith("  cure: ")


def test_a_finished_run_says_so_and_a_directory_belongs_to_one_run(folder, main, told, capfd):
    """The life of an output directory: a run, the same again, another one, --fresh, other data."""
    flags = [*GOOD, *as_flags(global_batch_size=2, eval_steps=None, save_steps=1, report_to=[])]
    run = folder / "run"
    assert main([*flags, "--max_steps", "1", "--output_dir", str(run)]).state.global_step == 1
    assert (run / "success.json").exists()
    contents = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}

    again = train("python", folder, *flags, "--max_steps", "1")
    assert again.code == 0 and not again.stderr, again.stderr
    assert again.stdout == f"This run is finished: {run} (--max_steps above 1 lengthens it, --fresh begins it anew).\n"

    other = train("python", folder, *flags, "--max_steps", "1", "--learning_rate", "2e-3")
    assert_one_message(other, "python", 0, str(run), "training.learning_rate is 0.003 there and 0.002 here", "--fresh")

    assert main([*flags, "--max_steps", "2", "--output_dir", str(run), "--fresh"]).state.global_step == 2
    assert json.loads((run / "success.json").read_text())["steps"] == 2
    aside = folder / "run.old-1"
    said = capfd.readouterr().out.replace("\n", "")
    assert f"to {aside}" in said and "20 steps of warm-up" in " ".join(said.split())
    assert {path.relative_to(aside): path.read_bytes() for path in aside.rglob("*") if path.is_file()} == contents

    (run / "success.json").unlink()
    (run / "stop").touch()
    capfd.readouterr()
    message = told(*flags, "--max_steps", "2")
    assert "run/stop\n" in message and "remove it, and start again" in message
    (run / "stop").unlink()

    chats(folder / "good.jsonl", count=41)
    capfd.readouterr()
    message = told(*flags, "--max_steps", "2")
    assert "run.yaml" in message and "data or the tokenizer changed" in message and "--fresh" in message


def stopped(launcher: str, number: int, folder: Path, *flags: str) -> Ended:
    """How train.py ends on a signal after its third step: Ctrl-C reaches all processes of a terminal, SIGTERM the first."""
    mark, out, err = uuid.uuid4().hex, folder / "out.txt", folder / "err.txt"
    environment = os.environ | {"BRIGADE_TEST_MARK": mark, "OMP_NUM_THREADS": "1"}
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(
            [*launched(launcher), str(REPOSITORY / "train.py"), *flags],
            cwd=folder,
            env=environment,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 200
        while "\nstep 3/" not in out.read_text():
            assert time.monotonic() < deadline and process.poll() is None, err.read_text()
            time.sleep(0.1)
        for each in marked(mark) if number == signal.SIGINT else [process]:
            each.send_signal(number)
        code, at = process.wait(timeout=60), time.time()
        assert not surviving(mark, patience=10)
    finally:
        for survivor in marked(mark):
            survivor.kill()
    return Ended(code, out.read_bytes().decode(), err.read_bytes().decode(), ranks_part(err.read_text()), 0, at)


@pytest.mark.parametrize(
    "launcher, number", [("python", signal.SIGINT), pytest.param("torchrun", signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_run_that_is_stopped_says_where_it_stands_and_how_to_go_on(launcher, number, folder):
    """And while it trains, its log is one of plain lines with the times that a terminal's bar would show."""
    flags = [
        *GOOD,
        *as_flags(
            global_batch_size=2,
            max_steps=100000,
            eval_steps=None,
            save_steps=2,
            logging_steps=1,
            report_to=[],
            dataloader_num_workers=2,
            output_dir="run",
        ),
        "--fresh",
    ]
    if launcher == "python":  # a stream has one more process that reads data
        flags += ["--streaming", "--validation_file", str(chats(folder / "held_out.jsonl", 5))]
    ended = stopped(launcher, number, folder, *flags)
    by = "Ctrl-C" if number == signal.SIGINT else r"SIGTERM to rank \d"
    said, _, launchers = ended.stderr.partition("Traceback")  # torchrun's own
    told = [line for line in said.splitlines() if line and not re.search(r"^[WE]\d{4} | is waiting for ", line)]
    assert len(told) == 1 + (launcher == "python") and (launcher != "python" or "once more ends the run" in told[0])
    assert not launchers or launcher == "torchrun"
    assert re.fullmatch(
        rf"Stopped by {by} at step (\d+) of 100000\. The same command without --fresh continues from run/checkpoint-\1\.",
        told[-1],
    ), ended.stderr
    assert json.loads((folder / "run/stopped.json").read_text())["checkpoint"] == told[-1].rpartition("/")[2].rstrip(
        "."
    )
    assert ended.code == (-number if launcher == "python" else 1), ended.stderr
    assert ended.stderr.count("Stopped by") == ended.stderr.count("Traceback") + (launcher == "python") == 1
    assert "\r" not in ended.stdout + ended.stderr
    lines = [line for line in ended.stdout.splitlines() if re.match("step [1-9]", line)]
    assert len(lines) >= 3 and all(
        re.search(r"^step \d+/100000 .* s/step .*  elapsed [\d:]+  ETA [\d:]+$", line) for line in lines
    )


def test_a_disk_that_fills_while_a_checkpoint_is_saved_leaves_the_one_before(folder, main, monkeypatch, capfd):
    """torch's own writer, on a full disk; its error says "unexpected pos" and nothing of disks."""
    import torch

    import brigade.distributed.ranks

    flags = [
        *GOOD,
        *as_flags(
            global_batch_size=2,
            max_steps=3,
            eval_steps=None,
            save_steps=1,
            save_total_limit=1,
            report_to=[],
            output_dir=str(folder / "run"),
        ),
    ]
    save, optimizers = torch.save, itertools.count(1)

    def save_on_a_disk_that_fills(what, file, **how):
        second = str(file).endswith("optimizer.pt") and next(optimizers) == 2
        return save(what, "/dev/full" if second else file, **how)

    with monkeypatch.context() as full:
        full.setattr(torch, "save", save_on_a_disk_that_fills)
        full.setattr(brigade.distributed.ranks, "fail", fail)
        full.setattr(brigade.distributed.ranks.os, "_exit", sys.exit)
        with pytest.raises(SystemExit) as left:
            main(flags)
    told = capfd.readouterr().err.splitlines()[-3:]
    assert left.value.code == 2 and told[0].endswith(f": {folder / 'run'}"), told
    assert "bytes are free there" in told[1] and told[2].startswith("  cure: ") and "--output_dir" in told[2], told
    assert sorted(path.name for path in (folder / "run").glob("checkpoint-*")) == ["checkpoint-1"]

    trainer = main(flags)
    assert trainer.state.global_step == 3 and (folder / "run" / "success.json").is_file()
    assert "checkpoint-1" in capfd.readouterr().out


class StopsAtOnce(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = True


@pytest.mark.slow
def test_ranks_end_with_their_launcher_and_one_run_has_a_directory(folder, main, told):
    """torchrun is killed: its ranks, of which it is not told, must not train on beside the rerun."""
    flags = [*GOOD, *as_flags(global_batch_size=2, max_steps=100000, eval_steps=None, save_steps=10, report_to=[])]
    run, mark = folder / "run", uuid.uuid4().hex
    environment = os.environ | {"BRIGADE_TEST_MARK": mark, "OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen(
        [*launched("torchrun"), str(REPOSITORY / "train.py"), *flags, "--output_dir", str(run)],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 200
        while not (run / "checkpoint-10" / "brigade.json").exists() and not list(run.glob("checkpoint-??0")):
            assert time.monotonic() < deadline and launcher.poll() is None
            time.sleep(0.1)
        for words in ([], ["--fresh"]):
            message = told(*flags, *words)
            pid = message.partition("process ")[2].split()[0]
            assert int(pid) in {process.pid for process in marked(mark)}
            assert f"another run is using it: process {pid} on {HOST}" in message and "another --output_dir" in message
        launcher.kill()
        launcher.wait()
        assert not surviving(mark, patience=10)
    finally:
        for survivor in marked(mark):
            survivor.kill()
    trainer = main([*flags, "--output_dir", str(run)], callbacks=(StopsAtOnce(),))
    assert trainer.state.global_step > 10 and (run / "success.json").exists()
    assert not (run / ".owner").exists() and not (folder / "run.old-1").exists()
