"""A run's directory that anybody may have written: whoever looks at it runs no code, writes nothing beside it, never hangs, and
ends in one message or a good result."""

import copy
import json
import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from brigade.__main__ import main
from brigade.errors import UserError
from brigade.hosts import connection
from brigade.launch import background
from brigade.top import table
from brigade.top.watching import HostSeen, Watching
from brigade.train.recipe.files import DEFAULT_RECIPE, read_yaml
from testing.patience import in_time

pytestmark = pytest.mark.slow
HOST, TIME = socket.gethostname(), "2026-11-23T04:05:06.000+00:00"
PATIENCE = 20  # seconds that one command may take

RUN = read_yaml(DEFAULT_RECIPE) | {
    # A tokenizer that is not there: making the built-in one takes longer than all else.
    "model": {"model_name_or_path": "recipes/tiny", "from_scratch": True, "tokenizer_name_or_path": "./none"},
    "data": {"dataset_name": "./none.jsonl", "max_length": 256},
    "run": {
        "identity": "abc", "started": TIME, "commit": "0123456789ab", "hosts": ["node1", HOST], "ranks": 2, "replicas": 1,
        "launcher": "torchrun", "strategy": {"name": "zero3", "kind": "zero3"}, "versions": {"torch": "2.13.0"},
        "overridden": ["--x 1 (recipe: 2)"], "lengthened": [{"how": "more"}], "batch": "2 x 2", "learning_rate": 1e-3,
    }
}  # fmt: skip
EVENTS = [
    {"time": TIME, "event": "started", "step": 0, "steps": 9, "ranks": 2, "hosts": ["node1", HOST]},
    {"time": TIME, "event": "first step", "step": 1, "seconds": 3.0,
     "phases": [{"name": "imports", "began": 0.0, "seconds": 2.0}, {"name": "first step", "began": 2.0, "seconds": 1.0}]},
    {"time": TIME, "event": "step", "step": 1, "steps": 9, "loss": 1.5, "tokens": 99, "tokens_per_second": 5.0, "mfu": 1.0,
     "step_time": 0.5, "data_time": 0.1, "seconds": 1.0, "peak_memory_gib": 1.0, "slowest_rank_score": 0.5},
    {"time": TIME, "event": "evaluation", "step": 2, "loss": 1.4, "chats_loss": 1.4, "held_out_loss": 1.4, "seconds": 2.0},
    {"time": TIME, "event": "checkpoint", "step": 2, "bytes": 99, "seconds": 0.1, "blocked": 0.1, "through": "disk"},
    {"time": TIME, "event": "slow", "rank": 1, "host": HOST, "score": 0.5, "why": "it is"},
    {"time": TIME, "event": "grace", "step": 2, "seconds": 3.0},
    {"time": TIME, "event": "fault", "kind": "hang", "step": 2, "text": "it hangs"},
    {"time": TIME, "event": "failed", "text": "it failed"},
]  # fmt: skip
BEAT = {"rank": 0, "host": HOST, "pid": 1, "step": 2, "phase": "forward", "seconds": 1.0, "tokens": 9, "at": 1.0,
        "writings": 3, "waits": {"collective": "all_reduce", "number": 1, "group": "0"}}  # fmt: skip
STATE = {"log_history": [{"step": 1, "loss": 2.0, "grad_norm": 1.0}, {"step": 2, "eval_loss": 1.0}], "global_step": 2}
MARKER = {"by": "SIGTERM", "time": TIME, "steps": 9, "step": 2, "held_out_loss_before": 2.0, "held_out_loss": 1.0}
TASK = {"step": 2, "task": "t", "metric": "acc", "filter": "none", "value": 0.5, "stderr": 0.1, "samples": 4, "shots": 0,
        "chat_template": False, "limit": None, "lm_eval": "0.4.13", "time": TIME}  # fmt: skip
ANSWER = {"step": 2, "source": "chats", "question": "q", "reference": "r", "answer": "a"}
FILES = {"model.safetensors": {"bytes": 3, "xxh3": "00"}}
MANIFEST = {"files": FILES, "run": {"strategy": {"name": "zero3"}, "ranks": 2}}
DOCUMENTS = {
    "run.yaml": RUN, "events.jsonl": EVENTS, "heartbeats/rank-0.json": BEAT, "heartbeats/rank-1.json": BEAT | {"rank": 1},
    "trainer_state.json": STATE, "success.json": MARKER, "stopped.json": MARKER, "answers.jsonl": [ANSWER],
    "task_results.jsonl": [TASK],
    "checkpoint-2/trainer_state.json": STATE, "checkpoint-2/brigade.json": MANIFEST, "config.json": {"model_type": "qwen3"},
    "checkpoint-2/model.safetensors": {}, ".owner": {}, "adapter_config.json": {"peft_type": "LORA"},
}  # fmt: skip
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from([10**400, -(10**300), 1e308, float("nan"), float("inf"), [], {}, [[]], {"": {"": []}}, ["a", 1, None],
                     "../../outside", "/dev/zero", "<script>x</script>", "=1+1", "\x1b]0;x\x07", "[/red]", "%s{0}", "a" * 5000,
                     "9" * 500, TIME, [[[[[[[[[1]]]]]]]]], {"name": []}, {"a": {"b": {"c": {"d": {"e": {"f": {"g": 1}}}}}}}]),
)  # fmt: skip
RAW = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([
        b"", b"{", b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"null", b"[]", b"7", b"9" * 6000, b"\0" * 100, b"a: &a [*a]",
        b"run: &a {b: *a}", b"? [a]\n: b", b"!!python/object/apply:os.system ['touch marker']", b"!!binary x",
        b"run: !!python/object/apply:os.system ['touch marker']", b"node1 12 3", f"{HOST} 1 3".encode(), b"a: 2024-13-45",
        b"csystem\n(S'touch marker'\ntR.", b"- &x a\n" * 1000,
    ]),
)  # fmt: skip
KINDS = ("folder", "fifo", "outside", "loop", "nowhere")
COMMANDS = ("status", "status --json", "status all", "report", "top", "attach", "export", "lint")


def places(value, path=()):
    """Where something stands in a document."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        yield (*path, key)
        yield from places(part, (*path, key))


@st.composite
def forged(draw, document):
    """The document with some of its values replaced or left out."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(0, 6))):
        if not (found := list(places(document))):
            break
        *path, last = draw(st.sampled_from(found))
        holder = document
        for key in path:
            holder = holder[key]
        if draw(st.integers(0, 4)):
            holder[last] = copy.deepcopy(draw(ODD))  # what is drawn is shared
        else:
            del holder[last]
    return document


@st.composite
def directories(draw):
    """Path -> content: bytes, or one of KINDS."""
    found = {}
    for path, document in DOCUMENTS.items():
        how = draw(st.integers(0, 9))
        if how < 6:
            shown = draw(forged(document))
            whole = path.endswith("jsonl") and isinstance(shown, list)
            lines = map(json.dumps, shown if whole else [shown])
            found[path] = "\n".join(lines).encode()
        elif how == 6:
            found[path] = draw(RAW)
        elif how == 7:
            found[path] = draw(st.sampled_from(KINDS))
    return found


def write(folder, content):
    for path, what in content.items():
        path = folder / path
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(what, bytes):
            path.write_bytes(what)
        elif what == "folder":
            path.mkdir()
        elif what == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to({"outside": folder.parent / "outside", "loop": path, "nowhere": folder / "nothing"}[what])


def surroundings(root):
    """All that lies beside the run's directory, with its content."""
    found = {}
    for path in sorted(root.rglob("*")):
        if not path.is_relative_to(root / "run") and not path.is_relative_to(root / "cache"):
            found[path] = path.read_bytes() if path.is_file() and not path.is_symlink() else None
    return found


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """A place with a cache and a home of its own, without any network."""
    for name, value in {"BRIGADE_CACHE": "cache", "HOME": "cache/home"}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(connection, "is_here", lambda host: False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outside").write_text("years of work")
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "run").symlink_to(tmp_path / "run")
    good = {path: json.dumps(document).encode() for path, document in DOCUMENTS.items() if not path.endswith("jsonl")}
    write(tmp_path / "run", good)
    for command in ("export", "report"):  # loads torch and makes the charts' library, once, however long that takes
        look(command, tmp_path / "run")
    return tmp_path


def look(command, run):
    if command == "attach":
        record = {"output": str(run), "logs": str(run), "host": HOST, "pid": 1, "born": 1, "started": TIME, "code": 1}
        background.follow(record)
    else:
        verb, *flags = command.split()
        flags = {"report": ["--page_only"], "top": ["--once"], "export": [str(run.parent / "cache" / "export")]}.get(
            verb, flags
        )
        if verb == "lint":
            flags = [str(run / "run.yaml"), str(run / "config.json")]
        words = [verb, *flags] if verb == "lint" else [verb, *([] if flags == ["all"] else [str(run), *flags])]
        if flags == ["all"]:
            words = ["status"]
        assert main(words) in (0, 1, 2)


@settings(max_examples=100, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck))
@given(content=directories(), commands=st.sets(st.sampled_from(COMMANDS), min_size=2, max_size=3))
def test_whoever_looks_at_a_strangers_run_is_safe(content, commands, alone, capsys):
    for path in (alone / "run", alone / "cache" / "export"):
        shutil.rmtree(path, ignore_errors=True)
    (alone / "run").mkdir()
    write(alone / "run", content)
    before = surroundings(alone)
    for command in sorted(commands):
        with in_time(PATIENCE), suppress(UserError):
            look(command, alone / "run")
        said = capsys.readouterr()
        assert "Traceback" not in said.out + said.err
        assert surroundings(alone) == before
    assert not list(alone.rglob("marker"))


FACTS = {
    "at": 5.0, "host": {"cores": 4, "busy": 1.0, "total": 4.0, "memory": 9, "memory_total": 99, "received": 1, "sent": 1},
    "gpus": [{"index": 0, "used": 1, "memory": 1, "memory_total": 9, "temperature": 40, "watts": 9.5, "pids": [1]}],
    "ranks": {"0": BEAT | {"age": 1.0, "state": "running", "cpu": 1.0, "memory": 9}},
}  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(facts=st.lists(forged(FACTS), min_size=1, max_size=3), events=forged(EVENTS))
def test_a_host_may_say_anything_to_top(facts, events):
    from brigade.errors.console import console
    from brigade.train.run.typed import EVENT, kept

    watching = Watching(["node1"], Path("run"), 1.0)
    watching.told = [kept(event, EVENT) for event in events] if isinstance(events, list) else []
    for one in facts:
        watching.hosts["node1"].add(one)
    with Path(os.devnull).open("w") as nothing:
        console(file=nothing).print(table.render(watching))
    assert isinstance(watching.hosts["node1"], HostSeen)
