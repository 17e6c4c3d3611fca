"""A model that a run has saved, loaded: a whole one, or adapters on their base; and that base."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from ...errors import UserError, first_line
from ...errors.disk import of_disk
from ..distributed.devices import keep_fp32
from ..recipe import continued, remote_code
from ..recipe.objectives import ADAPTERS_OFF, MODEL, reference_of
from ..recipe.settings import Settings
from ..upstream import peft_layers, without_zero3
from . import adapter_weights, base_weights, scores
from .base_weights import AGAIN
from .load import load_base, weights
from .location import load_config
from .sizes import half_or_full

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_trained(settings: Settings, directory: Path, **options: object) -> PreTrainedModel:
    """Load what a run left in `directory`: a model, or adapters on the base that they were trained on.

    options: further ones of from_pretrained, for a whole model
    """
    keep_fp32()  # as the run had it
    section = settings.recipe.model
    if not section.use_peft:
        trusts, images = section.trust_remote_code, settings.recipe.data.images
        base_weights.check(str(directory), trusts, images)
        kind = scores.auto_class(directory, trusts, images)
        return kind.from_pretrained(directory, trust_remote_code=trusts, **options)
    # Not Transformers' class, which leaves DoRA's magnitudes out when it loads adapters, without a word.
    continued.check_saved(settings, directory)
    base = load_base(settings, weights(settings, load_config(settings)), half_or_full(settings))
    try:
        return peft_layers.import_peft().PeftModel.from_pretrained(base, directory)
    except torch.OutOfMemoryError:
        raise
    except (ValueError, RuntimeError, SafetensorError) as error:
        # names or shapes that are not the base's, a damaged file
        problem = f"its adapters do not fit their base, or are damaged: {first_line(error)}"
        raise UserError(str(directory), problem, AGAIN) from error


def load_untrained(settings: Settings, device: torch.device | str) -> PreTrainedModel:
    """Load the model of these settings as training begins with it, without adapters."""
    source = weights(settings, load_config(settings))
    return load_base(settings, source, half_or_full(settings)).eval().to(device)


@contextmanager
def untrained(settings: Settings, model: torch.nn.Module, device: str) -> Iterator[PreTrainedModel]:
    """The model as it was before training: adapters off, or as they were, or the model loaded once more."""
    if settings.recipe.model.use_peft:
        with adapter_weights.at_the_start(model, settings) as had, nullcontext() if had else model.disable_adapter():
            yield model
    else:
        yield load_untrained(settings, device)


@contextmanager
def reference(settings: Settings, model: torch.nn.Module, device: str) -> Iterator[PreTrainedModel]:
    """The reference of the run's objective, beside the model that it trained; None where it has none."""
    named = reference_of(settings.recipe)
    if named is None:
        yield None
    elif named in (ADAPTERS_OFF, MODEL):
        with untrained(settings, model, device) as base:
            yield base
    else:
        yield load_untrained(settings.of_second(named), device)


@contextmanager
def loading_from_run(folder: Path) -> Iterator[None]:
    """Raise UserError where what a run saved in `folder`, and the body loads, is damaged: another step is the cure."""
    cure = "copy it again where it was copied, or take another step: python -m brigade export OUTPUT DEST --step N"
    try:
        yield
    except UserError as error:
        raise UserError(error.place, error.problem, cure if error.cure.startswith(AGAIN) else error.cure) from None
    except Exception as error:
        if remote_code.is_refused(error):
            raise remote_code.refusal(str(folder), [str(folder)]) from None
        problem = f"what is saved there cannot be loaded: {type(error).__name__}: {first_line(error)}"
        raise of_disk(error) or UserError(str(folder), problem, cure) from None


def under_other_names(folder: Path, in_files: Set[str], trained: Set[str] = frozenset()) -> dict[str, torch.Tensor]:
    """Return what a checkpoint's files hold under other names than the model: fused parameters of a mixture of experts, which lie
    there expert by expert (Qwen3-MoE, Mixtral), and what has a name of its own there (MiniMax-M2's biases). They lie whole in
    memory: what one process has trained fits there.

    trained: names of parameters of which other ones are left out; none: all
    """
    with without_zero3():
        model, loading = scores.auto_class(folder, images=None).from_pretrained(
            folder, dtype="auto", device_map="cpu", trust_remote_code=False, output_loading_info=True
        )
    buffers = {name for name, _ in model.named_buffers()}
    wanted = (trained | buffers if trained else model.state_dict().keys()) - in_files - set(loading["missing_keys"])
    return {name: tensor for name, tensor in model.state_dict().items() if name in wanted}
