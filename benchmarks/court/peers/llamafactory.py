"""LLaMA-Factory, by what `llamafactory-cli train FILE` calls, with its own template chatml and its files of data sets.

It imports torchaudio, whose wheel wants CUDA's libraries. Without a GPU an empty module stands there: no row has sound.
"""

import importlib.machinery
import json
import sys
import types
from pathlib import Path

from benchmarks.court.peers import common, record

STAGES = {"chat": "sft", "text": "pt", "dpo": "dpo", "orpo": "dpo", "kto": "kto", "image": "sft"}
CHAT = {
    "formatting": "openai",
    "columns": {"messages": "messages", "tools": "tools"},
    "tags": {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
        "observation_tag": "tool",
        "function_tag": "function_call",
        "system_tag": "system",
    },
}
COLUMNS: dict[str, record.Job] = {
    "chat": CHAT,
    "text": {"columns": {"prompt": "text"}},
    "dpo": {"ranking": True, "columns": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}},
    "kto": {"columns": {"prompt": "prompt", "response": "completion", "kto_tag": "label"}},
    "image": CHAT | {"formatting": "sharegpt", "columns": {"messages": "messages", "images": "images"}},
}
OF_KIND: dict[str, record.Job] = {
    "dpo": {"template": "empty", "pref_beta": 0.1, "pref_loss": "sigmoid"},
    "orpo": {"template": "empty", "pref_beta": 0.1, "pref_loss": "orpo"},
    "kto": {"template": "empty", "pref_beta": 0.1},
    "image": {"template": "gemma3", "freeze_vision_tower": True, "freeze_multi_modal_projector": False},
}


def data_set(job: record.Job) -> Path:
    """Write a job's rows and dataset_info.json, and return their folder."""
    folder = Path(job["result"]).with_suffix(".data")
    folder.mkdir(exist_ok=True)
    rows = [json.loads(line) for line in Path(job["file"]).read_text().splitlines()]
    if job["kind"] == "image":
        rows = [common.with_marks(row, Path(job["file"]).parent) for row in rows]
    for row in rows:
        for key in ("chosen", "rejected", "completion") if job["kind"] not in ("chat", "image") else ():
            if key in row:
                row[key] += "<|im_end|>"  # its template without marks writes no end
        if "tools" in row:
            row["tools"] = json.dumps(row["tools"])
    (folder / "rows.json").write_text(json.dumps(rows))
    # Rows of its form openai get a system message more, "detailed thinking off"; calls of tools have no other form.
    columns = COLUMNS["dpo" if job["kind"] == "orpo" else job["kind"]]
    if "tools" not in rows[0] and "tools" in columns["columns"]:
        columns = columns | {"formatting": "sharegpt", "columns": {"messages": "messages"}}
    (folder / "dataset_info.json").write_text(json.dumps({"court": {"file_name": "rows.json"} | columns}))
    return folder


def answer(job: record.Job) -> str:
    sys.modules.setdefault("torchaudio", types.ModuleType("torchaudio"))
    sys.modules["torchaudio"].__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
    from llamafactory.train.tuner import run_exp

    given = common.arguments(job)
    if job["dies_after"]:
        given["save_only_model"] = False
    config = given | {
        "stage": STAGES[job["kind"]],
        "do_train": True,
        "model_name_or_path": job["model_path"],
        "dataset": "court",
        "dataset_dir": str(data_set(job)),
        "template": "chatml",
        "cutoff_len": 256,
        "finetuning_type": "lora" if job["lora"] else "full",
        "disable_gradient_checkpointing": True,
        "flash_attn": "sdpa",
        "overwrite_output_dir": True,
    }
    config |= OF_KIND.get(job["kind"], {})
    if job["lora"]:
        config |= {"lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_target": "all"}
    if job["kind"] == "text":
        config["packing"] = False  # a text is a sample
    if job["packing"]:
        config |= {"packing": True, "neat_packing": True}
    if job["died"]:
        config["overwrite_output_dir"] = False
        config["resume_from_checkpoint"] = f"{job['output']}/checkpoint-{job['dies_after']}"
    run_exp(dict(config))
    return str(job["output"])


if __name__ == "__main__":
    record.run(answer)
