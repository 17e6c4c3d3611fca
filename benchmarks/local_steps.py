"""Replicas that meet every H steps, on real hosts: what crosses a host's link, how long a step takes, and what is learned.

    sudo .venv/bin/python -m benchmarks.local_steps     # measures -> results/local_steps_*.csv, docs/evidence/local-training.md
    sudo .venv/bin/python -m benchmarks.local_steps --only times clock   # what has to have the machine for itself

Hosts, links and the tiny recipe's model are those of benchmarks/network.py. Every method sees the same samples: one micro-batch
per step and host, and DDP with accumulation eight of them in one step. There are three measurements:

    times     seconds and bytes of a step; the rates change between the steps of one run
    losses    held-out losses on links without a limit, which do not depend on how busy the machine is
    clock     the same runs at 200 Mbit/s: held-out loss and the seconds of training until then
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks import local_steps_tables, network, pages
from benchmarks.local_steps_tables import FILES, LOOKS, RATES, REAL, tables, timed_as
from benchmarks.network import MICRO_BATCH, flags_for
from benchmarks.pages import RESULTS, Row
from testbed.cluster import Cluster
from testbed.needs import require
from testing.command_line import as_flags

SAMPLES = 1600  # that each method learns from: on two hosts 200 steps
EVALUATIONS, HELD_OUT = 8, 100
WARM_UP = 5  # steps at least: DDP orders its buckets, and PowerSGD's first tenth of all steps is plain


@dataclass(frozen=True)
class Method:
    """every: steps of a round; rounds: timed at each rate; width: bytes of a value on its way, None where no formula is"""

    flags: list[str]
    accumulation: int = 1
    every: int = 1
    rounds: int = 10
    width: float | None = 4


def ddp(**more: Any) -> list[str]:
    return as_flags(ds_config="none", **more)


def local(every: int, **more: Any) -> list[str]:
    return ddp(sync_every=every, **more)


def diloco(every: int, **more: Any) -> list[str]:
    return local(every, outer_optim="nesterov", **more)


ROUNDS = {5: 4, 20: 2, 50: 1}  # H -> rounds that are timed
METHODS = {
    "DDP": Method(ddp()),
    "DDP, accumulation 8": Method(ddp(), accumulation=8, rounds=3),
    "DDP, PowerSGD": Method(ddp(ddp_comm_hook="power_sgd"), width=None),
    **{f"Local SGD, H = {every}": Method(local(every), 1, every, rounds) for every, rounds in ROUNDS.items()},
    **{f"DiLoCo, H = {every}": Method(diloco(every), 1, every, rounds) for every, rounds in ROUNDS.items()},
    "DiLoCo, H = 50, int8": Method(diloco(50, sync_precision="int8"), 1, 50, ROUNDS[50], width=1 + 4 / 256),
    "streaming, H = 20": Method(diloco(20, sync_fragments=4), 1, 20, ROUNDS[20]),
}


# ---- runs of train.py --------------------------------------------------------------------------------------------
def timed_job(hosts: int, name: str) -> dict[str, Any]:
    """Whole rounds at each rate."""
    from brigade.train.local.local_steps import OVERLAP

    of = METHODS[name]
    warm_up, measured = max(WARM_UP, of.every), of.rounds * of.every
    # A fragment is on its way for OVERLAP steps. None is when the rate changes, and what was sent before is not measured. In the
    # last OVERLAP steps of a run no fragment is sent: they come after what is measured.
    dropped, last = (OVERLAP, OVERLAP) if of.every > 1 else (1, 0)
    steps = warm_up + len(RATES) * (dropped + measured) + last
    return _job(hosts, name, steps, 8, [], rates=RATES, warm_up=warm_up, dropped=dropped, measured=measured)


def learning_job(hosts: int, name: str, rate: str | None = None) -> dict[str, Any]:
    """All SAMPLES, with evaluations."""
    of = METHODS[name]
    steps = SAMPLES // (MICRO_BATCH * hosts * of.accumulation)
    evaluations = as_flags(eval_steps=max(of.every, steps // EVALUATIONS), eval_answers=0)
    return _job(hosts, name, steps, HELD_OUT, evaluations, rates=(rate,), warm_up=0, measured=steps - 1)


def _job(hosts: int, name: str, steps: int, evaluated: int, more: list[str], **blocks: Any) -> dict[str, Any]:
    of = METHODS[name]
    flags = flags_for(steps, MICRO_BATCH * hosts * of.accumulation, evaluated)
    return {"strategy": name, "accumulation": of.accumulation, "flags": [*flags, *of.flags, *more], **blocks}


# ---- rows of their results ---------------------------------------------------------------------------------------
def formula(of: Method, hosts: int, parameters: int) -> float:
    """Bytes that leave a host per step: 2 (n - 1) / n values of each parameter, every H steps; 0 where there is none."""
    return 2 * (hosts - 1) / hosts * (of.width or 0) * parameters / of.every


def timed(hosts: int, found: Row) -> Iterator[Row]:
    """One row per rate: bytes and seconds of a step, both the mean over a round; seconds are the median of the rounds."""
    of = METHODS[found["strategy"]]
    for rate, block in zip(found["rates"], found["blocks"], strict=True):
        # Wherever a round begins, each `every` steps in a row meet once.
        starts = range(0, len(block["seconds"]), of.every)
        rounds = [statistics.mean(block["seconds"][start : start + of.every]) for start in starts]
        yield {
            "hosts": hosts,
            "method": found["strategy"],
            "accumulation": of.accumulation,
            "rate": rate,
            "rounds": len(rounds),
            "step_seconds": round(statistics.median(rounds), 4),
            "fastest_round": round(min(rounds), 4),
            "slowest_round": round(max(rounds), 4),
            "kilobytes_sent": round(block["bytes"] / 1e3, 2),
            "kilobytes_formula": round(formula(of, hosts, found["parameters"]) / 1e3, 2),
        }


def learned(hosts: int, found: Row) -> Iterator[Row]:
    """One row per evaluation."""
    (rate,) = found["rates"]
    for step, loss, seconds in found["evaluations"]:
        yield {
            "hosts": hosts,
            "method": found["strategy"],
            "step": step,
            "samples": step * MICRO_BATCH * hosts * found["accumulation"],
            "held_out_loss": round(loss, 5),
            **({"rate": rate, "seconds": round(seconds, 3)} if rate else {}),
        }


# ---- measuring ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Measurement:
    """methods: by number of hosts"""

    methods: dict[int, list[str]]
    job: Callable[[int, str], dict[str, Any]]
    rows: Callable[[int, Row], Iterator[Row]]


ALL = {2: list(METHODS), 4: [name for name in METHODS if "int8" not in name]}
MEASUREMENTS = {
    "times": Measurement(
        {hosts: list(dict.fromkeys(map(timed_as, of))) for hosts, of in ALL.items()}, timed_job, timed
    ),
    "losses": Measurement(ALL, learning_job, learned),
    "clock": Measurement({2: list(LOOKS)}, lambda hosts, name: learning_job(hosts, name, REAL), learned),
}


def measure(what: str) -> list[Row]:
    of, rows = MEASUREMENTS[what], []
    with Cluster(max(of.methods)) as cluster:
        for hosts, methods in of.methods.items():
            network._say(f"{what}, {hosts} hosts")
            results = network.run(cluster, hosts, 1, [of.job(hosts, name) for name in methods])
            rows += [row for found in results for row in of.rows(hosts, found)]
    return rows


def main() -> int:
    parser = pages.command_line(__doc__)
    parser.add_argument(
        "--only", choices=FILES, nargs="+", help="measure only these; of the rest what is there is drawn"
    )
    options = parser.parse_args()
    require()
    where = pages.where()
    for what in options.only or FILES:
        pages.save(RESULTS / FILES[what], [row | where for row in measure(what)])
    network._say("measured")
    pages.write(local_steps_tables.PAGE, tables())
    local_steps_tables.draw()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
