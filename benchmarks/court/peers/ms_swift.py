"""ms-swift, by what `swift sft` and `swift rlhf` call, with its own template chatml."""

import json
import os
from pathlib import Path

from benchmarks.court.peers import common, record


def rows_of(job: record.Job) -> str:
    """Write rows in ms-swift's form and return the file: messages, with a better answer as the last one."""
    return common.write_rows(job, [_row(job, row) for row in common.rows_of(job)])


def _row(job: record.Job, row: record.Job) -> record.Job:
    if job["kind"] == "text":
        return {"messages": [{"role": "assistant", "content": row["text"]}]}
    if job["kind"] in ("dpo", "orpo", "kto"):
        answer = row.get("chosen", row.get("completion"))
        messages = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": answer}]
        more = {"label": row["label"]} if job["kind"] == "kto" else {"rejected_response": row["rejected"]}
        return {"messages": messages} | more
    if "tools" in row:
        messages = [each for message in row["messages"] for each in _turns(message)]
        return {"tools": json.dumps(row["tools"]), "messages": messages}
    return common.with_marks(row, Path(job["file"]).parent) if job["kind"] == "image" else row


def _turns(message: record.Job) -> list[record.Job]:
    """Return a message as ms-swift's documentation writes calls of tools: each is a turn of its own."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    said = [{"role": message["role"], "content": message["content"]}] if message["content"] else []
    return said + [{"role": "tool_call", "content": json.dumps(call)} for call in calls]


def answer(job: record.Job) -> str:
    os.environ["USE_HF"] = "1"  # read when it is imported
    import swift
    from swift.pipelines import pretrain_main, rlhf_main, sft_main

    given = common.arguments(job)
    words = {key: value for key, value in given.items() if key not in ("use_cpu", "fsdp", "fsdp_config")}
    settings = common.filled("ms_swift", job | {"rows": rows_of(job)})
    words |= settings["run"] | (settings["lora"] if job["lora"] else {})
    words |= {
        "model_type": settings["types"].get(job["model"], job["model"]),
        "template": settings["templates"].get(job["kind"], "dummy"),
        "tuner_type": "lora" if job["lora"] else "full",
        "save_steps": job["dies_after"] or job["steps"],
    }
    if job["strategy"] == "fsdp2":
        preset = json.loads((Path(swift.__file__).parent / "config/fsdp2.json").read_text())
        preset["fsdp_config"]["state_dict_type"] = "FULL_STATE_DICT"  # by itself shards are saved
        words["fsdp"] = preset
    if job["kind"] == "image":
        words["freeze_aligner"] = False
    if job["packing"]:
        words |= {"packing": True, "per_device_train_batch_size": 1}
    begin = pretrain_main if job["kind"] == "text" else sft_main
    if job["kind"] in ("dpo", "kto", "orpo"):
        begin = rlhf_main
        words |= {"rlhf_type": job["kind"], "beta": 0.1}
    if job["died"]:
        words["resume_from_checkpoint"] = f"{job['output']}/checkpoint-{job['dies_after']}"
        words["save_steps"] = job["steps"]
    begin(as_words(words))
    return f"{job['output']}/checkpoint-{job['steps']}"


def as_words(values: record.Job) -> list[str]:
    return [
        word
        for key, value in values.items()
        for word in (f"--{key}", value if isinstance(value, str) else json.dumps(value))
    ]
