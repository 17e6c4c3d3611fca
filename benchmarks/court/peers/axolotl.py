"""axolotl, by what `axolotl train FILE` calls in each process, with the tokenizer's chat template."""

import os
from pathlib import Path

from benchmarks.court.peers import common, record

# Keys that have Transformers' names.
SAME = (
    *("output_dir", "gradient_accumulation_steps", "max_steps", "learning_rate", "warmup_steps", "max_grad_norm"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "logging_steps", "save_strategy"),
)


def rows_of(job: record.Job) -> str:
    """Return the file of a job's rows; ORPO's and those of images are written in axolotl's form."""
    if job["kind"] not in ("orpo", "image"):
        return str(job["file"])
    rows = common.rows_of(job)
    for row in rows:
        for key in ("chosen", "rejected") if job["kind"] == "orpo" else ():
            row[key] = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[key]}]
        for message in row.get("messages", ()):
            parts = message["content"]
            parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
            message["content"] = [_part(part, Path(job["file"]).parent) for part in parts]
    return common.write_rows(job, rows)


def _part(part: record.Job, folder: Path) -> record.Job:
    return part if part["type"] == "text" else {"type": "image", "path": str(folder / part["image"])}


def config_of(job: record.Job) -> record.Job:
    given = common.arguments(job)
    more = {
        "rows_file": rows_of(job),
        "prepared": f"{job['result']}.prepared",
        "batch": 1 if job["packing"] else job["micro"],
        "optim": given["optim"],
    }
    settings = common.filled("axolotl", job | more)
    config = {key: given[key] for key in SAME} | settings["run"] | settings["kinds"][job["kind"]]["run"]
    config["datasets"][0] |= settings["kinds"][job["kind"]]["rows"]
    if job["dies_after"]:
        config["save_steps"] = given["save_steps"]
    if job["lora"]:
        config |= settings["lora"]
    if job["strategy"].startswith("zero"):
        config["deepspeed"] = given["deepspeed"]
    if job["strategy"] == "fsdp2":
        config |= settings["fsdp2"]
    return config


def answer(job: record.Job) -> str:
    os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"  # read when it is imported
    from axolotl.cli.train import do_cli

    config = config_of(job)
    if job["died"]:
        config["resume_from_checkpoint"] = f"{job['output']}/checkpoint-{job['dies_after']}"
    do_cli(common.write_config(job, config))
    return str(job["output"])
