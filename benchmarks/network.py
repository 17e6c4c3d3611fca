"""Slow networks: how much of a step is communication, for every strategy, on real hosts whose links are throttled.

    sudo .venv/bin/python -m benchmarks.network     # measures -> benchmarks/results/network*.csv, docs/evidence/network.*
    python -m benchmarks.network --quick            # DDP on two hosts at two rates; prints the table and writes nothing

Hosts are network namespaces of this machine (testbed/): each rank runs train.py on one of them, and what is between them is
a token bucket (tbf). A case is one run; its rates change between its steps. The same ranks on one host, where nothing
crosses a link, are what a step costs without a network.
"""

import json
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import network_tables, pages
from benchmarks.network_tables import tables
from benchmarks.pages import RESULTS, Row
from testbed.cluster import Cluster
from testbed.host import Host
from testbed.needs import require
from testing.command_line import as_flags

PORT = 29500
Cases = dict[str, tuple[int, ...]]  # strategy -> accumulations
Rates = tuple[str | None, ...]

# accumulation -> steps before the first block (DDP orders its buckets, PowerSGD reduces plainly), and steps of a block that
# count; one more goes before them, in which TCP finds its rate. On one host steps are short, and all shares lean on them.
WARM_UP, MEASURED, MEASURED_ALONE = {1: 3, 8: 1}, {1: 4, 8: 1}, {1: 10, 8: 2}
# ZeRO-3 as it is for a model far larger than stage3_max_reuse_distance; the small one here it would gather only once.
RELEASED = "benchmarks/zero3_released.json"
MICRO_BATCH, LENGTH = 4, 128  # sequences, tokens
LOSS_STEPS = 120
RATES = ("10gbit", "1gbit", "200mbit", "50mbit")
COMPRESSIONS = ("none", "bf16", "fp16", "power_sgd")
# name -> what volume() knows it by, flags
STRATEGIES: dict[str, tuple[str, list[str]]] = {
    "DDP": ("ddp", ["--ds_config", "none"]),
    "DDP, bf16 gradients": ("ddp", ["--ds_config", "none", "--ddp_comm_hook", "bf16"]),
    "DDP, fp16 gradients": ("ddp", ["--ds_config", "none", "--ddp_comm_hook", "fp16"]),
    "DDP, PowerSGD": ("ddp", ["--ds_config", "none", "--ddp_comm_hook", "power_sgd"]),
    **{f"ZeRO-{stage}": (f"zero{stage}", ["--ds_config", f"ds_configs/zero{stage}.json"]) for stage in (1, 2)},
    "ZeRO-3": ("zero3", ["--ds_config", RELEASED]),
    "HSDP": ("hsdp", ["--accelerate_config", "accelerate_configs/hsdp_1x4.yaml"]),
}


@dataclass(frozen=True)
class Group:
    """Cases that share one process group: `per_host` ranks on each of `hosts` hosts.

    rates: in tc's notation, in order; None: unlimited
    """

    hosts: int
    per_host: int
    rates: Rates
    cases: Cases

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    def jobs(self) -> list[dict[str, Any]]:
        """One run of train.py each."""
        found = []
        for strategy, k in ((name, k) for name, of in self.cases.items() for k in of):
            measured = (MEASURED_ALONE if self.hosts == 1 else MEASURED)[k]
            steps = WARM_UP[k] + len(self.rates) * (1 + measured)
            flags = [*flags_for(steps, MICRO_BATCH * self.ranks * k, evaluated=8), *STRATEGIES[strategy][1]]
            found.append(job(strategy, k, flags, self.rates, WARM_UP[k], measured))
        return found


def job(strategy: object, k: int, flags: list[str], rates: Rates, warm_up: int, measured: int) -> dict[str, Any]:
    """A run for run(). k: its accumulation; warm_up: steps before the first rate; measured: steps at each rate"""
    blocks = {"rates": rates, "warm_up": warm_up, "measured": measured}
    return {"strategy": strategy, "accumulation": k, "flags": flags, **blocks}


BOTH = (1, 8)
PLAN = (
    Group(2, 1, RATES, {strategy: BOTH for strategy in STRATEGIES if strategy != "HSDP"}),
    Group(2, 2, RATES, {"DDP": BOTH, "ZeRO-3": (1,), "HSDP": BOTH}),
    Group(4, 1, ("200mbit",), dict.fromkeys(STRATEGIES, BOTH)),
)
QUICK = (Group(2, 1, ("1gbit", "50mbit"), {"DDP": (1,)}),)


def flags_for(steps: int, global_batch: int, evaluated: int) -> list[str]:
    """The tiny recipe's model and data, for a number of steps."""
    return as_flags(
        max_steps=steps,
        global_batch_size=global_batch,
        per_device_train_batch_size=MICRO_BATCH,
        max_length=LENGTH,
        logging_steps=1_000_000,
        max_eval_samples=evaluated,
        eval_steps=None,
        save_steps=None,
        report_to="",
    )


# ---- measuring ---------------------------------------------------------------------------------------------------
def run(cluster: Cluster, hosts: int, per_host: int, jobs: list[dict[str, Any]], timeout: float = 1800) -> list[Row]:
    """Run jobs in one process group, setting the rates that they ask for. Raises RuntimeError when a rank fails."""
    used = list(cluster)[:hosts]
    with tempfile.TemporaryDirectory(dir=cluster.shared) as directory:
        folder = Path(directory)
        (folder / "jobs.json").write_text(json.dumps(jobs))
        processes = {}
        for rank in range(hosts * per_host):
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank % per_host,
                "WORLD_SIZE": hosts * per_host,
                "LOCAL_WORLD_SIZE": per_host,
                "MASTER_ADDR": used[0].address,
                "MASTER_PORT": PORT,
            }
            variables: Any = {key: str(value) for key, value in place.items()}
            with (folder / f"rank{rank}.log").open("w") as log:
                processes[rank] = used[rank // per_host].popen(
                    [cluster.python, "-m", "benchmarks.network_worker", str(folder)],
                    stdout=log,
                    stderr=log,
                    OMP_NUM_THREADS="1",
                    GLOO_SOCKET_IFNAME="eth0",
                    **variables,
                )
        try:
            _serve(processes, used, folder / "wanted", time.monotonic() + timeout)
            if not (folder / "results.json").exists():
                logs = "\n".join((folder / f"rank{rank}.log").read_text()[-2000:] for rank in processes)
                raise RuntimeError(f"{len(processes)} ranks on {hosts} hosts left no results:\n{logs}")
            return json.loads((folder / "results.json").read_text())
        finally:
            for host in used:
                host.kill("benchmarks.network_worker")
                host.throttle(None)
            for process in processes.values():
                process.wait()


def _serve(processes: dict[int, subprocess.Popen[Any]], hosts: list[Host], wanted: Path, deadline: float) -> None:
    """Throttle the hosts to each rate that rank 0 writes into `wanted`, until all ranks end, or one fails."""
    while any(process.poll() is None for process in processes.values()):
        if any(process.poll() for process in processes.values()) or time.monotonic() > deadline:
            return
        if wanted.exists():
            rate = wanted.read_text()
            for host in hosts:
                host.throttle(rate if rate != "unlimited" else None)
            wanted.unlink()
        time.sleep(0.01)


def rows_of(group: Group, results: list[Row], alone: list[Row]) -> list[Row]:
    """Return one row per case and rate. alone: results of the same ranks on one host."""
    base = {(found["strategy"], found["accumulation"]): found["blocks"][0]["seconds"] for found in alone}
    rows = []
    for found in results:
        strategy, k = found["strategy"], found["accumulation"]
        without = statistics.median(base[strategy, k])
        by_formula = (
            network_tables.volume(STRATEGIES[strategy][0], k, group.hosts, group.per_host) * found["parameters"]
        )
        by_formula *= (2 if "16" in strategy else 4) / found["compression"]
        for rate, block in zip(found["rates"], found["blocks"], strict=True):
            seconds = statistics.median(block["seconds"])
            rows.append(
                {
                    "hosts": group.hosts,
                    "ranks_per_host": group.per_host,
                    "strategy": strategy,
                    "accumulation": k,
                    "rate": rate,
                    "step_seconds": round(seconds, 4),
                    "one_host_seconds": round(without, 4),
                    "fastest_step": round(min(block["seconds"]), 4),
                    "slowest_step": round(max(block["seconds"]), 4),
                    "communication_percent": round(100 * (1 - without / seconds), 1),
                    "megabytes_sent": round(block["bytes"] / 1e6, 3),
                    "megabytes_formula": round(by_formula / 1e6, 3),
                    "sequences": MICRO_BATCH * group.ranks * k,
                    "parameters": found["parameters"],
                }
            )
    return rows


def measure(cluster: Cluster, plan: tuple[Group, ...] = PLAN) -> list[Row]:
    """All groups and, once per number of ranks, the same cases on one host."""
    together: dict[int, Cases] = {}
    for group in plan:
        cases = together.setdefault(group.ranks, {})
        for strategy, accumulations in group.cases.items():
            cases[strategy] = tuple(sorted({*cases.get(strategy, ()), *accumulations}))
    alone = {}
    for count, cases in together.items():
        _say(f"{count} ranks on one host")
        alone[count] = run(cluster, 1, count, Group(1, count, (None,), cases).jobs())
    rows = []
    for group in plan:
        _say(f"{group.per_host} rank(s) on each of {group.hosts} hosts")
        rows += rows_of(group, run(cluster, group.hosts, group.per_host, group.jobs()), alone[group.ranks])
    return rows


def losses(cluster: Cluster) -> list[Row]:
    """Held-out loss before and after the same steps on the same data, for each compression; two ranks on one host."""
    _say("held-out losses")
    flags = [*flags_for(LOSS_STEPS, 2 * MICRO_BATCH, evaluated=100), "--ds_config", "none"]
    jobs = [job(name, 1, [*flags, "--ddp_comm_hook", name], (None,), 0, LOSS_STEPS - 1) for name in COMPRESSIONS]
    return [
        {
            "ddp_comm_hook": found["strategy"],
            "steps": LOSS_STEPS,
            "held_out_loss_before": found["held_out"][0],
            "held_out_loss": found["held_out"][-1],
            "step_seconds": round(statistics.median(found["blocks"][0]["seconds"]), 4),
        }
        for found in run(cluster, 1, 2, jobs)
    ]


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text} ...", flush=True)


def main() -> int:
    parser = pages.command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="DDP on two hosts at two rates; writes nothing")
    options = parser.parse_args()
    require()
    if options.quick:
        with Cluster(2) as cluster:
            print(network_tables.table(measure(cluster, QUICK)))
        return 0
    began = time.monotonic()
    with Cluster(4) as cluster:
        rows, learned = measure(cluster), losses(cluster)
    where = pages.where()
    pages.save(RESULTS / "network.csv", [row | where for row in rows])
    pages.save(RESULTS / "network_losses.csv", [row | where for row in learned])
    _say(f"measured in {time.monotonic() - began:.0f} s")
    pages.write(network_tables.PAGE, tables())
    network_tables.draw(pages.read(RESULTS / "network.csv"), network_tables.PAGE.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
