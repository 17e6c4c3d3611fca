"""LLaMA-Factory, by what `llamafactory-cli train FILE` calls, with its own template chatml and its files of data sets.

It imports torchaudio, whose wheel wants CUDA's libraries. Without a GPU an empty module stands there: no row has sound.
"""

import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path

from benchmarks.court.peers import common, record


def data_set(job: record.Job, columns: record.Job) -> Path:
    """Write a job's rows and dataset_info.json, and return their folder. columns: how the latter describes the former"""
    folder = Path(job["result"]).with_suffix(".data")
    folder.mkdir(exist_ok=True)
    rows = common.rows_of(job)
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
    if "tools" not in rows[0] and "tools" in columns["columns"]:
        columns = columns | {"formatting": "sharegpt", "columns": {"messages": "messages"}}
    (folder / "dataset_info.json").write_text(json.dumps({"court": {"file_name": "rows.json"} | columns}))
    return folder


def answer(job: record.Job) -> str:
    os.environ["FSDP_STATE_DICT_TYPE"] = "FULL_STATE_DICT"  # as its examples/accelerate/fsdp_config.yaml
    sys.modules.setdefault("torchaudio", types.ModuleType("torchaudio"))
    sys.modules["torchaudio"].__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
    from llamafactory.train.tuner import run_exp

    settings = common.filled("llamafactory", job)
    of_kind = settings["kinds"][job["kind"]]
    config = common.arguments(job) | settings["run"] | of_kind["run"] | (settings["lora"] if job["lora"] else {})
    config |= {
        "dataset_dir": str(data_set(job, of_kind["rows"])),
        "finetuning_type": "lora" if job["lora"] else "full",
        "save_only_model": False,
    }
    if job["packing"]:
        config |= {"packing": True, "neat_packing": True}
    if job["died"]:
        config["overwrite_output_dir"] = False
        config["resume_from_checkpoint"] = f"{job['output']}/checkpoint-{job['dies_after']}"
    run_exp(dict(config))
    return str(job["output"])
