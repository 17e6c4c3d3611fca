"""What a trainer trains on, loss and norm of each step, in whatever environment it runs: for trainers that are Transformers'.

A job is what jobs.py writes. run() hands it to an adapter, whose answer(job) does the training; each Trainer that trains
meanwhile is watched. Nothing of Brigade is imported here.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Job = dict[str, Any]
RANK = int(os.environ.get("RANK", "0"))
PACKAGES = (
    *("brigade", "torch", "transformers", "accelerate", "peft", "trl", "deepspeed", "datasets"),
    *("llamafactory", "axolotl", "ms-swift", "nemo-automodel", "unsloth", "torchtune", "torchao", "litgpt", "xtuner"),
)
WRAPPED = re.compile(r"\b_(checkpoint_wrapped_module|fsdp_wrapped_module|orig_mod)\.")  # what wrappers put into names
ENGINES = {"zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "fsdp2": "FSDP"}  # Accelerate's names


def run(train: Callable[[Job], str | None], jobs: str) -> None:
    """Train each job of a file, and write `RESULT.RANK.json` of each beside it.

    train: returns the directory that has what was saved, or None. job["died"] says whether this run died before
    """
    for job in json.loads(Path(jobs).read_text()):
        died = dead(job)
        job["died"] = died.exists()
        records = json.loads(died.read_text()) if job["died"] else []
        result: Job = {"question": job["question"], "versions": _versions(), "records": records}
        job["records"] = result["records"]  # for an adapter of another trainer than Transformers'
        with watched(job, result["records"]):
            try:
                result["saved"] = train(job)
            except (Exception, SystemExit) as error:
                traceback.print_exc()
                result["failed"] = f"{type(error).__name__}: {error}"
        temporary = Path(f"{job['result']}.{RANK}.tmp")
        temporary.write_text(json.dumps(result))
        temporary.rename(f"{job['result']}.{RANK}.json")


def dead(job: Job) -> Path:
    """Return where a run that dies leaves what it did."""
    return Path(f"{job['result']}.{RANK}.died.json")


def die(job: Job, records: list[Job]) -> None:
    """Leave what was done, and die."""
    dead(job).write_text(json.dumps(records))
    os.kill(os.getpid(), signal.SIGKILL)


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@contextlib.contextmanager
def watched(job: Job, records: list[Job]) -> Any:
    """Add to `records` what each Trainer says that trains meanwhile. The first dies behind step job["dies_after"]."""
    if importlib.util.find_spec("transformers") is None:  # a trainer of another kind
        yield
        return
    import transformers

    begin = transformers.Trainer.train

    def train(self: Any, *given: Any, **named: Any) -> Any:
        engine = self.accelerator.distributed_type.value
        if engine != ENGINES.get(job["strategy"], engine):  # Accelerate says nothing when it takes another one
            raise RuntimeError(f"asked for {job['strategy']}, it trains with {engine}")
        record: Job = {"steps": [], "log": []}
        dies_after = job["dies_after"] if not records else 0
        records.append(record)
        fetch = self.get_batch_samples

        def fetched(*given: Any, **named: Any) -> Any:
            if dies_after and self.state.global_step == dies_after:
                record["log"] = [entry for entry in self.state.log_history if "loss" in entry]
                die(job, records)
            found = fetch(*given, **named)
            if found[0]:
                record["steps"].append([samples_of(batch) for batch in found[0]])
            if "adapters" not in record and job["lora"]:
                record["adapters"] = _keep_adapters(self, job)
            return found

        self.get_batch_samples = fetched
        try:
            return begin(self, *given, **named)
        finally:
            record["log"] = [entry for entry in self.state.log_history if "loss" in entry]

    transformers.Trainer.train = train
    try:
        yield
    finally:
        transformers.Trainer.train = begin


def _keep_adapters(trainer: Any, job: Job) -> str:
    from peft import get_peft_model_state_dict

    model = trainer.accelerator.unwrap_model(trainer.model)
    return write_adapters(job, get_peft_model_state_dict(model, state_dict=whole(model)))


def write_adapters(job: Job, named: dict[str, torch.Tensor]) -> str:
    """Write the adapters as they are before the first step, by PEFT's names, and return the file."""
    path = f"{job['result']}.adapters.pt"
    if RANK == 0:
        torch.save({name: tensor.contiguous() for name, tensor in named.items()}, path)
    return path


def whole(model: Any) -> dict[str, torch.Tensor]:
    """Return all trained tensors, whole, whoever has divided them."""
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        name = WRAPPED.sub("", name)
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                found[name] = parameter.detach().clone()
        elif hasattr(parameter, "full_tensor"):
            found[name] = parameter.detach().full_tensor()
        else:
            found[name] = parameter.detach().clone()
    return found


# ---- loops of trainers' own -----------------------------------------------------------------------------------------
class Loop:
    """What a loop of a trainer's own does. log: {"step", "loss", "grad_norm"} of each step, which its adapter appends;
    norm: that of the last step's gradients, for a trainer that logs none; adapters: a file of write_adapters"""

    def __init__(self, job: Job) -> None:
        self.job, self.adapters, self.norm = job, "", 0.0
        self.batches: list[list[Job]] = []
        self.log: list[Job] = []

    def watch(self, loader: Any, as_batch: Callable[[Any], Job]) -> Any:
        """Record each batch that a loader makes in this process, and die where the job says so."""
        collate = loader.collate_fn

        def collated(rows: Any) -> Any:
            batch = collate(rows)
            self.die_after(len(self.log))
            self.batches.append(samples_of(as_batch(batch)))
            return batch

        loader.collate_fn = collated
        return loader

    def die_after(self, step: int) -> None:
        """Die where the job says so, behind this step."""
        if step and step == self.job["dies_after"] and not self.job["died"]:
            die(self.job, [self.record()])

    def measure(self, optimizer: Any, *_: Any) -> None:
        """Take the norm, as torch.optim.optimizer.register_optimizer_step_pre_hook lets it."""
        gradients = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        norm: Any = torch.nn.utils.get_total_norm(gradients)
        self.norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def record(self) -> Job:
        each = self.job["accumulation"]
        steps = [self.batches[at : at + each] for at in range(0, len(self.batches), each)]
        if self.job["died"]:
            steps = steps[len(steps) - len(self.log) :]  # those before were only read again
        return {"steps": steps, "log": self.log} | ({"adapters": self.adapters} if self.adapters else {})


@contextlib.contextmanager
def loop(job: Job) -> Any:
    """Give a Loop, and keep what it has recorded when it ends."""
    found = Loop(job)
    try:
        yield found
    finally:
        job["records"].append(found.record())


def padded(tokens: torch.Tensor, labels: torch.Tensor, padding: int) -> Job:
    """Return a batch by the names that Transformers has. Padding is at its end; inside, the same token may end a turn."""
    is_text = (tokens != padding) | (labels != -100)
    return {"input_ids": tokens, "labels": labels, "attention_mask": is_text.flip(1).cumsum(1).flip(1) > 0}


# ---- batches ---------------------------------------------------------------------------------------------------------
def samples_of(batch: Any) -> list[dict[str, list[int]]]:
    """Return the samples of a micro-batch, {"ids", "labels"} each, as the model is told to keep them apart."""
    batch = {key: value for key, value in dict(batch).items() if isinstance(value, torch.Tensor)}
    if "input_ids" not in batch:
        return []
    ids = batch["input_ids"]
    labels = _labels(batch)
    found = []
    for row in range(ids.shape[0]):
        for begin, end in _borders(batch, row):
            sample = {"ids": ids[row, begin:end].tolist(), "labels": labels[row, begin:end].tolist()}
            sample["labels"][:1] = [-100]  # nothing comes before the first token that could predict it
            if any(label != -100 for label in sample["labels"]):
                found.append(sample)
    return found


def _labels(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    ids = batch["input_ids"]
    if "shift_labels" not in batch:
        return batch.get("labels", torch.full_like(ids, -100))
    labels = torch.full_like(ids, -100)
    shifted = batch["shift_labels"]
    if "logits_to_keep" in batch:
        labels[:, batch["logits_to_keep"] + 1] = shifted
    else:
        labels[:, 1:] = shifted[:, :-1]
    return labels


def _borders(batch: dict[str, torch.Tensor], row: int) -> list[tuple[int, int]]:
    """Return begin and end of each sample in a row, padding left out."""
    length = batch["input_ids"].shape[1]
    mask = batch.get("attention_mask")
    if mask is not None and mask.dim() == 2:
        numbers = mask[row].tolist()  # of axolotl's packing 1, 1, 2, 2, 2, 0
        places = [at for at, number in enumerate(numbers) if number]
        starts = [at for at in places if at == places[0] or numbers[at] != numbers[at - 1]]
        if len(starts) > 1 or "position_ids" not in batch:
            return list(zip(starts, [*starts[1:], places[-1] + 1], strict=True)) if places else []
    positions = batch.get("position_ids")
    if positions is None or positions.dim() != 2:
        return [(0, length)]
    positions = positions[row if row < positions.shape[0] else 0].tolist()
    starts = [at for at in range(length) if at == 0 or positions[at] == 0]
    return list(zip(starts, [*starts[1:], length], strict=True))
