"""Every touch of a private name of torch, Transformers, Accelerate, DeepSpeed, PEFT and bitsandbytes: what goes wrong without it,
and its line. Whoever raises one of their versions looks here first.

A file beside this one holds what belongs to one function of one of them.
trainer.py has the private methods of Transformers' Trainer that ours replaces; tests/unit/test_upstream.py says when
one of them is gone.
Nothing of theirs is imported before it is asked for.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import transformers
    from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments


# ---- several runs in one process ---------------------------------------------------------------------------------
_GROUPS = (
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_MODEL_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP",
    "mpu",
)


def forget_earlier_run() -> None:
    """Remove what an earlier run left in the engines' modules: a ZeRO-3 configuration would shard whatever is built from now on
    (transformers/integrations/deepspeed.py: _hf_deepspeed_config_weak_ref), and hpZ's groups may be made only once
    (deepspeed/utils/groups.py: _ZERO_PARAM_INTRA_PARALLEL_GROUP), and AutoTP's serve whoever comes next, whatever size it wants
    (_init_tp_mesh_device). An interrupted step tells that gradients are incomplete (accelerate/state.py: GradientState), and
    the next run's optimizer would make no step, not even the one in which FSDP2's states are made before they are loaded."""
    if "transformers.integrations.deepspeed" in sys.modules:
        sys.modules["transformers.integrations.deepspeed"].unset_hf_deepspeed_config()
    if "deepspeed.utils.groups" in sys.modules:
        for kept in _GROUPS:
            setattr(sys.modules["deepspeed.utils.groups"], kept, None)
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].GradientState._reset_state()


def forget_world() -> None:
    """The number of this rank and of all, where the ranks of this process are divided again (accelerate/state.py: _shared_state;
    deepspeed/comm/comm.py: cdb, utils/groups.py: _WORLD_GROUP)."""
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
    for name, kept in (("deepspeed.comm.comm", "cdb"), ("deepspeed.utils.groups", "_WORLD_GROUP")):
        if name in sys.modules:
            setattr(sys.modules[name], kept, None)


@contextmanager
def replaced(owner: Any, **others: object) -> Iterator[None]:
    """Let a module, a class or an object have these attributes meanwhile, instead of its own."""
    own = {name: getattr(owner, name) for name in others}
    try:
        for name, value in others.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in own.items():
            setattr(owner, name, value)


@contextmanager
def variables(**others: str | None) -> Iterator[None]:
    """Let the environment have these variables meanwhile; None: not have them."""
    own = {name: os.environ.pop(name, None) for name in others}
    try:
        os.environ.update({name: value for name, value in others.items() if value is not None})
        yield
    finally:
        for name, value in own.items():
            os.environ.pop(name, None)
            os.environ.update({name: value} if value is not None else {})


def without_zero3() -> AbstractContextManager[None]:
    """Models are built whole meanwhile: where a ZeRO-3 configuration lives, Transformers shards each of them (as above)."""
    from transformers.integrations import deepspeed

    return replaced(deepspeed, _hf_deepspeed_config_weak_ref=None)


class _Later(ModuleType):
    """A package that is imported when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            if name.startswith("__"):  # inspect looks at __file__ of all that is imported
                raise AttributeError(name)
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def quick_imports(for_good: bool = False) -> Iterator[None]:
    """Large packages are imported here: without looking for garbage in what stays, and without what few runs compute with.

    Torch, Transformers and what they bring are a million objects that never go. Python would look through all of them eight times
    while they come, and again in each full collection, a quarter of a second each time.

    for_good: leave what is there by now out of all later collections (gc.freeze); not in a program of somebody's own, whose
        garbage would stay. A second run of a process leaves nothing out: the first one's model may be there

    The Trainer imports datasets, and it pandas, to recognise a data set of theirs where no loader is given (trainer.py:
    _get_dataloader); and PEFT, as get_scheduler does, and PEFT bitsandbytes (helpers.py: bnb), and it torch's inductor. Without
    them a rank starts with 11.8 CPU seconds and not 12.8, and with 12.7 and not 16.7 where it has adapters. Meanwhile there are
    stand-ins, which import them where something of them is asked for.
    """
    stand_ins = {}
    for name in ("bitsandbytes", "datasets"):
        found = importlib.util.find_spec(name) if name not in sys.modules else None
        if found:
            stand_ins[name] = sys.modules[name] = _Later(name)
            stand_ins[name].__spec__ = found  # by which Transformers and PEFT know that it is installed
    for_good = for_good and "transformers.trainer" not in sys.modules
    if for_good:
        gc.collect()  # what is garbage by now would stay, too
    gc.disable()
    try:
        yield
    finally:
        if for_good:
            gc.freeze()
        gc.enable()
        for name, stand_in in stand_ins.items():
            if sys.modules.get(name) is stand_in:
                del sys.modules[name]


def unwrap_without_importing_deepspeed() -> None:
    """Accelerate unwraps a model in each run, and imports DeepSpeed to see whether it is an engine of it, half a second
    (utils/other.py: extract_model_from_parallel). Where nobody has imported DeepSpeed, nothing is."""
    import accelerate.utils.other

    accelerate.utils.other.is_deepspeed_available = lambda: "deepspeed" in sys.modules


# ---- Transformers ------------------------------------------------------------------------------------------------
def take_one_device(arguments: TrainingArguments) -> None:
    """One process takes one device: with several, Trainer wraps the model in nn.DataParallel (training_args.py: _n_gpu)."""
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1


def save_on_the_first_rank_alone(model: torch.nn.Module) -> None:
    """Let the first rank of each host write weights, for each has a directory of its own. Transformers lets only rank 0 do it,
    save_on_each_node or not (distributed/mixin.py: should_save_on_this_rank)."""
    model.should_save_on_this_rank = lambda is_main_process: is_main_process


# Models of images and texts that AutoModelForCausalLM leaves out, and builds their like (Gemma 3): kind -> class.
_WITH_TOWERS = {"mistral3": "Mistral3ForConditionalGeneration"}


def causal_models() -> dict[str, str]:
    """kind -> class of what AutoModelForCausalLM builds, _WITH_TOWERS among them from now on (models/auto/modeling_auto.py)."""
    from transformers.models.auto import modeling_auto as auto

    names = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    for kind, name in _WITH_TOWERS.items():
        names.setdefault(kind, name)
    return names


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that AutoModelForCausalLM builds for a config, or None (models/auto/auto_factory.py: _model_mapping)."""
    from transformers import AutoModelForCausalLM

    causal_models()
    return AutoModelForCausalLM._model_mapping.get(type(config), None)


def auto_class_for(images: bool) -> type[transformers.AutoModelForCausalLM | transformers.AutoModelForImageTextToText]:
    """Return Transformers' class that builds the model of a config: with its vision tower, or for texts only."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if images else AutoModelForCausalLM


def takes_images(name: str) -> bool:
    """Whether a class of this name is one that AutoModelForImageTextToText builds (models/auto/modeling_auto.py)."""
    from transformers.models.auto import modeling_auto as auto

    return name in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()


def classifier_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that AutoModelForSequenceClassification builds for a config of texts, or None (as above)."""
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification._model_mapping.get(type(config.get_text_config()), None)


def supports(model: torch.nn.Module, what: str) -> bool:
    """Whether a model's class says that it takes `sdpa` or an `attention_backend`; modeling_utils.py: _supports_..."""
    return getattr(model, f"_supports_{what}", True)


def attention_of(config: PreTrainedConfig) -> str:
    """The attention that a model was built with (configuration_utils.py: _attn_implementation)."""
    return config._attn_implementation


def layer_classes(model: torch.nn.Module) -> tuple[str, ...]:
    """Names of the classes of a model's layers (modeling_utils.py: _no_split_modules)."""
    return tuple(model._no_split_modules or ())


def without_parameters(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of a module whose own parameters are None; buffers and submodules are shared (torch/nn/modules/module.py)."""
    twin = copy.copy(module)
    twin._parameters = dict.fromkeys(module._parameters)
    return twin


def are_experts(module: torch.nn.Module) -> bool:
    """Whether a module holds the fused experts of a layer (integrations/moe.py: use_experts_implementation)."""
    return hasattr(module, "_is_expert_parallel")


def fix_loaded(model: torch.nn.Module, dequantised: bool = False) -> None:
    """Put right what from_pretrained leaves in a model.

    - Renamings: ZeRO-3's way of loading keeps those that matched nothing (integrations/deepspeed.py:
      _load_state_dict_into_zero3_model), and saving undoes all. Of a model that it has dequantised, saving would name experts
      `..._blocks`, as MXFP4 does, and no one would find them there (core_model_loading.py: revert_weight_conversion): without
      any, saving takes those of the architecture.
    - Layers: Gemma 3 names one of a text encoder, too, which it does not have, and accelerate looks for each by its name.
    - On a CPU with AVX512-BF16 bitsandbytes repacks weights at the first evaluation, and from then on no gradient passes
      through them (nn/modules.py: Linear4bit.forward: a product without a backward pass).
    """
    if dequantised:
        model._weight_conversions = None
    elif renamings := getattr(model, "_weight_conversions", None):
        model._weight_conversions = [renaming for renaming in renamings if renaming.was_used()]
    there = {type(module).__name__ for module in model.modules()}
    model._no_split_modules = [name for name in layer_classes(model) if name in there]
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def own_frozen_parameters() -> AbstractContextManager[None]:
    """Parameters that a model's own code does not train stay frozen while it is loaded here: from_pretrained makes each parameter
    anew, with requires_grad (core_model_loading.py: set_param_for_module). So DDP would wait for gradients of the router's bias
    of ERNIE-4.5-MoE, or of AFMoE's, which never come."""
    from transformers import core_model_loading as loading

    plain = loading.set_param_for_module

    def keeping(model: torch.nn.Module, target_name: str, *args: object, **options: object) -> None:
        owner, _, name = target_name.rpartition(".")
        before = getattr(model.get_submodule(owner), name, None)
        plain(model, target_name, *args, **options)
        now = model.get_submodule(owner)._parameters
        if before is not None and name in now and not before.requires_grad:
            now[name].requires_grad_(False)

    return replaced(loading, set_param_for_module=keeping)


def init_own_layers_alone(decoder: torch.nn.Module, name: str, own: Sequence[torch.nn.Module]) -> None:
    """Let a decoder have only these layers under this name while it is initialised, and not what stands in the place of others:
    Falcon-H1's sets a buffer in each of them (modeling_utils.py: _init_weights)."""
    from torch.nn import ModuleList

    plain = decoder._init_weights

    def init(module: torch.nn.Module) -> None:
        with replaced(decoder, **{name: ModuleList(own)}):
            plain(module)

    decoder._init_weights = init


def any_layer_kinds() -> AbstractContextManager[None]:
    """Load a checkpoint of any architecture here. The Trainer asks its config only for the version, by configs' base class,
    which refuses kinds of layers that only the model's own class knows: DeepSeek-V4's (trainer.py: _load_from_checkpoint)."""
    from transformers import trainer

    def version(file: str) -> SimpleNamespace:
        return SimpleNamespace(transformers_version=json.loads(Path(file).read_text()).get("transformers_version"))

    return replaced(trainer, PreTrainedConfig=SimpleNamespace(from_json_file=version))


def take_rates_of(schedule: torch.optim.lr_scheduler.LambdaLR) -> None:
    """Set the learning rates of a LambdaLR's own curve: a checkpoint brings back those of the length that its run had, and the
    first step of a lengthened run would still have them (torch/optim/lr_scheduler.py: _last_lr)."""
    pairs = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    schedule._last_lr = [base * at(schedule.last_epoch) for base, at in pairs]
    for group, rate in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
        group["lr"] = rate


def logged_so_far(trainer: Trainer) -> torch.Tensor:
    """The sum of losses since the last log entry (trainer.py: _tr_loss)."""
    return trainer._tr_loss.clone()


def forget_step(trainer: Trainer, logged_before: torch.Tensor) -> None:
    """Leave a step out of the mean that is logged next, and of the run's: the loop adds losses up before anyone can judge the
    step (trainer.py: _run_epoch), and divides by the steps since these numbers (_maybe_log_save_evaluate, _finalize_training)."""
    trainer._tr_loss.copy_(logged_before)
    trainer._globalstep_last_logged += 1
    trainer._initial_global_step += 1
