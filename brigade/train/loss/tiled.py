"""The loss and the MLPs, a tile of tokens at a time: a long sequence's logits and an MLP's inner activations never exist whole.

Each tile is computed again in the backward pass (torch.utils.checkpoint). A token's logits and MLP need no other token, so the
results are the same (Bekman et al. 2025, arXiv 2506.13996: Arctic Long Sequence Training).
"""

from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from ...errors import UserError, first_line
from .. import upstream
from ..data.store import IGNORED, MicroBatch
from ..distributed.process import this_process
from ..model import trial
from ..recipe.settings import Settings
from ..recipe.value_types import fits_layer
from ..upstream.experts import gather_whole
from .divergence import Said
from .supervised_loss import PLAIN, Terms, of_tokens, targets_of, weights_of_targets

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

LOGITS = 2**26  # in a tile of `true`: 256 MiB in fp32
_MLPS = ("mlp", "feed_forward", "block_sparse_moe")  # what Transformers' decoder layers call theirs

Tokens = int | Literal["auto"] | None
Asked = tuple[torch.Tensor, Any, torch.Tensor | None, Said | None]  # of a TiledHead


def apply(
    model: "PreTrainedModel", loss: int | None, mlp: Tokens, by_token: bool = False, terms: Terms = PLAIN
) -> None:
    """Let a causal language model compute its loss and its MLPs by tiles. Call it before adapters and engines wrap the model.

    loss, mlp: tokens in a tile, or None; True and "auto": as the keys of a recipe mean it
    by_token: whether its loss is that of each token, as token_losses() gives it; terms: what training adds to it
    """
    text = model.config.get_text_config()
    if loss:
        _tile_loss(model, tokens_of_tile(loss, text.vocab_size), by_token, terms)
    if mlp:
        _tile_mlps(model, text.hidden_size if mlp == "auto" else mlp)


def tokens_of_tile(loss: int, words: int) -> int:
    """Return the tokens in a tile of the loss. loss: as the key of a recipe has it; words: of the vocabulary"""
    return max(1, LOGITS // words) if loss is True else loss


# ---- the loss --------------------------------------------------------------------------------------------------------
class TiledHead(torch.nn.Linear):
    """The output layer of a causal language model, which computes the loss itself where there are labels.

    ZeRO-3 and FSDP2 thus gather the weight once, and no rank waits for another's number of tiles.
    tokens: in a tile; by_token: whether the loss is that of each token; terms: what training adds to it
    asked: shift_labels, num_items_in_batch, weights_of_targets() and what a teacher says of this pass; or None, which
        means that logits are returned
    multiplies: the method that a tensor group divides (tensor.py)
    """

    multiplies = "logits"

    tokens: int
    by_token: bool
    terms: Terms
    asked: Asked | None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits, or the loss in fp32: a scalar, or that of each token. hidden: (..., tokens, hidden size)"""
        if self.asked is None:
            return self.logits(hidden)
        labels, items, weights, said = self.asked
        states, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).to(hidden.device)
        weights = weights.to(hidden.device) if weights is not None and self.training else None
        columns = [states, targets, weights, *([said.column] if said else [])]
        # split and not slices: the gradient of each slice would be a whole sequence of zeros with the slice in it
        of_tiles = [repeat(None) if each is None else each.split(self.tokens) for each in columns]
        of_tile = partial(self._of_tile, said)
        losses = [_again(of_tile, *tile) for tile in zip(*of_tiles, strict=False)]
        if self.by_token:
            return torch.cat(losses)
        found = torch.stack(losses).sum(0)
        if said:
            found = said.taken(found)
        return found / ((targets != IGNORED).sum() if items is None else items)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of some tokens."""
        return super().forward(hidden)

    def _of_tile(
        self,
        said: Said | None,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        weighs: torch.Tensor | None,
        *column: torch.Tensor,
    ) -> torch.Tensor:
        if said:
            return said.sums(self.logits(hidden), targets, weighs, *column)
        reduction = "none" if self.by_token else "sum"
        return of_tokens(self.logits(hidden), targets, self.terms if self.training else PLAIN, reduction, weighs)


def _tile_loss(model: "PreTrainedModel", tokens: int, by_token: bool, terms: Terms) -> None:
    head = model.get_output_embeddings()
    if not any(True for _ in head.parameters()):
        return  # another rank's stage of the pipeline has it
    if type(head) is not torch.nn.Linear:
        raise TypeError(f"its output layer is a {type(head).__name__} and no plain linear one")
    head.__class__, head.tokens, head.by_token, head.terms, head.asked = TiledHead, tokens, by_token, terms, None
    model.register_forward_pre_hook(_ask, with_kwargs=True)
    model.loss_function = lambda logits, *_, **__: logits  # TiledHead has computed it


def _ask(model: "PreTrainedModel", _: object, given: MicroBatch) -> None:
    """Tell the output layer what it is asked for. PEFT may hold two of them, the original and the trained one."""
    labels = given.get("labels")
    asked: Asked | None = None
    if labels is not None:
        targets, said = targets_of(labels, given.get("shift_labels")), this_process.forward_pass.teacher
        asked = targets, given.get("num_items_in_batch"), weights_of_targets(), said
    for head in model.get_output_embeddings().modules():
        if isinstance(head, TiledHead):
            head.asked = asked


# ---- the MLPs --------------------------------------------------------------------------------------------------------
def _tile_mlps(model: "PreTrainedModel", tokens: int) -> None:
    # Not a vision tower's, whose MLPs have patches where these have sequences.
    decoder = model.get_decoder()
    layers = [module for module in decoder.modules() if type(module).__name__ in upstream.layer_classes(model)]
    named = [getattr(layer, name, None) for layer in layers for name in _MLPS]
    mlps = [mlp for mlp in named if mlp is not None]
    if not mlps:
        raise TypeError(f"its layers have no {' or '.join(_MLPS)}")
    for mlp in mlps:
        mlp.forward = _Tiles(mlp.forward, tokens)
        gather_whole(mlp)


class _Tiles:
    """The forward method of an MLP, by tiles: (sequences, tokens, hidden size) -> the same shape.

    whole: the method that it had, which may be Liger's
    """

    def __init__(self, whole: Callable[..., torch.Tensor], tokens: int) -> None:
        self.whole, self.tokens = whole, tokens

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([_again(self.whole, tile) for tile in hidden.split(self.tokens, dim=1)], dim=1)


def _again(compute: Callable[..., torch.Tensor], *given: object) -> torch.Tensor:
    """Return compute(*given), which is computed once more in the backward pass, where there is one."""
    if not torch.is_grad_enabled():
        return compute(*given)
    return checkpoint(compute, *given, use_reentrant=False)  # type: ignore[no-any-return]


# ---- what cannot be --------------------------------------------------------------------------------------------------
def check(settings: Settings, config: "PreTrainedConfig") -> None:
    """Raise UserError where a model computes something else by tiles, as a tiny random one of its architecture shows."""
    training, section = settings.recipe.training, settings.recipe.model
    loss, mlp = settings.place("tiled_loss"), settings.place("tiled_mlp")
    targets = [] if section.lora_target_modules == "all-linear" else section.lora_target_modules
    if training.loss_tiles and section.use_peft and any(fits_layer("lm_head", target) for target in targets):
        raise UserError(loss, "adapters on lm_head need its logits", "take lm_head out of lora_target_modules")
    if training.tiled_mlp and training.torch_compile:
        raise UserError(mlp, "compiled layers are not computed by tiles", "keep one of the two")
    for key, place, asked in (("tiled_loss", loss, training.loss_tiles), ("tiled_mlp", mlp, training.tiled_mlp)):
        images = settings.recipe.data.images
        why = _differs(config, key, section.trust_remote_code, images) if asked else ""
        if why:
            raise UserError(place, f"{type(config).__name__} is not computed by tiles: {why}", "leave the key out")


def _differs(config: "PreTrainedConfig", key: str, trust_remote_code: bool, images: bool) -> str:
    """Return why tiles of three tokens do not give a tiny model's loss and gradients, or "". images: whether it has its tower"""
    results: list[tuple[torch.Tensor, list[torch.Tensor | None]]] = []
    sequence, architecture = torch.arange(7, 15)[None], config if images else config.get_text_config()
    for tiles in (None, 3):
        with trial.alone():
            try:
                model = trial.tiny_model(architecture, images, trust_remote_code=trust_remote_code).train()
                apply(model, *((tiles, None) if key == "tiled_loss" else (None, tiles)))
                loss = model(sequence, labels=sequence, use_cache=False, num_items_in_batch=7).loss
                loss.backward()
            except Exception as error:
                return f"{first_line(error)} ({type(error).__name__})"
        results.append((loss.detach(), [parameter.grad for parameter in model.parameters()]))
    (loss, gradients), (other, others) = results
    pairs = [
        (loss, other),
        *((a, b) for a, b in zip(gradients, others, strict=True) if a is not None and b is not None),
    ]
    alike = all((a - b).norm() <= 1e-4 * a.norm() + 1e-9 for a, b in pairs)
    same = [gradient is None for gradient in gradients] == [gradient is None for gradient in others]
    return "" if alike and same else "a tiny model of it has another loss or other gradients then"
