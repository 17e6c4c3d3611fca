"""Brigade, by train.main with the flags of a recipe."""

import train
from benchmarks.court.peers import common, record
from testing.command_line import as_flags
from testing.runs import forget


def answer(job: record.Job) -> str:
    settings = common.filled("brigade", job)
    flags = common.shared(job) | settings["run"] | settings["kinds"].get(job["kind"], {})
    flags |= settings["lora"] if job["lora"] else {}
    if flags["optim"] == "sgd":  # Adam's figures beside it are refused
        flags = {key: value for key, value in flags.items() if not key.startswith("adam_")}
    flags["global_batch_size"] = job["micro"] * job["accumulation"] * job["ranks"]
    flags["save_steps"] = job["dies_after"] or None
    strategy = settings["strategies"][job["strategy"]]
    forget(train.main([*as_flags(**flags), *strategy]))  # the same command continues a run that died
    return str(job["output"])
