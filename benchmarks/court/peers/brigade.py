"""Brigade, by train.main with the flags of a recipe."""

import train
from benchmarks.court.peers import common, record
from testing.command_line import as_flags
from testing.runs import forget

STRATEGIES = {
    "": [],
    "ddp": ["--ds_config", "none"],
    "zero2": ["--ds_config", "ds_configs/zero2.json"],
    "zero3": ["--ds_config", "ds_configs/zero3.json"],
    "fsdp2": ["--accelerate_config", "accelerate_configs/fsdp2_1x2.yaml"],
}
OF_KIND: dict[str, record.Job] = {
    "text": {"chat_template": "none"},
    "image": {"images": True},
    **{kind: {"objective": kind, "beta": 0.1, "chat_template": "none"} for kind in ("dpo", "kto", "orpo")},
}


def answer(job: record.Job) -> str:
    flags = common.shared(job) | {
        "model_name_or_path": job["model_path"],
        "from_scratch": False,
        "tokenizer_name_or_path": None,
        "chat_template": None,
        "dataset_name": None,
        "train_file": job["file"],
        "validation_file": job["held_out"],
        "max_length": 256,
        "packing": job["packing"],
        "global_batch_size": job["micro"] * job["accumulation"] * job["ranks"],
        "max_grad_norm": 0,
        "eval_steps": 1000,
        "eval_answers": 0,
        "save_steps": job["dies_after"] or None,
        "report_to": [],
        "report_page": False,
    }
    if job["lora"]:
        flags |= {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_target_modules": "all-linear"}
    flags |= OF_KIND.get(job["kind"], {})
    forget(train.main([*as_flags(**flags), *STRATEGIES[job["strategy"]]]))  # the same command continues a run that died
    return str(job["output"])


if __name__ == "__main__":
    record.run(answer)
