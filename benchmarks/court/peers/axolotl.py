"""axolotl, by what `axolotl train FILE` calls in each process, with the tokenizer's chat template."""

import os
from pathlib import Path

from benchmarks.court.peers import common, record

CHAT = {"type": "chat_template", "field_messages": "messages", "roles_to_train": ["assistant"], "train_on_eos": "turn"}
TYPES: dict[str, record.Job] = {
    "chat": CHAT,
    "text": {"type": "completion", "field": "text"},
    "dpo": {"type": {"field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected"}},
    "kto": {"type": {"field_prompt": "prompt", "field_completion": "completion", "field_label": "label"}},
    "orpo": {"type": "chat_template.argilla"},
    "image": CHAT,
}

# Keys that have Transformers' names.
SAME = (
    *("output_dir", "gradient_accumulation_steps", "max_steps", "learning_rate", "warmup_steps", "max_grad_norm"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "logging_steps", "save_strategy"),
)
# Of Triton: by itself it turns them on, on a CPU, too.
KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
# ORPO's rows are chats there: with this template they are the loop's texts.
PLAIN = (
    "{% for message in messages %}{{ message.content }}{{ '<|im_end|>' if message.role == 'assistant' }}{% endfor %}"
)
# Multimodal rows by axolotl's documentation; the tower stays as it is, as the loop has it.
IMAGES = {
    "chat_template": "gemma3",
    "processor_type": "AutoProcessor",
    "skip_prepare_dataset": True,
    "remove_unused_columns": False,
    "unfrozen_parameters": ["^model.language_model", "^model.multi_modal_projector", "^lm_head"],
}


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
        "data": [{"path": rows_of(job), "ds_type": "json"} | TYPES[job["kind"]]],
        "prepared": f"{job['result']}.prepared",
        "batch": 1 if job["packing"] else job["micro"],
        "optim": given["optim"],
    }
    config = {key: given[key] for key in SAME} | common.filled("axolotl", job | more)
    if job["dies_after"]:
        config["save_steps"] = given["save_steps"]
    if job["lora"]:
        config |= {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_target_linear": True}
        config |= dict.fromkeys(KERNELS, False)
    if job["kind"] in ("dpo", "kto", "orpo"):
        config |= {"rl": job["kind"], "rl_beta": 0.1, "remove_unused_columns": False}
    if job["kind"] == "orpo":
        config |= {"chat_template": "jinja", "chat_template_jinja": PLAIN}
    if job["kind"] == "image":
        config |= IMAGES
    if job["strategy"].startswith("zero"):
        config["deepspeed"] = given["deepspeed"]
    if job["strategy"] == "fsdp2":
        wrapped = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
        config |= {"fsdp_version": 2, "fsdp_config": wrapped | {"state_dict_type": "FULL_STATE_DICT"}}
    return config


def answer(job: record.Job) -> str:
    os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"  # read when it is imported
    from axolotl.cli.train import do_cli

    config = config_of(job)
    if job["died"]:
        config["resume_from_checkpoint"] = f"{job['output']}/checkpoint-{job['dies_after']}"
    do_cli(common.write_config(job, config))
    return str(job["output"])


if __name__ == "__main__":
    record.run(answer)
