"""What a page says about a run in words and tables, beside its figures."""

import math
import re
import shlex
import statistics
from pathlib import Path
from typing import Any

from ..errors.console import one_line
from ..errors.tables import Fields
from ..train.run.page import FILE
from ..train.run.status import ranks_of
from .records import SECTIONS, Record, attempts, events_of, number, numbers

Table = tuple[list[str], list[list[Any]]]  # head, rows
ANSWERED = 20  # evaluations whose answers a page shows: the newest
ROWS = 24  # in the table beside a chart
_STARTS = {"torchrun": "torchrun --master_port 29500 --nproc_per_node {}", "deepspeed": "deepspeed --num_gpus {}",
           "accelerate": "accelerate launch --num_processes {}"}  # fmt: skip
_COMMIT = re.compile(r"([0-9a-f]{7,64})(\+?)")  # "+": with changes that were not committed


def shown(value: object) -> str:
    """A figure with four digits, thousands with commas; any other value as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    if not math.isfinite(number(value) or 0):
        return "NaN" if value != value else "infinite"
    if isinstance(value, int) or abs(value) >= 10_000:
        return f"{value:,.0f}"
    if 0 < abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.1f}"


def duration(seconds: float) -> str:
    """`42 s`, `12 min 5 s`, `3 h 7 min`, `2 d 4 h`"""
    whole = round(seconds)
    for large, small, size in (("d", "h", 86400), ("h", "min", 3600), ("min", "s", 60)):
        if whole >= size:
            part = {"d": 3600, "h": 60, "min": 1}[large]
            return f"{whole // size} {large} {whole % size // part} {small}"
    return f"{seconds:.3g} s"


def summary(record: Record) -> dict[str, str]:
    """The few facts that a reader asks for first, {what: value}; what is not known is left out."""
    run, facts = record.run, dict[str, str]()
    last = record.steps[-1] if record.steps else {}
    if last:
        steps = record.known.get("steps")
        facts["step"] = shown(last["step"]) + (f" of {shown(steps)}" if steps else "")
    losses = numbers(record.evaluations, "loss")
    if losses:
        facts["held-out loss"] = shown(losses[-1]) + (f", {shown(losses[0])} at first" if len(losses) > 1 else "")
    shares = numbers(record.evaluations, "rewards/accuracies")
    if shares:
        facts["held-out accuracy"] = f"{shares[-1]:.1%}" + (f", {shares[0]:.1%} at first" if len(shares) > 1 else "")
    loss = number(last.get("loss"))
    if loss is not None:
        facts["training loss"] = shown(loss)
    tokens = number(last.get("tokens"))
    if tokens:
        facts["tokens"] = shown(round(tokens)) if math.isfinite(tokens) else "unknown"
    speeds = [each for each in numbers(record.steps, "tokens_per_second_per_gpu") if each and math.isfinite(each)]
    if speeds:
        facts["speed"] = f"{shown(round(statistics.median(speeds)))} tokens/s per rank"
    mfu = number(last.get("mfu"))
    if mfu:
        facts["MFU"] = f"{mfu:.1f} %"
    seconds = number(last.get("seconds"))
    if seconds is not None:
        facts["time"] = duration(seconds)
    peak = number(last.get("peak_memory_gib"))
    if peak is not None:
        facts["peak memory"] = f"{peak:.1f} GiB"
    strategy = run.get("strategy", {}).get("name")
    if strategy:
        facts["strategy"] = strategy
    if run.get("ranks"):
        hosts = ", ".join(map(str, run.get("hosts") or []))
        facts["ranks"] = f"{ranks_of(run)} on {hosts}, by {run.get('launcher', '?')}"
    return facts


def recipe(record: Record) -> Table:
    """Every key of the run, and whether a flag or the launcher overrode the recipe."""
    overridden = " ".join(map(str, record.run.get("overridden") or []))
    rows = []
    for section in SECTIONS:
        for key, value in record.settings.get(section, {}).items():
            note = "overridden" if f"--{key} " in f"{overridden} " else ""
            rows.append([f"{section}.{key}", plain(value), note])
    return ["key", "value", ""], rows


def plain(value: object) -> str:
    """A value of a recipe as YAML shows it, cut at 2,000 letters."""
    text = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 2000 else f"{text[:2000]} ..."


def surroundings(record: Record) -> Table:
    """Versions, hosts, and whatever else was resolved for the run."""
    run, rows = record.run, list[list[Any]]()
    if record.settings:
        rows.append(["directory", record.directory.absolute()])
    for key in ("identity", "started", "commit", "batch", "learning_rate", "data", "ranks", "replicas", "launcher"):
        if run.get(key) is not None:
            rows.append([key.replace("_", " "), shown(ranks_of(run) if key == "ranks" else run[key])])
    rows += [["host", host] for host in run.get("hosts") or []]
    rows += map(list, run.get("versions", {}).items())
    rows += [["overridden", note] for note in run.get("overridden") or []]
    for how in run.get("lengthened") or []:
        rows.append(["lengthened", how.get("how", how) if isinstance(how, dict) else how])
    return ["", "value"], rows


def repeat(record: Record) -> list[str]:
    """The commands that repeat this run into another directory. They are quoted, because somebody pastes them into a shell and
    the words in them may be a stranger's."""
    if not record.settings:
        return []
    run, path = record.run, shlex.quote(str(record.directory.absolute()))
    hosts, ranks = run.get("hosts") or [""], ranks_of(run) or 1
    again = f"--output_dir {path}-again"
    lines = []
    commit = _COMMIT.fullmatch(str(run.get("commit")))
    if commit:
        changed = "   # and the changes that were not committed then" if commit[2] else ""
        lines.append(f"git checkout {commit[1]}{changed}")
    if len(hosts) > 1:
        each, rest = divmod(ranks, len(hosts))
        slots = shlex.join(f"{host} slots={each}" for host in hosts)
        uneven = f"# write hostfile: {shlex.join(map(str, hosts))} had {ranks} slots in all, not as many each"
        lines += [uneven if rest else f"printf '%s\\n' {slots} > hostfile"]
        lines += [f"python -m brigade launch {path}/run.yaml --hostfile hostfile {again}"]
    else:
        launcher = _STARTS.get(str(run.get("launcher")), "python" if ranks == 1 else _STARTS["torchrun"]).format(ranks)
        lines.append(f"{launcher} train.py --recipe {path}/run.yaml {again}")
    return list(map(one_line, lines))


def starts(record: Record) -> Table:
    """Each attempt of the run, what it cost, and what ended it early."""
    rows = []
    for each in attempts(record):
        pause = duration(each.idle) if each.idle else ""
        rows.append([each.began, each.step, each.ranks, each.hosts, pause, each.lost or "", each.ended_by])
    return ["began", "from step", "ranks", "hosts", "after a pause of", "steps lost", "ended by"], rows


def checkpoints(record: Record) -> Table:
    """The checkpoints that were written: those that events name, and those of which only the directory is known."""
    rows = []
    named = set()
    for line in events_of(record, "checkpoint"):
        step, size = str(line.get("step")), number(line.get("bytes"))
        named.add(step)
        there = "yes" if step in map(str, record.checkpoints) else "no"
        mib = f"{size / 2**20:,.1f}" if size is not None and math.isfinite(size) else ""
        rows.append([step, str(line.get("time", ""))[:19], mib, *(line.get(k) for k in ("seconds", "blocked")), there])
    rows += [[step, "", "", None, None, "yes"] for step in record.checkpoints if str(step) not in named]
    return ["step", "written", "MiB", "took, s", "training waited, s", "still there"], rows


def incidents(record: Record) -> Table:
    """What went wrong or was slow during the run."""
    rows = []
    for line in events_of(record, "fault", "failed", "slow", "restart", "stopped"):
        words = line.get("text") or line.get("what") or line.get("why") or line.get("by") or ""
        where = f"rank {line['rank']} on {line.get('host', '?')}: " if "rank" in line else ""
        rows.append([str(line.get("time", ""))[:19], line.get("event"), line.get("step", ""), f"{where}{words}"])
    return ["time", "what", "step", "in words"], rows


def answers(record: Record) -> list[Fields]:
    """Each question with its reference and the model's answers at the newest evaluations. Several empty lines become one."""
    questions: dict[tuple[str, ...], dict[str, Any]] = {}
    for entry in record.answers:
        source, question, reference = (str(entry.get(key, "")) for key in ("source", "question", "reference"))
        images = entry.get("images", [])
        entries = {"source": source, "question": question, "reference": reference, "images": images}
        asked = questions.setdefault((source, question, *images), entries)
        answer = re.sub(r"\n\s*\n", "\n\n", str(entry.get("answer", "")).strip())
        asked.setdefault("answers", []).append((entry.get("step", ""), answer))
    for asked in questions.values():
        asked["left_out"] = max(0, len(asked["answers"]) - ANSWERED)
        asked["answers"] = asked["answers"][-ANSWERED:]
    return list(questions.values())


def tasks(record: Record) -> Table:
    """The figures of benchmark tasks, and how they were measured."""
    rows = []
    for entry in record.tasks:
        metric, filtered, most = entry.get("metric", ""), entry.get("filter", "none"), entry.get("limit")
        name = metric if filtered == "none" else f"{metric} ({filtered})"
        samples = f"{shown(entry.get('samples'))}, the first only" if most else shown(entry.get("samples"))
        prompts = "chat template" if entry.get("chat_template") else "plain"
        figures = [entry.get("value"), entry.get("stderr"), samples, entry.get("shots"), prompts]
        rows.append([entry.get("task", ""), name, *figures, entry.get("step", ""), entry.get("lm_eval", "")])
    return ["task", "metric", "value", "standard error", "samples", "shots", "prompts", "step", "lm_eval"], rows


def default_page(directories: list[Path]) -> Path:
    """Where the page goes if no file is named."""
    return (directories[0] if len(directories) == 1 else Path()) / FILE
