"""What trainers that take Transformers' TrainingArguments share: their values for a job."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from benchmarks.court.peers.record import Job

# DeepSpeed's documented configuration for Transformers, with everything that the arguments decide left to them.
ZERO: Job = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
LORA: Job = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
NO_CLIPPING = 1e9  # with 0 some trainers log no norm


def filled(name: str, values: Job) -> Job:
    """Return a trainer's configuration: NAME.yaml beside this file, in which $KEY stands for a value."""
    return _put(yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text()), values)


def _put(node: Any, values: Job) -> Any:
    if isinstance(node, dict):
        return {key: _put(value, values) for key, value in node.items()}
    if isinstance(node, list):
        return [_put(value, values) for value in node]
    return values[node[1:]] if isinstance(node, str) and node.startswith("$") else node


def write_config(job: Job, config: Job) -> str:
    """Write a trainer's configuration as YAML, and return the file."""
    path = Path(f"{job['result']}.yaml")
    path.write_text(yaml.safe_dump(json.loads(json.dumps(config))))  # without references from one place to another
    return str(path)


def model_config(job: Job) -> Job:
    """Return what a job's model says of itself."""
    return dict(json.loads((Path(job["model_path"]) / "config.json").read_text()))


def rows_of(job: Job) -> list[Job]:
    return [json.loads(line) for line in Path(job["file"]).read_text().splitlines()]


def write_rows(job: Job, rows: list[Job]) -> str:
    """Write a job's rows in a trainer's own form, and return the file."""
    path = Path(f"{job['result']}.rows.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def shared(job: Job) -> Job:
    """Return what each trainer is given, by Transformers' names."""
    return {
        "output_dir": job["output"],
        "per_device_train_batch_size": job["micro"],
        "max_steps": job["steps"],
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": job["schedule"],
        "warmup_steps": job["warmup"],
        "optim": "sgd" if job["optim"] == "sgd" else "adamw_torch",
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-4,
        "logging_steps": 1,
        "bf16": False,
    }


def arguments(job: Job) -> Job:
    """Return values of TrainingArguments, by their names."""
    given = shared(job) | {
        "gradient_accumulation_steps": job["accumulation"],
        "max_grad_norm": NO_CLIPPING,
        "report_to": "none",
        "use_cpu": True,
        "save_strategy": "steps" if job["dies_after"] else "no",
        "save_steps": job["dies_after"] or 500,
    }
    if job["strategy"].startswith("zero"):
        import deepspeed

        # On a CPU it compiles a kernel for sums, a minute each time; gloo sums as well.
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
        # On a CPU TrainingArguments leaves this out, and ZeRO-3 then divides by one rank.
        deepspeed.init_distributed("gloo")
        given["deepspeed"] = zero_file(job)
    if job["strategy"] == "fsdp2":
        given |= {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
        _shard_on_a_cpu()
    return given


def zero_file(job: Job) -> str:
    """Write DeepSpeed's configuration for a job and return the file."""
    stage = int(job["strategy"][-1])
    sharded = {"stage": stage} | ({"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {})
    path = Path(f"{job['result']}.zero.json")
    path.write_text(json.dumps(ZERO | {"zero_optimization": sharded, "zero_allow_untested_optimizer": True}))
    return str(path)


def with_marks(row: Job, folder: Path) -> Job:
    """Return a row with images in the form of several trainers: `<image>` stands for each in the text, and `images` are paths."""
    asked, answered = row["messages"]
    text = "".join("<image>" if part["type"] == "image" else part["text"] for part in asked["content"])
    images = [str(folder / part["image"]) for part in asked["content"] if part["type"] == "image"]
    return {"messages": [{"role": "user", "content": text}, answered], "images": images}


def _shard_on_a_cpu() -> None:
    """Let Accelerate shard on a CPU, too. By itself it makes DDP of FSDP there without a word."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    begin = PartialState.__init__

    def settle(state: Any, *given: Any, **named: Any) -> None:
        begin(state, *given, **named)
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = settle


def trained(job: Job, make: Callable[[], Any]) -> str:
    """Train, and save; a run that has died continues from its checkpoint. Return where it saved."""
    trainer = make()
    trainer.train(resume_from_checkpoint=job["died"])
    saved = f"{job['output']}/saved"
    trainer.save_model(saved)
    return saved
