"""How adapters begin (init_lora_weights: pissa, pissa_niter_N, olora): computed once per host from the base's matrices, before
the model is loaded, and kept in the cache as a file of adapters."""

import hashlib
from pathlib import Path
from typing import Any

import torch

from ...errors import UserError
from ..cache import cache_directory, once, stamp
from ..distributed.consistency import WEIGHTS as FILES
from ..recipe.continued import WEIGHTS
from ..recipe.flags import Settings
from ..upstream import without_zero3
from . import adapter_weights, adapters
from .initial_adapters import adapted
from .load import quantization_config
from .sizes import half_or_full, model_class

COMPUTED = 1  # raise it when _begin() computes something else: what an earlier one wrote stays in caches
NITER = "pissa_niter_"


def make_adapters(settings: Settings, source: str) -> str | None:
    """Return a directory with the adapters that a run begins with, made of its base; None where they are not made of it.

    source: the directory of the base's weights

    Call it before TrainingArguments exist. Memory holds the base once on each host. Raises UserError.
    """
    section = settings.recipe.model
    if not section.use_peft or section.init_lora_weights is True:
        return None
    files = [path for pattern in FILES for path in sorted(Path(source).glob(pattern))]
    dtype = half_or_full(settings)
    seed = settings.recipe.training.seed
    made_of = [COMPUTED, section.model_dump(), seed, dtype, torch.__version__, *map(stamp, files)]
    folder = cache_directory("models") / f"adapters-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}"

    def build(aside: Path) -> None:
        from safetensors.torch import save_file

        options = {"quantization_config": quantization_config(settings, source, dtype)}
        with without_zero3():
            model = model_class(settings).from_pretrained(
                source, dtype=dtype, trust_remote_code=section.trust_remote_code, **options
            )
            model = adapters.wrap(model, settings, source)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            for layer in adapted(model):
                _begin(layer, str(section.init_lora_weights), settings)
        state = {name: each.detach().float().contiguous() for name, each in adapter_weights.trained(model).items()}
        save_file(state, aside / WEIGHTS, metadata={"format": "pt"})

    return str(once(folder, lambda made: (made / WEIGHTS).is_file(), build))


def _begin(layer: Any, how: str, settings: Settings) -> None:
    """Give an adapter its first values: how it begins, and once more to hold that."""
    inner, outer, scale = layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.scaling["default"]
    matrix = layer.get_base_layer().weight.detach().float()
    matrix = matrix.T if layer.fan_in_fan_out else matrix
    rank = len(inner) // 2
    if rank > min(matrix.shape):
        problem = f"a matrix of {tuple(matrix.shape)} has no {rank} of them to begin adapters of rank {rank} with"
        raise UserError(settings.place("init_lora_weights"), problem, "set a smaller lora_r, or rank_pattern")
    if how == "olora":
        first = torch.linalg.qr(matrix[:, :rank])[0]  # the first columns of Q depend on these only
        second = first.T @ matrix
    else:
        if how.startswith(NITER):
            left, values, right = torch.svd_lowrank(matrix, rank, niter=int(how.removeprefix(NITER)))
            right = right.T
        else:
            left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        roots = (values[:rank] / scale).sqrt()
        first, second = left[:, :rank] * roots, roots[:, None] * right[:rank]
    inner.copy_(torch.cat([second, second]))
    outer.copy_(torch.cat([first, -first], 1))
