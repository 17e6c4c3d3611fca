"""A second model next to the trained one, a reference or a teacher: frozen, in half precision where the run computes in that.

Where the strategy shards weights, FSDP2 shards this model's layer by layer over all ranks, even under DeepSpeed's engine: forward
passes need nothing else of FSDP2. Elsewhere each rank has them whole.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...errors import UserError
from .. import upstream
from ..model import adapter_weights, adapters, base_weights, load, sample_by_sample
from ..model.location import load_config
from ..model.sizes import half_or_full
from ..model.tokenizer import load_tokenizer
from ..recipe.model_section import ModelSection
from ..recipe.objectives import MODEL
from ..recipe.settings import Settings
from ..run.directory import Run
from ..upstream import fsdp2
from . import own_loss

if TYPE_CHECKING:  # seconds, and preflight imports this module for check()
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from ..engines.engine import StepContext

SHARDED = ("zero3", "fsdp2", "hsdp")  # kinds of strategies
ALIKE = "name one of the same architecture and with the same tokens: the same token ids go to both"


def is_sharded(run: Run, in_4bit: bool) -> bool:
    """Whether a second model is sharded over all ranks. In 4 bits it is small, and each rank has it whole."""
    return run.strategy.kind in SHARDED and run.world.size > 1 and not in_4bit


def check(run: Run, reference: str, config: "PreTrainedConfig") -> None:
    """Raise UserError where a second model reads other tokens than the trained one.

    config: of the trained model
    """
    settings = run.settings
    named = settings.of_second(reference)
    configs = (config, load_config(named))
    ours, theirs = (f"{each.model_type} with {each.get_text_config().vocab_size:,} tokens" for each in configs)
    if ours != theirs:
        raise UserError(settings.place("reference"), f"the reference is {theirs}, and the model {ours}", ALIKE)
    check_tokens(settings, "reference", named, configs, ALIKE)


def check_tokens(
    settings: Settings, key: str, named: Settings, configs: "tuple[PreTrainedConfig, PreTrainedConfig]", cure: str
) -> None:
    """Raise UserError where a token is not the same one to both models. Their vocabularies may end with unused rows.

    key: the recipe's key that names the second model, whose settings are `named`; configs: of the trained model, and of that one
    """
    rows = [each.get_text_config().vocab_size for each in configs]
    ours, other = (load_tokenizer(each, count).get_vocab() for each, count in zip((settings, named), rows, strict=True))
    differing = [token for token in ours.keys() | other.keys() if ours.get(token) != other.get(token)]
    if differing:
        token = min(differing, key=lambda each: ours.get(each, len(ours)))
        numbers = " and ".join(str(each.get(token, "missing")) for each in (other, ours))
        problem = f"{len(differing):,} tokens differ: {token!r} is {numbers} in the {key}'s tokenizer and the model's"
        raise UserError(settings.place(key), problem, cure)


def read_as(section: ModelSection) -> list[object]:
    """Return what a recipe makes of a model's files, where that changes what the model says."""
    in_4bit = section.load_in_4bit and [section.bnb_4bit_quant_type, section.use_bnb_nested_quant]
    return [in_4bit, section.rope_parameters]


def load_reference(trainer: "StepContext", reference: str) -> "PreTrainedModel | None":
    """Return the reference on this rank's device, ready for forward passes. A collective.

    reference: MODEL, a directory or a name on the Hub. MODEL has the adapters that the run goes on with, as they begin, and is in
    4 bits where the run's base is.
    """
    run = trainer.run
    settings = run.settings.of_second(reference)
    goes_on = adapter_weights.find(run.settings) if reference == MODEL else None
    settings = settings.with_model(load_in_4bit=goes_on is not None and run.settings.recipe.model.load_in_4bit)

    def prepare(model: "PreTrainedModel", source: str, dtype: "torch.dtype") -> "PreTrainedModel":
        own_loss.apply(model, run.settings)
        if goes_on:
            model = adapters.wrap(model, run.settings, source)
            adapter_weights.load(model, goes_on)
            for parameter in adapter_weights.trained(model).values():  # shards are of one dtype
                parameter.data = parameter.data.to(dtype)
        return model

    return load_frozen(trainer, settings, prepare)


def load_frozen(
    trainer: "StepContext",
    settings: Settings,
    prepare: Callable[["PreTrainedModel", str, "torch.dtype"], "PreTrainedModel"],
    whole: Callable[["PreTrainedModel"], set["torch.nn.Parameter"]] = lambda model: set(),
    everywhere: bool = False,
) -> "PreTrainedModel | None":
    """Return the model of these settings on this rank's device, ready for forward passes; None on ranks without the output layer
    of the trained one. A collective.

    prepare: what is made of it (model, where its weights came from, its dtype) before it is sharded
    whole: returns the weights that each rank keeps whole; everywhere: on ranks without that layer, too
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    run, device, dtype = trainer.run, trainer.args.device, half_or_full(trainer.run.settings)
    source = load.weights(settings, load_config(settings))
    if not (trainer.engine.has_head or everywhere):
        base_weights.check_finite(None, source)  # as the ranks that load it do together
        return None
    with upstream.without_zero3(), fsdp2.every_rank_loads():
        model = load.load_model(settings, source, dtype, run.kernels.attention, **trainer.engine.where())
        model = prepare(model, source, dtype)
    model.requires_grad_(False).eval()
    sample_by_sample.divide(model)
    if not is_sharded(run, settings.recipe.model.load_in_4bit):
        return model.to(device)
    mesh, kept = init_device_mesh(device.type, (run.world.size,)), whole(model)
    for module in list(model.modules()):
        if type(module).__name__ in upstream.layer_classes(model):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True, ignored_params=kept).to(device)
