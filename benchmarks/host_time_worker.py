"""One of the processes of benchmarks/host_time.py: what a system takes of a processor for each micro-step and optimizer step.

    run_ranks("benchmarks.host_time_worker", JOB, ranks=NUMBER OF SYSTEMS, ...)

JOB is {"systems": of SYSTEMS, "strategy": one of STRATEGIES, "steps", "folder", "peers", "count"} in JSON. Each system is a
process of its own; they take their steps in turn, one system at a time, so that what else this machine does slows all of them
alike. Each leaves SYSTEM.json in the folder: {"micro": microseconds of each measured step's second micro-step, "whole": those
of the whole step}, or numbers of calls where `count` is true. All but "one process" are rank 0 of RANKS that are pretended:
torch's fake process group answers as if all others had what this one has.
"""

import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from brigade.train.upstream import deepspeed_kernels

from . import host_time_plain

RANKS, ACCUMULATION, LENGTH, VOCABULARY = 8, 3, 16, 4096
WARM_UP, LOGGED = 5, 5  # the first of the steps are not measured; so many have a line in the log together
# 291 parameters, and next to no arithmetic.
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}
LAYER = "LlamaDecoderLayer"
REPOSITORY = Path(__file__).resolve().parent.parent
STRATEGIES: dict[str, dict[str, Any]] = {  # -> the flags of train.py
    "one process": {},
    "DDP": {},
    "ZeRO-2": {"ds_config": "ds_configs/zero2.json"},
    "ZeRO-3": {"ds_config": "ds_configs/zero3.json"},
    "FSDP2": {"accelerate_config": "accelerate_configs/fsdp2_1x2.yaml"},
}
FSDP2 = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": [LAYER]}


def processor_time() -> float:
    """Return the microseconds that all threads of this process have had of a processor."""
    return time.process_time_ns() / 1000


class Turns:
    """Lets one process after the other go on, in a circle; nobody waits for one that has ended."""

    def __init__(self, folder: Path, number: int, size: int) -> None:
        self.number, self.size = number, size
        # The host has made these pipes. One that is open for both never ends, and never waits to be opened.
        self.pipes = [os.open(folder / f"turn-{each}", os.O_RDWR) for each in range(size)]

    def wait(self) -> None:
        """Wait for this process's turn."""
        os.read(self.pipes[self.number], 1)

    def give(self) -> None:
        """Let the next one go on."""
        os.write(self.pipes[(self.number + 1) % self.size], b".")


class Clock(TrainerCallback):
    """What `now` says at the end of each micro-step but a step's last, and of each step; it ends the process after the last."""

    def __init__(self, now: Callable[[], float], turns: Turns, steps: int, result: Path) -> None:
        self.now, self.turns, self.wanted, self.result = now, turns, steps, result
        self.steps: list[list[float]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        gc.unfreeze()  # testing/ranks.py has frozen what is imported; here it is looked through, as in any run
        self.turns.wait()
        self.steps.append([self.now()])

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.steps[-1].append(self.now())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps[-1].append(self.now())
        if len(self.steps) == self.wanted:  # how a run ends is not measured
            sys.setprofile(None)
            self.result.write_text(json.dumps(self.measured()))
            self.turns.give()
            os._exit(0)
        self.turns.give()
        self.turns.wait()
        self.steps.append([self.now()])

    def measured(self) -> dict[str, list[float]]:
        """Return what a micro-step and a whole step took, of each step after the first WARM_UP."""
        steps = self.steps[WARM_UP:]
        return {"micro": [step[2] - step[1] for step in steps], "whole": [step[-1] - step[0] for step in steps]}


class CallCount:
    """The number of Python functions called so far, those of C included, once it is on."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        sys.setprofile(self._count)
        return self.calls

    def _count(self, _frame: Any, event: str, _about: Any) -> None:
        if event in ("call", "c_call"):
            self.calls += 1


# ---- the four systems ------------------------------------------------------------------------------------------------
def plain(job: dict[str, Any], clock: Clock) -> None:
    """A loop as a reader would write it (host_time_plain.py)."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="sdpa"))
    batches = iter(torch.utils.data.DataLoader(_rows(job), batch_size=1, collate_fn=_collate))
    engine = host_time_plain.engine_of(
        job["strategy"], model, STRATEGIES[job["strategy"]].get("ds_config"), ACCUMULATION
    )
    host_time_plain.train(engine, batches, clock, job["steps"], ACCUMULATION, LOGGED)


def transformers(job: dict[str, Any], clock: Clock) -> None:
    """Transformers' Trainer."""
    arguments = TrainingArguments(**_arguments(job))
    _shard_on_cpus(job)
    trainer = Trainer(
        LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="sdpa")),
        arguments,
        data_collator=_collate,
        train_dataset=_rows(job),
        callbacks=[clock],
    )
    trainer.train()


def trl(job: dict[str, Any], clock: Clock) -> None:
    """TRL's SFTTrainer, over the same tokens. It is found in the peers' environment, all else in this one."""
    sys.path.append(job["peers"])
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from brigade.train.data import builtin

    untouched = {"max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}
    config = SFTConfig(**_arguments(job), **untouched, gradient_checkpointing=False)
    _shard_on_cpus(job)
    trainer = SFTTrainer(
        model=LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="sdpa")),
        args=config,
        data_collator=_collate,
        train_dataset=Dataset.from_list(_rows(job)),
        processing_class=AutoTokenizer.from_pretrained(builtin.TOKENIZER),
        callbacks=[clock],
    )
    trainer.train()


def ours(job: dict[str, Any], clock: Clock) -> None:
    """train.py; under a strategy with its watching thread."""
    import train
    from brigade.train.distributed import shared_directory
    from testing.command_line import as_flags

    shared_directory.is_shared = lambda *_: True  # type: ignore[assignment]  # every rank would be its host's first
    folder = Path(job["folder"])
    (folder / "model").mkdir()
    config = SIZES | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    text = json.dumps({"prompt": "Read a file.", "completion": "Open it and iterate over its lines. " * 4})
    sequences = ACCUMULATION * int(os.environ.get("WORLD_SIZE", "1"))
    for name, count in (("train", job["steps"] * sequences), ("heldout", 8)):
        (folder / f"{name}.jsonl").write_text(f"{text}\n" * count)
    recipe = {
        "model": {"model_name_or_path": str(folder / "model"), "from_scratch": True, "tokenizer_name_or_path": "python-docs",
                  "attn_implementation": "sdpa"},
        "data": {"train_file": str(folder / "train.jsonl"), "validation_file": str(folder / "heldout.jsonl"),
                 "max_length": LENGTH, "chat_template": "none", "packing": False},
        "training": {"global_batch_size": sequences, "per_device_train_batch_size": 1, "max_steps": job["steps"],
                     "lr_scheduler_type": "constant", "learning_rate": 1e-4, "optim": "adamw_torch_fused", "max_grad_norm": 1.0,
                     "logging_steps": LOGGED, "eval_steps": None, "eval_answers": 0, "save_steps": None, "report_to": [],
                     "report_page": False, "torch_compile": False, "bf16": False, "padding_free": False},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    flags = as_flags(recipe=str(folder / "recipe.yaml"), output_dir=str(folder / "run"), **STRATEGIES[job["strategy"]])
    train.main(flags, callbacks=(clock,))


SYSTEMS = {"plain": plain, "transformers": transformers, "trl": trl, "ours": ours}


# ---- what they share -------------------------------------------------------------------------------------------------
def _rows(job: dict[str, Any]) -> list[dict[str, list[int]]]:
    rows = torch.randint(VOCABULARY, (RANKS * job["steps"] * ACCUMULATION, LENGTH)).tolist()
    return [{"input_ids": row, "labels": row, "attention_mask": [1] * LENGTH} for row in rows]


def _collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


def _arguments(job: dict[str, Any]) -> dict[str, Any]:
    strategy: dict[str, Any] = {}
    if "ds_config" in STRATEGIES[job["strategy"]]:
        strategy = {"deepspeed": str(REPOSITORY / STRATEGIES[job["strategy"]]["ds_config"])}
    elif job["strategy"] == "FSDP2":
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        # As ours has it: gradients are reduced in each micro-step.
        reduced = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        strategy = {"fsdp": True, "fsdp_config": FSDP2, "accelerator_config": reduced}
    return strategy | {
        "output_dir": job["folder"],
        "max_steps": job["steps"],
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": ACCUMULATION,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "use_cpu": True,
        "ddp_backend": None if job["strategy"] == "one process" else "gloo",
        "ddp_find_unused_parameters": False,
        "logging_steps": LOGGED,
        "save_strategy": "no",
        "report_to": "none",
        "remove_unused_columns": False,
        "disable_tqdm": True,
        "bf16": False,
    }


def _shard_on_cpus(job: dict[str, Any]) -> None:
    if job["strategy"] == "FSDP2":  # without it Transformers' Trainer would train as DDP on a CPU
        from brigade.train.upstream import fsdp2

        fsdp2.shard_on_cpus()


class PretendedStore(torch.distributed.Store):
    """A store in which all ranks do what this one does."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.values = ranks, dict[str, Any]()

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value

    def get(self, key: str) -> Any:
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        self.values[key] = self.values.get(key, 0) + amount * self.ranks
        return self.values[key]


def pretend(ranks: int) -> PretendedStore:
    """Join a process group of so many ranks, of which only this one is there. The caller keeps what is returned."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend)

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    store = PretendedStore(ranks)
    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=store)
    begin = torch.nn.parallel.DistributedDataParallel.__init__

    def begin_with_hook(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self.register_comm_hook(None, _reduced)  # the reduction of DDP's own reads a result that the fake group has not

    torch.nn.parallel.DistributedDataParallel.__init__ = begin_with_hook  # type: ignore[method-assign]
    return store


def _reduced(_: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = torch.futures.Future[torch.Tensor]()
    future.set_result(bucket.buffer())
    return future


def main() -> None:
    job, number = json.loads(sys.argv[1]), int(os.environ["RANK"])
    system, folder = job["systems"][number], Path(job["folder"])
    torch.set_num_threads(1)
    deepspeed_kernels.find()
    deepspeed_kernels.end_locks_with_their_holder()
    warnings.simplefilter("ignore", FutureWarning)  # of torch.distributed's, in each collective
    if job["strategy"] == "one process":
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
            del os.environ[name]
    else:
        deepspeed_kernels.without_shared_memory()
        kept = pretend(RANKS)  # noqa: F841
    turns = Turns(folder, number, len(job["systems"]))
    if number == len(job["systems"]) - 1:
        turns.give()
    own = folder / system
    own.mkdir()
    clock = Clock(CallCount() if job["count"] else processor_time, turns, job["steps"], folder / f"{system}.json")
    SYSTEMS[system](job | {"folder": str(own)}, clock)


if __name__ == "__main__":
    main()
