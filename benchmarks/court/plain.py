"""The oracle: what a question's rows are as tokens, and what training on samples gives, one sample at a time, in fp32.

It shares no code with Brigade. A chat is written out by Python here, not by its template, and learned is what the assistant
writes with the end of its turn. Losses of preferences and of images are those of testing/plain_preferences.py and
testing/plain_images.py.
"""

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer

from testing import plain_images, plain_preferences

from .questions import Question, Row

START, END = "<|im_start|>", "<|im_end|>"
RANK, SCALE = 4, 2.0  # of adapters: lora_alpha is 8


class Sample(NamedTuple):
    """ids: of one sample's tokens; labels: likewise, -100 where nothing is learned"""

    ids: tuple[int, ...]
    labels: tuple[int, ...]

    @property
    def learned(self) -> int:
        return sum(label != -100 for label in self.labels)


Step = list[list[Sample]]  # of a step: its micro-batches over all ranks


class Run(NamedTuple):
    """What training gives. losses, norms: of each step, before its update; weights: after the last; before: at the start"""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    before: dict[str, torch.Tensor]


# ---- rows --------------------------------------------------------------------------------------------------------------
def pieces(row: Row) -> Iterator[tuple[str, bool]]:
    """Yield the text of a row in order, and whether it is learned."""
    if "text" in row:
        yield row["text"], True
        return
    if "tools" in row:
        yield f"{START}tools\n" + "".join(f"{tool['function']['name']}\n" for tool in row["tools"]) + f"{END}\n", False
    for message in row["messages"]:
        yield f"{START}{message['role']}\n", False
        thought = f"<think>{message['reasoning_content']}</think>" if "reasoning_content" in message else ""
        calls = [call["function"] for call in message.get("tool_calls", ())]
        called = "".join(f"<call>{call['name']} city={call['arguments']['city']}</call>" for call in calls)
        yield thought + message["content"] + called + END, message["role"] == "assistant"
        yield "\n", False


def samples(question: Question, rows: list[Row], model: Path) -> list[Sample]:
    """Return rows as tokens. A text ends with the tokenizer's end token, which is learned."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [_sample(tokenizer, row) for row in rows]


def _sample(tokenizer: Any, row: Row) -> Sample:
    text, learned = "", []
    for piece, is_learned in pieces(row):
        learned += [is_learned] * len(piece)
        text += piece
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    ids = list(encoded["input_ids"])
    labels = [each if learned[begin] else -100 for each, (begin, _) in zip(ids, encoded["offset_mapping"], strict=True)]
    if "text" in row:
        ids.append(tokenizer.eos_token_id)
        labels.append(tokenizer.eos_token_id)
    return Sample(tuple(ids), (-100, *labels[1:]))


# ---- training ----------------------------------------------------------------------------------------------------------
def weights_of(step: Step, means: str) -> Iterator[tuple[Sample, float]]:
    """Yield a step's samples with what the sum of each one's losses is multiplied by.

    means: tokens (one mean over all of the step), micro-batches (a mean of each one's mean) or samples
    """
    full = [batch for batch in step if any(sample.learned for sample in batch)]
    tokens = sum(sample.learned for batch in full for sample in batch)
    count = sum(map(len, full))
    for batch in full:
        of_batch = sum(sample.learned for sample in batch)
        for sample in batch:
            weights = {
                "tokens": 1 / tokens,
                "micro-batches": 1 / of_batch / len(full),
                "samples": 1 / sample.learned / count,
            }
            yield sample, weights[means]


def rate_of(question: Question, step: int) -> float:
    """Return the learning rate of a step, counted from 0: linear from 0, then a half cosine to 0."""
    if step < question.warmup:
        return question.learning_rate * step / question.warmup
    if question.schedule == "constant":
        return question.learning_rate
    through = (step - question.warmup) / (question.steps - question.warmup)
    return question.learning_rate * 0.5 * (1 + math.cos(math.pi * through))


def train(
    question: Question,
    path: Path,
    steps: list[Step],
    means: str = "tokens",
    adapters: dict[str, torch.Tensor] | None = None,
) -> Run:
    """Train a model on these samples, in these steps.

    adapters: where they begin, by PEFT's names; the model itself then stays as it is
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    trained = dict(model.named_parameters())
    if adapters is not None:
        model.requires_grad_(False)
        trained = {name: tensor.float().clone().requires_grad_() for name, tensor in adapters.items()}

    def losses_of(number: int) -> float:
        total = 0.0
        for sample, weight in weights_of(steps[number], means):
            given = {"input_ids": torch.tensor([sample.ids]), "use_cache": False}
            logits = torch.func.functional_call(model, _adapted(model, trained), (), given).logits[0, :-1].float()
            loss = cross_entropy(logits, torch.tensor(sample.labels[1:]), reduction="sum") * weight
            loss.backward()
            total += float(loss.detach())
        return total

    return _loop(question, trained, len(steps), losses_of)


def _loop(question: Question, trained: dict[str, Any], steps: int, losses_of: Callable[[int], float]) -> Run:
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    more = {} if question.optim == "sgd" else {"betas": (0.9, 0.999), "eps": 1e-4, "weight_decay": 0.0}
    optimizer = kinds[question.optim](trained.values(), lr=question.learning_rate, **more)
    before = {name: tensor.detach().clone() for name, tensor in trained.items()}
    losses, norms = [], []
    for number in range(steps):
        optimizer.param_groups[0]["lr"] = rate_of(question, number)
        losses.append(losses_of(number))
        squares = [p.grad.double().square().sum() for p in trained.values() if p.grad is not None]
        norms.append(float(torch.stack(squares).sum().sqrt()))
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, norms, {name: tensor.detach() for name, tensor in trained.items()}, before)


def _adapted(model: Any, trained: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the matrices of a model that have adapters, with them: W + scale B A, arXiv 2106.09685 eq. 3."""
    merged = {}
    for name, low in trained.items():
        if ".lora_A." in name:
            of = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            merged[of] = model.get_parameter(of) + SCALE * trained[name.replace(".lora_A.", ".lora_B.")] @ low
    return merged


def prefer(question: Question, path: Path, rows: list[Row]) -> Run:
    """Train on all rows in each step, by an objective's equation."""
    keys = plain_preferences.Keys(objective=question.kind, beta=0.1)
    policy = plain_preferences.load(path, question.kind)
    form = plain_preferences.form_of(keys)
    reference = None if form in plain_preferences.WITHOUT_REFERENCE else copy.deepcopy(policy).requires_grad_(False)
    batch = plain_preferences.comparison(rows, policy, reference, path, keys)
    trained = dict(policy.named_parameters())
    everything = list(range(len(rows)))
    return _loop(question, trained, question.steps, lambda _: batch.means(everything)["loss"])


def seen(path: Path, rows: list[Row], folder: Path) -> list[Sample]:
    """Return rows with images as tokens."""
    processor = AutoProcessor.from_pretrained(path)
    found = (plain_images.sample_of(processor, row, folder) for row in rows)
    return [Sample(tuple(one.inputs["input_ids"][0].tolist()), tuple(one.labels.tolist())) for one in found]


def see(question: Question, path: Path, rows: list[Row], folder: Path) -> Run:
    """Train on all rows with images in each step; the tower stays as it is."""
    processor = AutoProcessor.from_pretrained(path)
    before = plain_images.load(path).state_dict()
    keys = {"global_batch_size": len(rows), "max_steps": question.steps, "learning_rate": question.learning_rate}
    history, model = plain_images.train(rows, folder, path, processor, **keys)
    losses, norms = ([step[key] for step in history] for key in ("loss", "grad_norm"))
    return Run(losses, norms, {name: tensor.detach() for name, tensor in model.state_dict().items()}, before)
