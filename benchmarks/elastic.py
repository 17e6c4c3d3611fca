"""An elastic run that is struck: what each fault of a replica, of the coordinator or of a link costs, on three real hosts.

    python -m benchmarks.elastic              # root -> benchmarks/results/elastic.csv, docs/evidence/local-training.md
    python -m benchmarks.elastic --only cut   # faults whose name has this word; their rows replace those that are there

Each row is a run of the tiny recipe's model on node1 to node3, launched from node4, with one fault; the first has none. Then two
runs that are long enough to be struck at random for MINUTES, one of them undisturbed.
"""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.pages import EVIDENCE, markdown
from benchmarks.soak import HOSTS, LAUNCHING, start
from testbed.cluster import Cluster
from testbed.needs import require

RESULTS = pages.RESULTS / "elastic.csv"
PAGE = EVIDENCE / "local-training.md"
EVERY = 10  # steps of a round
STEPS, LONGER, LONG = 400, 1500, 5600  # the last takes longer than MINUTES
FLAGS = (
    f"--sync_every {EVERY} --max_length 64 --global_batch_size 12 --per_device_train_batch_size 4 --learning_rate 1e-3"
)
FLAGS += " --eval_answers 0 --max_eval_samples 100 --logging_steps 10 --warmup_steps 20 --seed 1"
FLAGS += " --eval_steps 1000 --save_steps 1000"
AT = 60  # step at which a fault strikes
MINUTES, BETWEEN = 10, (30.0, 60.0)  # of random kills; seconds from one to the next
PERIOD = 0.2  # seconds: of each, who is at half speed rests for a half


@dataclass
class Run:
    cluster: Cluster
    folder: Path
    process: Any
    begun: float = field(default_factory=time.monotonic)

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text(errors="replace")

    def output(self, replica: int) -> Path:
        return self.folder / "run" / (f"replica-{replica}" if replica else "")

    @property
    def step(self) -> int:
        """The furthest that any replica has logged."""
        return max((event["step"] for event in self.events() if event["event"] == "step"), default=0)

    def events(self) -> Iterator[dict[str, Any]]:
        for replica in range(len(HOSTS)):
            with suppress(OSError):
                for line in (self.output(replica) / "events.jsonl").read_text().splitlines():
                    with suppress(ValueError):
                        yield {"of": replica, **json.loads(line)}


def launch(cluster: Cluster, name: str, steps: int) -> Run:
    folder = cluster.shared / name.replace(" ", "-").replace(",", "")
    how = "--elastic --restart_pause 2 --restarts 40 --start_timeout 120"
    return Run(cluster, folder, start(cluster, folder, f"{how} {FLAGS} --max_steps {steps}"))


# ---- faults ------------------------------------------------------------------------------------------------------
def kill(run: Run, host: str = "node2") -> None:
    with suppress(IndexError, ProcessLookupError):
        os.kill(run.cluster[host].find("train.py")[-1], signal.SIGKILL)


def kill_coordinator(run: Run) -> None:
    run.cluster[LAUNCHING].kill("brigade.train.local.coordinator")


def cut_link(run: Run) -> None:
    run.cluster["node2"].cut()
    time.sleep(20)
    run.cluster["node2"].restore()


def half_speed(run: Run) -> None:
    """Until the end."""

    def slow() -> None:
        while run.process.poll() is None:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                with suppress(IndexError, ProcessLookupError):
                    os.kill(run.cluster["node2"].find("train.py")[-1], number)
                time.sleep(PERIOD / 2)

    threading.Thread(target=slow, daemon=True).start()


def boot(run: Run) -> None:
    run.cluster["node3"].boot()


def random_kills(run: Run) -> int:
    """For MINUTES, or until the run's end; returns how many."""
    chance, killed, until = random.Random(0), 0, time.monotonic() + 60 * MINUTES
    due = time.monotonic()
    while time.monotonic() < until and run.process.poll() is None:
        if time.monotonic() > due:
            kill(run, chance.choice(HOSTS))
            killed, due = killed + 1, time.monotonic() + chance.uniform(*BETWEEN)
        time.sleep(0.2)
    return killed


FAULTS: dict[str, tuple[int, Callable[[Run], Any] | None]] = {
    "nothing": (STEPS, None),
    "a replica is killed": (STEPS, kill),
    "the coordinator is killed": (STEPS, kill_coordinator),
    "a link is cut for 20 s": (STEPS, cut_link),
    "a replica at half speed": (STEPS, half_speed),
    "nothing, in a longer run": (LONGER, None),
    "a host comes up late": (LONGER, boot),
    "nothing, in the longest": (LONG, None),
    f"random kills for {MINUTES} minutes": (LONG, random_kills),
}


def struck(cluster: Cluster, name: str) -> dict[str, Any]:
    """The row of one run. Raises RuntimeError where it does not reach its end."""
    steps, strike = FAULTS[name]
    if strike is boot:
        cluster["node3"].power_off()
    run, kills = launch(cluster, name, steps), None
    while strike and run.step < AT and run.process.poll() is None:
        time.sleep(0.2)
    if strike:
        kills = strike(run)
    if strike is random_kills and run.process.poll() is not None:
        raise RuntimeError(f"{name}: the run ended before that; give it more steps than {steps}")
    if code := run.process.wait():
        raise RuntimeError(f"{name}: the run ended with {code}:\n{run.said[-4000:]}")
    seconds = time.monotonic() - run.begun
    saved = next(
        json.loads((run.output(number) / "success.json").read_text())
        for number in range(len(HOSTS))
        if (run.output(number) / "success.json").exists()
    )
    events = list(run.events())
    told = {(event["step"], event["replica"]): event for event in events if event["event"] == "replica_lost"}
    joins = {(event["step"], event["replica"]) for event in events if event["event"] == "replica_joins"}
    missed = max((event.get("missed", 0) for event in events), default=0)
    return {
        "fault": name,
        "steps": steps,
        "steps_made": saved["steps"],
        "seconds": f"{seconds:.0f}",
        "held_out_loss": f"{saved['held_out_loss']:.4f}",
        "kills": "" if kills is None else kills,
        "lost": len(told),
        "joined": len(joins),
        "missed": missed,
        "samples": steps * 12,
        **pages.where(),
    }


# ---- the page ----------------------------------------------------------------------------------------------------
def table(rows: list[dict[str, Any]]) -> str:
    plain = {row["steps"]: row for row in rows if row["fault"].startswith("nothing")}
    lines = []
    for row in rows:
        reference = plain[row["steps"]]
        seconds, loss = float(row["seconds"]), float(row["held_out_loss"])
        more, apart = seconds - float(reference["seconds"]), loss / float(reference["held_out_loss"]) - 1
        same = row is reference
        what = row["fault"] + (f" ({row['kills']})" if row["kills"] else "")
        further = int(row["steps_made"]) - int(row["steps"])
        cells = [
            what,
            row["steps"] + (f" + {further}" if further else ""),
            f"{seconds:.0f} s" + ("" if same else f" ({more:+.0f})"),
        ]
        cells += [f"{loss:.3f}" + ("" if same else f" ({100 * apart:+.1f} %)"), row["lost"], row["joined"]]
        lines.append([*cells, f"{int(row['missed']):,} of {int(row['samples']):,} samples"])
    head = ["what happens", "steps", "time", "held-out loss", "lost", "joined", "trained on later"]
    return markdown(head, lines) + f"\n\nMeasured on: {rows[-1]['machine']}."


def tables() -> dict[str, str]:
    return {"elastic": table(pages.read(RESULTS))}


def main() -> int:
    parser = pages.command_line(__doc__)
    parser.add_argument("--only", nargs="+", help="faults whose name has one of these words (default: all)")
    options = parser.parse_args()
    require()
    asked = [name for name in FAULTS if not options.only or any(word in name for word in options.only)]
    rows = {row["fault"]: row for row in (pages.read(RESULTS) if RESULTS.exists() else [])}
    with Cluster(len(HOSTS) + 1) as cluster:
        for name in asked:
            rows[name] = struck(cluster, name)
            print(rows[name], flush=True)
            cluster.heal()
            pages.save(RESULTS, [rows[fault] for fault in FAULTS if fault in rows])
    pages.write(PAGE, tables())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
