"""Distillation: for each supervised token, the model learns what a teacher says of all words, not only which one comes next.

The teacher reads each micro-batch before the model does, up to its last hidden states. What it says of a word is computed from
these in the same tile of tokens as the model's own loss (tiled.py): neither model's logits ever exist whole. Alternatively, the
teacher reads all samples once before the first step. What it says of its most likely words is kept (precomputed.py), and the
teacher is dropped.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from ...errors import UserError
from .. import upstream
from ..data.answers import samples_of
from ..data.collate import TEACHER, Inputs
from ..data.prepare import Prepared
from ..data.store import IGNORED, MicroBatch, TokenSequence
from ..distributed import consistency
from ..distributed.process import this_process
from ..engines.engine import StepContext
from ..model import load, packed_samples, trial
from ..model.load_trained import load_untrained
from ..model.location import load_config
from ..model.sizes import empty_model, half_or_full, parameter_count
from ..recipe.objectives import bytes_of_token
from ..recipe.settings import Settings
from ..run.directory import Run
from . import divergence, second_model, tiled
from .averages import Averages
from .divergence import Said
from .precomputed import Look, Precomputed
from .supervised_loss import targets_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

BY_TEXT = "let the teacher answer, and train with objective: sft on its answers"


class Passing(torch.nn.Linear):
    """The output layer of a teacher, which hands on what it is given."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden.to(self.weight.dtype), self.weight, self.bias)


class Distillation(Averages):
    """Tells the output layer of the model what the teacher says, and counts how far the two are apart.

    held_out: sums over held-out tokens of the divergence and of their weights, since they were last taken: (2,)
    words: how many both models have; k: how many of the most likely are kept, or None where the teacher reads each micro-batch
    """

    model: "PreTrainedModel | None" = None
    head: Passing

    def __init__(self, trainer: StepContext) -> None:
        super().__init__()
        self.trainer, self.settings = trainer, trainer.run.settings
        self.options = divergence.Options.of(self.settings.recipe.training)
        self.held_out = torch.zeros(2, dtype=torch.float64, device=trainer.args.device)
        self.words = words_of_both(trainer.model.config, load_config(of_teacher(self.settings)))
        self.k = kept_words(self.settings, self.words)

    def begin(self, checkpoint: Path | None) -> None:
        this_process.timeline.enter("teacher")
        if self.k is None:
            self._load()
            return

        def load() -> Look:
            self._load(everywhere=True)
            return self._look

        columns = divergence.columns(self.k, self.words)
        Precomputed(self.trainer, TEACHER, "words", columns, self._made_of(), by_token=True).complete(load)
        if self.model is not None:
            self.model = None
            del self.head

    def _load(self, everywhere: bool = False) -> None:

        def prepare(model: "PreTrainedModel", *_: object) -> "PreTrainedModel":
            self.head = pass_on(model)
            return model

        settings = of_teacher(self.settings)
        self.model = second_model.load_frozen(
            self.trainer, settings, prepare, lambda model: {*self.head.parameters()}, everywhere
        )

    # ---- a micro-batch -----------------------------------------------------------------------------------------------
    def read(self, inputs: Inputs) -> MicroBatch:
        """Return the micro-batch with what the teacher says of it."""
        column = self._hidden(inputs) if self.k is None else self._rows(inputs)
        return {**inputs, TEACHER: Said(column, self._of_tile, self._taken)}

    @torch.no_grad()
    def _hidden(self, inputs: Inputs) -> Tensor:
        """Return the teacher's last hidden states: (targets, hidden size)."""
        trainer, asked = self.trainer, {key: value for key, value in inputs.items() if "labels" not in key}
        assert self.model is not None
        with trainer.compute_loss_context_manager(), trainer.accelerator.autocast():
            hidden: Tensor = trainer.outputs(self.model, asked, None).logits
        return hidden.flatten(0, -2)

    @torch.no_grad()
    def _known(self, hidden: Tensor) -> Tensor:
        return (self.head.logits(hidden)[:, : self.words].float() / self.options.temperature).log_softmax(-1)

    def _of_tile(self, logits: Tensor, targets: Tensor, weights: Tensor | None, column: Tensor) -> Tensor:
        """Return what divergence.sums() does. column: of read(), the tile's hidden states, or what is kept of its targets"""
        if self.k is None:
            return divergence.sums(self.options, logits, targets, weights, self._known(column))
        return divergence.sums(self.options, logits, targets, weights, *divergence.of_rows(column, self.k, self.words))

    # ---- before training ---------------------------------------------------------------------------------------------
    def _made_of(self) -> list[Any]:
        """Return what identifies the kept words: their teacher, and how many words of how many are kept."""
        named, temperature = of_teacher(self.settings), self.options.temperature
        digests = consistency.digests(Path(load.weights(named, load_config(named))))
        return [digests, *second_model.read_as(named.recipe.model), self.k, self.words, temperature]

    def _look(self, inputs: MicroBatch) -> np.ndarray:
        """Return what is kept of each supervised token of a micro-batch."""
        assert self.k is not None
        tiles = self._hidden(inputs), _is_told(inputs)
        size = tiled.tokens_of_tile(self.settings.recipe.training.loss_tiles or True, self.words)
        found = [
            divergence.as_rows(self._known(hidden)[told], self.k)
            for hidden, told in zip(*(each.split(size) for each in tiles), strict=True)
        ]
        return torch.cat(found).cpu().numpy()

    def _rows(self, inputs: Inputs) -> Tensor:
        """Return what is kept of each target of a micro-batch, and any finite values for those without a label."""
        assert self.k is not None
        told, width = _is_told(inputs), divergence.columns(self.k, self.words)
        kept = inputs.get(TEACHER, torch.zeros(0, width, dtype=torch.float64, device=told.device))
        return pad(kept, (0, 0, 0, 1))[torch.where(told, told.cumsum(0) - 1, len(kept))]

    def _taken(self, sums: Tensor) -> Tensor:
        """Return a micro-batch's part of the loss, and count its figures: divergence and cross_entropy, means over tokens."""
        crossed, apart, tokens = sums
        if not self.trainer.model.training:
            self.held_out += sums[1:].detach()
            return crossed
        self.count("divergence", apart, tokens)
        self.count("cross_entropy", crossed, tokens)
        return (1 - self.options.ratio) * crossed + self.options.ratio * apart

    def take_held_out(self) -> Tensor:
        """Return this rank's sums of the divergence and of tokens over the held-out samples since it was last asked: (2,)"""
        sums, self.held_out = self.held_out, torch.zeros_like(self.held_out)
        return sums


def of_teacher(settings: Settings) -> Settings:
    """Return the settings by which the teacher is loaded."""
    training = settings.recipe.training
    return settings.of_second(str(training.teacher), "teacher").with_model(load_in_4bit=training.teacher_load_in_4bit)


def words_of_both(*configs: "PreTrainedConfig") -> int:
    """Return how many words the model and its teacher both have."""
    return min(config.get_text_config().vocab_size for config in configs)


def kept_words(settings: Settings, words: int) -> int | None:
    """Return how many words of each token are kept; None where the teacher takes part in each step."""
    asked = settings.recipe.training.teacher_top_k
    return asked and min(asked, words)


def _is_told(inputs: Inputs) -> Tensor:
    """Return which targets of a micro-batch have a label: bool (targets,)."""
    return targets_of(inputs.get("labels"), inputs.get("shift_labels")).reshape(-1) != IGNORED


def describe(run: Run, data: Prepared) -> dict[str, str]:
    """Return {"teacher": "Qwen/Qwen3-8B, 8,190,735,360 parameters in bf16, sharded over 8 ranks"}; {} where there is none."""
    if not run.settings.recipe.training.teacher:
        return {}
    named = of_teacher(run.settings)
    with upstream.without_zero3():  # which all ranks would have to build it with
        count = parameter_count(empty_model(named, load_config(named)))
    in_4bit = named.recipe.model.load_in_4bit
    bits = "4 bits" if in_4bit else str(half_or_full(run.settings)).removeprefix("torch.")
    where = f"sharded over {run.world.size} ranks" if second_model.is_sharded(run, in_4bit) else "whole on each rank"
    kept = kept_of(run.settings, data)
    if kept:
        where += f" before the first step: {kept}"
    elif run.strategy.axes.stages > 1:
        where += " with the last stage"
    return {"teacher": f"{named.recipe.model.model_name_or_path}, {count:,} parameters in {bits}, {where}"}


def kept_of(settings: Settings, data: Prepared) -> str:
    """Return "64 words of each token are kept beside the prepared data, 0.49 GiB"; "" where nothing is kept.

    It says so where these are few: the other divergences also depend on what the model finds likely, not only the teacher.
    """
    if not settings.recipe.training.teacher_top_k:
        return ""
    words = words_of_both(load_config(settings), load_config(of_teacher(settings)))
    k = min(settings.recipe.training.teacher_top_k, words)
    tokens = sum(int(split.supervised().sum()) for split in (data.train, *data.heldout.values()))
    size = tokens * bytes_of_token(k, words) / 2**30
    form = settings.recipe.training.loss_type
    few = form in ("reverse_kl", "jsd") and k < words
    doubt = f"; they leave out much of {form} (docs/evidence/distillation.md)" if few else ""
    return f"{k:,} words of each token are kept beside the prepared data, {size:.2g} GiB{doubt}"


@torch.inference_mode()
def held_out_divergence(settings: Settings, model: "PreTrainedModel", sequences: Sequence[TokenSequence]) -> float:
    """Return the mean divergence of a saved model from its teacher over the supervised tokens of sequences, in nats times the
    square of the temperature: each sample separately, by both models' own forward passes. Where a run keeps words of each token,
    the divergence is over these words and the rest, as in the run."""
    named, options = of_teacher(settings), divergence.Options.of(settings.recipe.training)
    teacher = load_untrained(named, model.device)
    k = kept_words(settings, words_of_both(model.config, teacher.config))
    total = torch.zeros(3, dtype=torch.float64)
    for sample in (sample for sequence in sequences for sample in samples_of(sequence)):
        ids = torch.from_numpy(sample["input_ids"].astype("int64"))[None].to(model.device)
        own, other = (each(input_ids=ids, use_cache=False).logits[0, :-1].float() for each in (model, teacher))
        said = divergence.few_of((other[:, : own.shape[-1]] / options.temperature).log_softmax(-1), k)
        targets = torch.from_numpy(sample["labels"])[1:].to(model.device)
        total += divergence.sums(options, own, targets, None, *said).cpu()
    return float(total[1] / total[2])


def pass_on(model: "PreTrainedModel") -> Passing:
    """Let a model return its last hidden states instead of its logits, and return its output layer, which makes them."""
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        raise TypeError(f"its output layer is a {type(head).__name__} and no plain linear one")
    head.__class__ = Passing
    return cast(Passing, head)


# ---- what cannot be --------------------------------------------------------------------------------------------------
def check(run: Run, config: "PreTrainedConfig") -> None:
    """Raise UserError where the teacher cannot teach the model of this config: it has other tokens, keeps samples apart in
    another way, or changes what its output layer gives."""
    settings, place, named = run.settings, run.settings.place("teacher"), of_teacher(run.settings)
    theirs = load_config(named)
    cure = f"name a teacher with the same tokens, or {BY_TEXT}"
    second_model.check_tokens(settings, "teacher", named, (config, theirs), cure)
    trusts, how = settings.recipe.model.trust_remote_code, run.kernels.attention
    ways = [packed_samples.method_of(each, how, trusts)[0] for each in (config, theirs)]
    if ways[0] != ways[1]:
        problem = f"with the attention {how} it keeps the samples of a micro-batch apart by {ways[1]}, and the model by {ways[0]}"
        raise UserError(place, problem, f"name another teacher, or {BY_TEXT}")
    why = _other_logits(theirs, trusts)
    if why:
        raise UserError(place, f"{type(theirs).__name__}: {why}", f"name another teacher, or {BY_TEXT}")


def _other_logits(config: "PreTrainedConfig", trust_remote_code: bool) -> str:
    """Return why the logits of this config's model are not what its output layer makes of its hidden states, "" where they are: a
    tiny random one is tried."""

    def ask() -> str:
        model, tokens = trial.tiny_model(config, trust_remote_code=trust_remote_code), torch.arange(7, 23)[None]
        with torch.inference_mode():
            wanted = model(input_ids=tokens, use_cache=False).logits
            found = pass_on(model).logits(model(input_ids=tokens, use_cache=False).logits)
        return "" if torch.allclose(found, wanted, rtol=1e-4, atol=1e-5) else "it changes what its output layer gives"

    return trial.why_not(ask)
