"""Turn a run of train.py into a Job. No torch."""

import importlib.util
from collections.abc import Mapping

from ...errors import UserError
from ...errors.tables import Document, Fields
from ...train.recipe import continued
from ...train.recipe.batch import Batch
from ...train.recipe.method import method_of
from ...train.recipe.objectives import ADAPTERS_OFF, MODEL, PAIRS, objective_of, precomputes, reference_of
from ...train.recipe.schema import Recipe
from ...train.strategy import Strategy
from ...train.strategy.axes import NAMES, Axes
from ...train.strategy.deepspeed_config import offloads_states
from ..costs.images import NOT_ASKED, Asked, of_recipe
from ..costs.job import EAGER, FUSED, Attention, Comparison, Job, Replicas, axis_fields, method_fields
from ..shape.find import described, named_shape
from ..shape.lora import ALL, ENDS, targets_of, trained_parameters
from ..shape.model_shape import ModelShape

# What computes attention, by the recipe's name for it. varlen and SDPA run FlashAttention-2's kernels on a GPU.
ATTENTION: dict[str, Attention] = {
    "auto": "flash2", "varlen": "flash2", "sdpa": "flash2", "flex_attention": "flash2", "flash_attention_2": "flash2",
    "flash_attention_3": "flash3", "eager": "eager",
}  # fmt: skip


def attention_of(shape: ModelShape, implementation: str = "auto") -> Attention:
    """Return what train.py computes attention with: eager where a model knows nothing else (brigade/train/model/attention.py)."""
    return "eager" if implementation == "auto" and shape.family.eager else ATTENTION[implementation]


# Nothing is sharded, by what shards (engines/fsdp2_engine.py).
EXPERTS_UNDER_DDP: Fields = {"engine": "fsdp2", "stage": 3, "shard": 1}


class NotCovered(Exception):
    """The formulas do not cover a run: its message says why, in a few words."""


def job_of_run(
    recipe: Recipe,
    strategy: Strategy,
    batch: Batch,
    ranks: int,
    node_size: int,
    config: Document,
    gpu: str,
    *,
    trained: int = 0,
    place: str = "config.json",
    asked: Asked = NOT_ASKED,
) -> Job:
    """Return `recipe` as a Job on `ranks` GPUs of the kind `gpu`, `node_size` on each host. Samples are max_length long, and of
    preferences two make a sequence.

    ranks: of each replica, where several train independently
    config: the model's config.json; place: its name in messages; trained: parameters of the adapters and what is trained beside
    them where that is known, else counted; asked: what is known of the images of a recipe that has some
    Raises NotCovered for what the formulas do not know.
    """
    training, model, again = recipe.training, recipe.model, recipe.training.recomputation
    _check(recipe, strategy, ranks, trained)
    name, images = model.model_name_or_path.rstrip("/").rpartition("/")[2], None
    try:
        if recipe.data.images:
            shape, images = of_recipe(recipe, config, place, name, asked)
        else:
            shape = described(config, place, name)
    except UserError as error:
        raise NotCovered(f"{error.place}: {error.problem}") from None
    objective = objective_of(training)
    shape = shape.scoring if objective.scores else shape
    comparison, spread = _comparison(recipe, shape), _engine(strategy, node_size)
    if strategy.axes:
        _check_axes(recipe, strategy.axes, shape, spread)
    if again.selective:
        _check_selective(recipe, shape)
    adapters = model.use_peft
    targets = targets_of(model.lora_target_modules)
    if adapters and not trained:
        rank = model.lora_r
        tokens = len(set(model.trainable_token_indices))
        trained = trained_parameters(shape, rank, model.lora_modules_to_save, targets, model.use_dora, tokens)
        if images:  # and on the linear layers beside the decoder
            trained += rank * sum(images.tower.adapted(model.lora_target_modules, part) for part in images.trained)
    fused = training.use_liger_kernel or training.torch_compile
    averaging = (training.sync_every or 1, training.sync_precision, training.sync_fragments, training.outer_optim)
    return Job(
        shape,
        recipe.data.max_length * comparison.asks_for.samples,
        batch.micro,
        batch.accumulation,
        attended=recipe.data.max_length if objective.rows == PAIRS else 0,
        packed=recipe.data.packing,
        node_size=node_size,
        gpu=gpu,
        checkpointing="selective" if again.selective else "full" if again.layers else "none",
        every=max(1, again.layers),
        inputs_on_host=again.offload,
        kernels=FUSED if fused else EAGER,
        attention=attention_of(shape, model.attn_implementation),
        loss="tiled" if training.loss_tiles else "online" if training.torch_compile else "released",
        tiled_mlp=training.tiled_mlp is not None,
        trained=trained if adapters else 0,
        adapter_dropout=adapters and model.lora_dropout > 0,
        targets=targets or ALL,
        optimizer=training.optim,
        link=recipe.cluster.network or "",
        replicas=Replicas(strategy.replicas, *averaging) if strategy.replicas > 1 else Replicas(),
        comparison=comparison,
        images=images,
        **method_fields(method_of(model)),
        **spread | axis_fields(strategy.axes, ranks),
    )


def check_kernels(shape: ModelShape) -> None:
    """Raise NotCovered on a host that lacks the packages with which a hybrid is counted: torch's own way takes several times the
    memory (costs/mixer.py)."""
    packages = shape.mixer.packages if shape.mixer else {}
    lacking = [name for module, name in packages.items() if not importlib.util.find_spec(module)]
    if shape.mixer and lacking:
        raise NotCovered(f"the formulas count a {shape.mixer.kind} by {' and '.join(lacking)}, which this host lacks")


def check_texts(sees: bool) -> None:
    """Raise NotCovered for a run of images: nothing tells the formulas how many its samples have, and how large they are."""
    if sees:
        raise NotCovered("the formulas do not know how many images its samples have, which `plan` is told")


def _comparison(recipe: Recipe, shape: ModelShape) -> Comparison:
    """Return what a recipe's answers are compared with, which may be a teacher. shape: of the model that is trained

    Eager attention computes every product between the samples of a sequence, so that those which are not packed are padded
    (train/model/packed_samples.py: layout). Raises NotCovered for a reference of which no config.json can be had.
    """
    training, objective = recipe.training, objective_of(recipe.training)
    reference, which = training.teacher or reference_of(recipe), "teacher" if training.teacher else "reference"
    own = reference if reference in (None, ADAPTERS_OFF) else MODEL
    other = None
    if reference not in (None, ADAPTERS_OFF, MODEL):
        try:
            other = named_shape(str(reference))
        except UserError as error:
            raise NotCovered(f"of the {which} the formulas know no sizes ({error.place}: {error.problem})") from None
    eager = attention_of(shape, recipe.model.attn_implementation) == "eager"
    apart = 2 if eager and objective.rows == PAIRS and not recipe.data.packing else 1
    before, in_4bit = precomputes(recipe), training.teacher_load_in_4bit
    kept = min(training.teacher_top_k or 0, shape.vocab, other.vocab if other else shape.vocab)
    return Comparison(training.objective, objective.rows, own or "", before, other, apart, in_4bit, kept)


def _check(recipe: Recipe, strategy: Strategy, ranks: int, trained: int) -> None:
    """Raise NotCovered for what no formula covers. trained: parameters of adapters, 0 where they have to be counted"""
    training, model = recipe.training, recipe.model
    beside = [name for name in model.lora_modules_to_save if name not in ENDS]
    zero = (strategy.ds_config or {}).get("zero_optimization", {})
    half_of_zeropp = zero.get("zero_quantized_weights", False) != zero.get("zero_quantized_gradients", False)
    hook = training.ddp_comm_hook if ranks > 1 else "none"
    host_adam, fsdp_offloads = offloads_states(strategy.ds_config or {}), strategy.fsdp.get("cpu_offload")
    odd_images = recipe.data.images and training.activation_checkpointing not in (True, False)
    lacking = {
        "they are for bf16 and fp16, and this run computes in fp32": not (training.bf16 or training.fp16),
        f"they do not know what ddp_comm_hook {hook} saves": hook != "none",
        "they know ZeRO++'s quantised weights and gradients, but neither alone": half_of_zeropp,
        "they know MLPs in tiles of tiled_mlp: auto": training.tiled_mlp not in (None, "auto"),
        "they know the loss in tiles of tiled_loss: true": type(training.tiled_loss) is int,
        "they know images beside activation_checkpointing true or false": odd_images,
        "they do not count z-loss's copy of the logits": training.z_loss_coef and not training.tiled_loss,
        "they do not know weights that are stored quantised": zero.get("zero_quantized_nontrainable_weights"),
        f"they know DeepSpeed's own AdamW on the host, not {training.optim}": host_adam
        and training.optim == "schedule_free_adamw",
        f"they know FSDP2 that offloads with optim adamw_torch_fused, not {training.optim}": fsdp_offloads
        and training.optim != "adamw_torch_fused",
        "they know no FSDP2 that keeps layers gathered": strategy.fsdp.get("reshard_after_forward") is False,
    }
    needed, other = f"the adapter_config.json of {model.adapter_name_or_path}", next(iter(beside), "")
    targets = targets_of(model.lora_target_modules)
    of_adapters = {
        f"they need {needed}, which this machine lacks": continued.is_unread(model),
        "they count those on attention's projections, the MLP or all linear layers": not targets,
        "they count none on fused experts": model.lora_target_parameters,
        "they count one rank for all (rank_pattern)": model.rank_pattern and not trained,
        f"they count {' and '.join(ENDS)} that are trained whole beside them, not {other}": other and not trained,
    }
    lacking |= {f"of adapters {reason}": holds for reason, holds in of_adapters.items() if model.use_peft}
    _refuse_first(lacking, "the formulas do not cover this run: {}")


def _check_selective(recipe: Recipe, shape: ModelShape) -> None:
    """Raise NotCovered where no formula says which products a layer keeps under activation_checkpointing: selective."""
    lacking = {
        "adapters": recipe.model.use_peft,
        "experts": shape.experts,
        "a hybrid's mixers": shape.mixer,
        "layers of different sizes": shape.sizes or shape.per_layer_input,
        "projections of several products": shape.projections,
        "MLPs in tiles": recipe.training.tiled_mlp,
        "eager attention": attention_of(shape, recipe.model.attn_implementation) == "eager",
    }
    _refuse_first(lacking, "the formulas do not know what activation_checkpointing: selective keeps of {}")


def _refuse_first(reasons: Mapping[str, object], sentence: str) -> None:
    """Raise NotCovered with the first of the reasons that holds, in a sentence with a place for it."""
    for reason, holds in reasons.items():
        if holds:
            raise NotCovered(sentence.format(reason))


def _check_axes(recipe: Recipe, axes: Axes, shape: ModelShape, spread: Document) -> None:
    """Raise NotCovered for axes besides data parallelism that no formula covers. spread: what _engine() returned"""
    again = recipe.training.recomputation
    lacking = {
        "offload": spread.get("offload"),
        "every_n and selective": axes.stages > 1 and (again.selective or again.layers > 1),
        "selective": axes.tensor > 1 and again.selective,
        "zbv": axes.chosen_schedule == "zbv",
        "ZeRO++": spread.get("hpz") or spread.get("quantised"),
        "DoRA": recipe.model.use_dora,
        "weights in four bits": recipe.model.load_in_4bit,
        "a hybrid's mixers": shape.mixer and (axes.tensor > 1 or axes.sequence > 1),
        "layers of different sizes": shape.sizes and axes.tensor * axes.sequence * axes.stages > 1,
        "MLPs in tiles": recipe.training.tiled_mlp and (axes.tensor > 1 or axes.experts > 1),
        "queries, keys and values in one matrix": axes.tensor > 1
        and (shape.family.fused_qkv or shape.family.fused_gate),
        "eager attention": axes.sequence > 1 and attention_of(shape, recipe.model.attn_implementation) == "eager",
    }
    _refuse_first(lacking, f"the formulas do not know {{}} under {axes} parallelism")
    for axis, size in axes.used.items():
        odd = [number for number in divisible(shape, axis) if number % size]
        if odd:
            known = f"the formulas know {NAMES[axis]} parallelism over ranks that divide the model"
            raise NotCovered(f"{known}, and {size} do not {odd[0]}")


def divisible(shape: ModelShape, axis: str) -> tuple[int, ...]:
    """Return the numbers of a model that the size of an axis has to divide."""
    heads = (shape.heads, shape.kv_heads)
    return {
        "tensor": (*heads, shape.ffn, *(() if shape.tied else (shape.vocab,))),
        "sequence": (shape.heads,),
        "experts": (shape.experts,),
    }.get(axis, ())


def _engine(strategy: Strategy, node_size: int) -> Fields:
    """Return the fields of a Job that say how states are sharded, and what is sent."""
    if strategy.is_fsdp:
        # The parts of a sequence are shards' ranks too (train/engines/choose_engine.py).
        shard = strategy.shard * strategy.axes.sequence if strategy.kind == "hsdp" else 0
        offload = "all" if strategy.fsdp.get("cpu_offload") else ""
        return {"engine": "fsdp2", "stage": 3, "shard": shard, "offload": offload}
    if strategy.ds_config is None and strategy.axes.experts > 1 and strategy.axes.stages == 1:
        return EXPERTS_UNDER_DDP
    if strategy.ds_config is None:
        return {"engine": "ddp", "stage": 0}
    zero = strategy.ds_config["zero_optimization"]
    hpz = zero.get("zero_hpz_partition_size", 1)
    hpz = node_size if hpz == "auto" else hpz
    where = {block: (zero.get(f"offload_{block}") or {}).get("device", "none") for block in ("optimizer", "param")}
    offload = "all" if where["param"] != "none" else "optimizer" if where["optimizer"] != "none" else ""
    offload = "nvme" if "nvme" in where.values() else offload
    return {
        "engine": "zero",
        "stage": zero["stage"],
        "hpz": hpz if hpz > 1 else 0,
        "offload": offload,
        "quantised": bool(zero.get("zero_quantized_weights")),
    }
