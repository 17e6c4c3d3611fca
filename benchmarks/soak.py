"""A run that is struck again and again: a seeded random fault every 60 to 90 s on three real hosts, under `launch --restarts`.

    python -m benchmarks.soak                 # 30 minutes (root) -> benchmarks/results/soak.csv, docs/evidence/soak.md
    python -m benchmarks.soak --minutes 3 --seed 7 --print
    python -m benchmarks.soak --steps 3400    # on a machine whose speed changes meanwhile

First the same run undisturbed, whose losses the struck one must have. Launch runs on a fourth host, as on a login node; it
is suspended now and then, too. Ends with 1 where the run does not reach its last step, or reaches another loss.
"""

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.pages import EVIDENCE, markdown
from brigade.errors.console import counted
from testbed.cluster import Cluster
from testbed.needs import require

RESULTS = pages.RESULTS / "soak.csv"
PAGE = EVIDENCE / "soak.md"
HOSTS, LAUNCHING = ("node1", "node2", "node3"), "node4"
BETWEEN = (60.0, 90.0)  # seconds from one fault to the next
SILENCE = 15  # seconds, of launch: links that are cut for less cost nothing
# Samples that are not learnt by heart, at a low rate: two ranks round otherwise than three, and that must not grow over
# thousands of steps (600 samples 66 times at 3e-4: a loss of 0.09, of which two and three ranks differed by 0.16 %).
TRAIN = (
    "--global_batch_size 12 --per_device_train_batch_size 2 --max_eval_samples 12 --learning_rate 1e-4 "
    "--logging_steps 1 --eval_steps 100000 --save_steps 10 --seed 1 --max_steps {}"
)
UNTIL_RESTART = 60.0  # seconds that a fault of the lasting kind lasts
TOLERANCE = 1e-3  # relative, of each step's loss
SHARE = 0.72  # of the minutes that the steps take undisturbed; the rest and more goes into failing and starting again


@dataclass
class Soak:
    """One struck run. begun: time.monotonic() of its launch; healing: (when, what) repairs that are still to come"""

    cluster: Cluster
    process: subprocess.Popen[Any]
    folder: Path
    begun: float = field(default_factory=time.monotonic)
    healing: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text(errors="replace")

    def later(self, seconds: float, repair: Callable[[], None]) -> None:
        self.healing.append((time.monotonic() + seconds, repair))

    def heal(self, at_once: bool = False) -> None:
        """Repair what is due."""
        due = [entry for entry in self.healing if at_once or entry[0] <= time.monotonic()]
        self.healing = [entry for entry in self.healing if entry not in due]
        for _, repair in due:
            with suppress(ProcessLookupError):
                repair()


# ---- faults ------------------------------------------------------------------------------------------------------
def _rank(soak: Soak, host: str) -> int | None:
    """The training process of a host; None where it has none at this moment."""
    return next(iter(soak.cluster[host].find("train.py")[-1:]), None)


def _signal(number: int) -> Callable[[Soak, str, random.Random], str | None]:
    def strike(soak: Soak, host: str, _: random.Random) -> str | None:
        if (pid := _rank(soak, host)) is None:
            return None
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            soak.later(UNTIL_RESTART, lambda: os.kill(pid, signal.SIGCONT))
        return f"{signal.Signals(number).name} to the rank on {host}"

    return strike


def _power_off(soak: Soak, host: str, _: random.Random) -> str | None:
    soak.cluster[host].power_off()
    soak.later(UNTIL_RESTART, soak.cluster[host].boot)
    return f"{host} is switched off, and on again {UNTIL_RESTART:.0f} s later"


def _cut_briefly(soak: Soak, host: str, chance: random.Random) -> str | None:
    seconds = chance.randint(5, 10)  # TCP tries again ever later: what comes after twice the time is silence, too
    soak.cluster[host].cut()
    soak.later(seconds, soak.cluster[host].restore)
    return f"the link of {host} is cut for {seconds} s"


def _cut(soak: Soak, host: str, _: random.Random) -> str | None:
    soak.cluster[host].cut()
    soak.later(UNTIL_RESTART, soak.cluster[host].restore)
    return f"the link of {host} is cut for {UNTIL_RESTART:.0f} s"


def _suspend(soak: Soak, _: str, chance: random.Random) -> str | None:
    seconds = chance.randint(5, 10)
    soak.cluster[LAUNCHING].send(soak.process, signal.SIGSTOP)
    soak.later(seconds, lambda: soak.process.send_signal(signal.SIGCONT))  # nsenter, which wakes its child
    return f"launch is suspended for {seconds} s"


STRIKES = (
    _signal(signal.SIGKILL),
    _signal(signal.SIGSTOP),
    _signal(signal.SIGTERM),
    _power_off,
    _cut_briefly,
    _cut,
    _suspend,
)


# ---- the runs ----------------------------------------------------------------------------------------------------
def start(cluster: Cluster, folder: Path, words: str) -> subprocess.Popen[Any]:
    """Launch the tiny recipe on HOSTS, from LAUNCHING. What it says goes into folder/said."""
    folder.mkdir()
    hostfile = cluster.hostfile(dict.fromkeys(HOSTS, 1))
    where = f"--hostfile {hostfile} --launcher torchrun --log_dir {folder / 'logs'} --output_dir {folder / 'run'}"
    command = f"-m brigade launch recipes/tiny/full.yaml {where} {words}"
    with (folder / "said").open("wb") as out:
        return cluster[LAUNCHING].popen([sys.executable, *command.split()], stdout=out, stderr=out, OMP_NUM_THREADS="1")


def launch(cluster: Cluster, name: str, steps: int, words: str = "") -> Soak:
    folder = cluster.shared / name
    return Soak(cluster, start(cluster, folder, f"--silence {SILENCE} {words} {TRAIN.format(steps)}"), folder)


def undisturbed(cluster: Cluster, name: str, steps: int) -> Soak:
    """Raises RuntimeError where it fails."""
    soak = launch(cluster, name, steps)
    if soak.process.wait():
        raise RuntimeError(f"the undisturbed run failed:\n{soak.said[-3000:]}")
    return soak


def losses(soak: Soak) -> dict[int, float]:
    """Return the loss of each step."""
    log = json.loads((soak.folder / "run" / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in log if "loss" in entry}


def final_loss(soak: Soak) -> float:
    """The mean of the last ten steps'."""
    last = list(losses(soak).values())[-10:]
    return sum(last) / len(last)


def apart(struck: Soak, plain: Soak) -> Iterator[tuple[int, float]]:
    """After each tenth of the steps: the largest relative difference of a step's loss in that tenth.

    Rounding grows slowly; a wrong continuation is a leap at a fault.
    """
    found, expected = losses(struck), losses(plain)
    steps = sorted(expected)
    differences = [abs(found.get(step, math.inf) - expected[step]) / expected[step] for step in steps]  # all are told
    tenth = -(-len(steps) // 10)
    for first in range(0, len(steps), tenth):
        part = differences[first : first + tenth]
        yield steps[first + len(part) - 1], max(part)


def steps_for(cluster: Cluster, minutes: float) -> int:
    """As many steps as take SHARE of so many minutes undisturbed."""
    state = json.loads((undisturbed(cluster, "trial", 20).folder / "run" / "trainer_state.json").read_text())
    seconds = [entry["step_time"] for entry in state["log_history"] if "step_time" in entry][5:]
    return max(40, int(SHARE * minutes * 60 / (sum(seconds) / len(seconds))))


def strike_until_the_end(soak: Soak, minutes: float, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each fault: what, when, how far the run was, and when it had got further."""
    rows: list[dict[str, Any]] = []
    chance, due = random.Random(seed), time.monotonic() + 30
    seen, read = 0, 0
    while soak.process.poll() is None:
        time.sleep(0.2)
        soak.heal()
        *lines, _ = soak.said[read:].split("\n")
        read += sum(len(line) + 1 for line in lines)
        for line in lines:
            if match := re.match(r"step (\d+)/", line):
                seen = int(match[1])
                if rows and not rows[-1]["seconds"] and (seen > rows[-1]["step"]):
                    rows[-1]["seconds"] = f"{time.monotonic() - soak.begun - rows[-1]['at']:.0f}"
            elif rows and (match := re.match(r"\d\d:\d\d:\d\d  (?!attempt|restart|succeeded)(.*)", line)):
                rows[-1]["said"] += ("; " if rows[-1]["said"] else "") + match[1].strip()
        now = time.monotonic() - soak.begun
        waits = rows and not rows[-1]["seconds"]  # not while it is still recovering from the last one
        if time.monotonic() < due or waits or now > 60 * minutes or soak.healing or not seen:
            continue
        what = chance.choice(STRIKES)(soak, chance.choice(HOSTS), chance)
        if what:
            rows.append({"at": round(now), "what": what, "step": seen, "said": "", "seconds": ""})
            due = time.monotonic() + chance.uniform(*BETWEEN)
            print(rows[-1], flush=True)
    yield from rows


def soak(minutes: float, seed: int, steps: int | None = None) -> list[dict[str, Any]]:
    """The rows of one soak, of so many steps or as many as the minutes need.

    Raises RuntimeError where the run fails, or ends with another loss.
    """
    with Cluster(len(HOSTS) + 1) as cluster:
        steps = steps or steps_for(cluster, minutes)
        plain = undisturbed(cluster, "undisturbed", steps)
        took, expected = time.monotonic() - plain.begun, final_loss(plain)
        print(f"undisturbed: {steps} steps in {took:.0f} s, final loss {expected:.5f}", flush=True)
        struck = launch(
            cluster, "struck", steps, f"--restarts {math.ceil(3 * minutes)} --min_hosts 2 --restart_pause 2"
        )
        rows = list(strike_until_the_end(struck, minutes, seed))
        struck.heal(at_once=True)
        seconds = time.monotonic() - struck.begun
        if seconds < 60 * minutes:
            print(f"it ended after {_clock(seconds)} of {minutes:g} minutes: give more --steps", file=sys.stderr)
        print(struck.said[struck.said.rfind("time line of ") :], flush=True)
        if struck.process.returncode:
            raise RuntimeError(f"the run ended with {struck.process.returncode}:\n{struck.said[-6000:]}")
        found = final_loss(struck)
        done = json.loads((struck.folder / "run" / "success.json").read_text())["steps"]
        whole = {"steps": done, "took": f"{seconds:.0f}", "undisturbed": f"{took:.0f}", "loss": f"{found:.6f}"}
        attempts = len(list((struck.folder / "logs").iterdir()))
        parts = list(apart(struck, plain))
        print("largest difference of a loss up to step " + ", ".join(f"{step}: {part:.1e}" for step, part in parts))
        whole |= {"expected": f"{expected:.6f}", "attempts": attempts, "seed": seed}
        worst = max(part for _, part in parts)
        whole |= {"apart": f"{worst:.1e}"}
        rows = [row | whole | pages.where() for row in rows]
        if worst > TOLERANCE:
            print(table([{key: str(value) for key, value in row.items()} for row in rows]))  # an hour's work
            raise RuntimeError(
                f"the losses of a step are {worst:.1e} apart; final {found:.6f}, undisturbed {expected:.6f}"
            )
        return rows


# ---- the page ----------------------------------------------------------------------------------------------------
def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        [
            _clock(float(row["at"])),
            row["what"],
            row["step"],
            row["said"] or "nothing",
            f"{int(row['seconds'])} s" if row["seconds"] else "at its end",  # a whole second may round to -0
        ]
        for row in rows
    ]
    last = rows[-1]
    whole = (
        f"{last['steps']} steps in {_clock(float(last['took']))} and {counted(int(last['attempts']), 'attempt')}; "
        f"undisturbed they took {_clock(float(last['undisturbed']))}. "
        f"Loss of the last ten steps: {last['loss']}, undisturbed {last['expected']}; "
        f"no step's loss differs by more than {last['apart']} of itself. "
        f"Seed {last['seed']}, {last['machine']}."
    )
    head = ["minute", "what was done to it", "at step", "what `launch` said", "further after"]
    return markdown(head, lines) + f"\n\n{whole}"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def tables() -> dict[str, str]:
    return {"soak": table(pages.read(RESULTS))}


def main() -> int:
    parser = pages.command_line(__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="how long it is struck (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: 0)")
    parser.add_argument("--steps", type=int, help="of the run (default: as the machine's speed at the start says)")
    parser.add_argument("--print", action="store_true", help="print the time line, and leave the page as it is")
    options = parser.parse_args()
    require()
    try:
        rows = soak(options.minutes, options.seed, options.steps)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.print:
        print(table([{key: str(value) for key, value in row.items()} for row in rows]))
        return 0
    pages.save(RESULTS, rows)
    pages.write(PAGE, tables())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
