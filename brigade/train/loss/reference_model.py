"""A second model beside the one that is trained: frozen, in half precision where the run computes so, and never stepped.

Where the strategy shards weights, FSDP2 shards these layer by layer over all ranks, beside DeepSpeed's engine too: forward passes
need nothing else of it. Elsewhere each rank has them whole.
"""

from typing import TYPE_CHECKING

from ...errors import UserError
from .. import upstream
from ..model import adapter_weights, adapters, load, sample_by_sample
from ..model.location import load_config
from ..model.sizes import half_or_full
from ..recipe.objectives import MODEL
from ..run.directory import Run
from ..upstream import fsdp2
from . import own_loss

if TYPE_CHECKING:  # seconds, and preflight imports this module for check()
    from transformers import PreTrainedConfig, PreTrainedModel

    from ..engines.engine import StepContext

SHARDED = ("zero3", "fsdp2", "hsdp")  # kinds of strategies


def check(run: Run, reference: str, config: "PreTrainedConfig") -> None:
    """Raise UserError where a second model reads other tokens than the trained one.

    config: of the trained model
    """
    place = run.settings.place("reference")
    other = load_config(run.settings.of_reference(reference))
    kinds = [(each.model_type, each.get_text_config().vocab_size) for each in (other, config)]
    if kinds[0] != kinds[1]:
        theirs, ours = (f"{kind} with {tokens:,} tokens" for kind, tokens in kinds)
        cure = "name one of the same architecture: the same token ids go to both"
        raise UserError(place, f"the reference is {theirs}, and the model {ours}", cure)


def load_reference(trainer: "StepContext", reference: str) -> "PreTrainedModel":
    """Return the reference on this rank's device, ready for forward passes. A collective.

    reference: MODEL, a directory or a name on the Hub. MODEL has the adapters that the run goes on with, as they begin, and is in
    4 bits where the run's base is.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    run, device = trainer.run, trainer.args.device
    settings, dtype = run.settings.of_reference(reference), half_or_full(run.settings)
    goes_on = adapter_weights.find(run.settings) if reference == MODEL else None
    in_4bit = goes_on is not None and run.settings.recipe.model.load_in_4bit
    settings = settings.with_model(load_in_4bit=in_4bit)
    with upstream.without_zero3(), fsdp2.every_rank_loads():
        source = load.weights(settings, load_config(settings))
        how = trainer.engine.where()
        model = load.load_model(settings, source, dtype, run.kernels.attention, **how)
        own_loss.apply(model, run.settings)
        if goes_on:
            model = adapters.wrap(model, run.settings, source)
            adapter_weights.load(model, goes_on)
            for parameter in adapter_weights.trained(model).values():  # shards are of one dtype
                parameter.data = parameter.data.to(dtype)
    model.requires_grad_(False).eval()
    sample_by_sample.divide(model)
    if run.strategy.kind not in SHARDED or run.world.size == 1 or in_4bit:  # which few bytes hold whole
        return model.to(device)
    mesh = init_device_mesh(device.type, (run.world.size,))
    for module in list(model.modules()):
        if type(module).__name__ in upstream.layer_classes(model):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True).to(device)
