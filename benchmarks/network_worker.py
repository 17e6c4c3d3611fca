"""One rank of benchmarks/network.py, on one of its hosts: runs of train.py whose steps are timed in blocks.

python -m benchmarks.network_worker FOLDER, with jobs.json in it; rank 0 leaves results.json.
"""

import contextlib
import io
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

import train
from brigade.train.distributed import ranks
from brigade.train.host.cluster import world_from_environment
from testing.runs import forget


def sent(card: str = "eth0") -> tuple[int, int]:
    """(bytes, packets) that have left this host's network card, headers included. (/sys/class/net shows another namespace's.)"""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == card:
            count, packets = figures.split()[8:10]
            return int(count), int(packets)
    return 0, 0


class Blocks(TrainerCallback):
    """After `warm_up` steps, one block of dropped + measured steps for each of `rates`; steps after the last block go uncounted.

    wanted: on the rank that asks for rates, the file to write them into; whoever throttles the hosts removes it
    """

    def __init__(
        self, rates: list[str | None], warm_up: int, measured: int, wanted: Path | None, dropped: int = 1
    ) -> None:
        self.rates, self.warm_up, self.wanted = rates, warm_up, wanted
        self.dropped, self.length = dropped, dropped + measured
        self.ends: list[tuple[float, int, int]] = []  # of each step: time, bytes and packets that this host has sent
        self.began, self.evaluating = 0.0, 0.0  # when the first step did; seconds that evaluations have taken since
        self.trained: list[float] = []  # at each evaluation: seconds since then without those

    def _ask(self, rate: str | None) -> None:
        ranks.gather_all(None)
        if self.wanted:
            draft = self.wanted.with_suffix(".draft")
            draft.write_text(rate or "unlimited")
            draft.rename(self.wanted)
            while self.wanted.exists():
                time.sleep(0.005)
        ranks.gather_all(None)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        block, place = divmod(state.global_step - self.warm_up, self.length)
        if 0 <= block < len(self.rates) and place == 0:
            self._ask(self.rates[block])
        if state.global_step == 0:
            self.began, self.evaluating = time.perf_counter(), 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append((time.perf_counter(), *sent()))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        self.evaluating += metrics["eval_runtime"]
        self.trained.append(time.perf_counter() - self.began - self.evaluating if state.global_step else 0.0)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._ask(None)  # what follows is not measured

    def results(self) -> list[dict[str, Any]]:
        """Per block the seconds of each measured step, and bytes and packets per step and host, also as each rank's host counted
        them; a collective."""
        found = []
        for block in range(len(self.rates)):
            first = self.warm_up + block * self.length
            ends = self.ends[first + self.dropped - 1 : first + self.length]
            seconds = [after[0] - before[0] for before, after in itertools.pairwise(ends)]
            steps = len(seconds)
            by_rank = ranks.gather_all([(ends[-1][place] - ends[0][place]) / steps for place in (1, 2)])
            count, packets = (sum(of) / len(by_rank) for of in zip(*by_rank, strict=True))
            found.append({"seconds": seconds, "bytes": count, "packets": packets, "by_rank": by_rank})
        return found


def main(folder: Path) -> None:
    world, results = world_from_environment(), []
    for number, job in enumerate(json.loads((folder / "jobs.json").read_text())):
        wanted = folder / "wanted" if world.is_main_rank else None
        blocks = Blocks(job["rates"], job["warm_up"], job["measured"], wanted, job.get("dropped", 1))
        flags = [*job["flags"], "--output_dir", str(folder / "outputs" / str(number))]
        with contextlib.redirect_stdout(io.StringIO()):
            trainer = train.main(flags, callbacks=(blocks,))
        compression = trainer.engine.power_sgd.compression_stats()[0] if trainer.engine.power_sgd else 1
        evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
        results.append(
            job
            | {
                "parameters": trainer.engine.parameter_count(trainer.model),
                "blocks": blocks.results(),
                "compression": compression,
                "held_out": [entry["eval_loss"] for entry in evaluations],
                "evaluations": [
                    [entry["step"], entry["eval_loss"], seconds]
                    for entry, seconds in zip(evaluations, blocks.trained, strict=True)
                ],
            }
        )
        ranks.whole_again()
        forget(trainer)
        del trainer
    if world.is_main_rank:
        (folder / ".results.json").write_text(json.dumps(results))
        (folder / ".results.json").rename(folder / "results.json")


if __name__ == "__main__":
    ranks.run_to_the_end(lambda: main(Path(sys.argv[1])))
