"""What Brigade puts in the place of other packages' methods and functions takes what they take: a renamed or a new argument is
found here, before a run gets there."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining._utils import InferenceMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import brigade.train
from brigade.train.upstream import (
    autotp,
    llama4_images,
    model_loading,
    own_frozen_parameters,
    pipelining,
    samples_end_to_end,
    token_rows,
    zero_parameters,
)
from testing.upstream_names import PACKAGES

OF_AUTOTP = "deepspeed.module_inject.auto_tp:AutoTP"
MASKS = samples_end_to_end.NAME
# What replaces it: a function, or a context for the time in which it does.
REPLACED = [
    (f"{OF_AUTOTP}._replace_with_config", autotp.look_into_adapters),
    (f"{OF_AUTOTP}._create_row_parallel_layer", autotp.split_inputs),
    (f"{OF_AUTOTP}.update_mp_params", autotp.split_inputs),
    ("deepspeed.module_inject.tp_plan_converter:TPPlanConverter.convert", autotp.split_inputs),
    ("deepspeed.runtime.engine:DeepSpeedEngine._replace_module_consolidated_state_dict", autotp.gather_buffers),
    (
        "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator."
        f"{zero_parameters.PREFIX}params_to_release",
        zero_parameters.decide_by_the_present_order.__wrapped__,
    ),
    ("transformers.core_model_loading:.set_param_for_module", own_frozen_parameters),
    ("transformers.core_model_loading:.set_param_for_module", lambda: model_loading.handed_to(print)),
    ("transformers.models.llama4.modeling_llama4:Llama4UnfoldConvolution.forward", llama4_images.correct_model),
    *[(f"transformers.models.{each}:.{MASKS}", samples_end_to_end.correct_masks) for each in samples_end_to_end.MODULES],
    ("peft.tuners.trainable_tokens.layer:TrainableTokensLayer._collect_token_weights", token_rows.rows_of_shards),
]  # fmt: skip


def takes(ours: Callable[..., object], theirs: Callable[..., object], by_name: bool = False) -> str:
    """Return why a call of theirs could not be one of ours, "" where it can: with what has no default in order, and the rest in
    order or by name. by_name: with all but the first by name, as Transformers calls; so also where ours has a `**`"""
    wanted, given = inspect.signature(theirs), inspect.signature(ours, follow_wrapped=False)
    plain = [each for each in wanted.parameters.values() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    bind = given.bind if len(plain) == len(wanted.parameters) else given.bind_partial  # any may come for a star
    first = [each.name for each in plain if each.kind is not each.KEYWORD_ONLY]
    alone = [each.name for each in plain if each.kind is each.KEYWORD_ONLY]
    optional = [each.name for each in plain if each.name in first and each.default is not each.empty]
    calls = [(first, alone), ([name for name in first if name not in optional], [*optional, *alone])]
    if by_name or any(each.kind is each.VAR_KEYWORD for each in given.parameters.values()):
        calls = [(first[:1], [*first[1:], *alone])]
    why = next(filter(None, (_fails(bind, *call) for call in calls)), "")
    return why and f"{why}: theirs {wanted}, ours {given}"


def _fails(bind: Callable[..., object], in_order: list[str], by_name: list[str]) -> str:
    try:
        bind(*in_order, **dict.fromkeys(by_name))
    except TypeError as error:
        return str(error)
    return ""


def overrides() -> Iterator[tuple[str, Callable[..., object], Callable[..., object]]]:
    """(name, ours, theirs) of each method by which a class of brigade/train replaces one of another package."""
    for found in pkgutil.walk_packages(brigade.train.__path__, "brigade.train."):
        for kind in vars(importlib.import_module(found.name)).values():
            if isinstance(kind, type) and kind.__module__ == found.name:
                for name, ours in vars(kind).items():
                    theirs: Any = next((vars(each)[name] for each in kind.__mro__[1:] if name in vars(each)), None)
                    package = str(getattr(theirs, "__module__", "")).partition(".")[0]
                    both = inspect.isfunction(ours) and inspect.isfunction(theirs) and name != "__init__"
                    if both and package in PACKAGES:
                        yield f"{kind.__module__}.{kind.__name__}.{name}", ours, theirs


def test_each_method_of_ours_takes_what_the_one_that_it_overrides_takes():
    found = {name: takes(ours, theirs) for name, ours, theirs in overrides()}
    assert len(found) > 40 and any("HookedTrainer" in name for name in found)
    assert not {name: why for name, why in found.items() if why}


@pytest.mark.parametrize("place, replace", REPLACED)
def test_each_function_of_ours_takes_what_the_one_in_whose_place_it_stands_takes(place, replace, monkeypatch):
    module, _, path = place.partition(":")
    owner_name, _, name = path.rpartition(".")
    owner: Any = importlib.import_module(module)
    owner = getattr(owner, owner_name) if owner_name else owner
    theirs = getattr(owner, name)
    monkeypatch.setattr(owner, name, theirs)  # back to it afterwards
    context = replace()
    with context if hasattr(context, "__enter__") else nullcontext():
        assert not takes(getattr(owner, name), theirs, by_name=".models." in module)


def test_a_stage_receives_each_micro_batch_in_its_own_shape():
    """Whether torch is given a buffer, or makes one by its description of what comes."""
    dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    try:
        part = torch.nn.Linear(4, 4)
        stage = pipelining.Stage(part, 1, 3, torch.device("cpu"), torch.float32, dist.group.WORLD)
        stage.has_backward, stage.shapes = True, [(1, 3, 4), (1, 5, 4)]
        stage._inference_mode = InferenceMode.STATIC  # as a schedule does, which gives an example
        stage._prepare_forward_infra(2, (), {}, has_backward=True)
        stage._prepare_backward_infra(2)
        for number, shape in enumerate(stage.shapes):
            received = [*stage.get_fwd_recv_ops(number), *stage.get_bwd_recv_ops(number)]
            assert [tuple(operation.tensor.shape) for operation in received] == [shape, shape]
    finally:
        dist.destroy_process_group()


def test_a_new_argument_and_a_renamed_one_are_found():
    def old(self, model, cache=None): ...  # fmt: skip
    def longer(self, model, cache=None, more=None): ...  # fmt: skip
    def renamed(self, model, past=None): ...  # fmt: skip
    def keyword(self, model, cache=None, *, more): ...  # fmt: skip

    assert takes(old, old) == "" == takes(longer, old) and takes(lambda *args, **options: None, keyword) == ""
    assert "too many" in takes(old, longer) and "'cache'" in takes(renamed, old) and "'more'" in takes(old, keyword)
    assert takes(lambda self, past: None, lambda self, cache: None) == ""
    assert "'past'" in takes(lambda self, past: None, lambda self, cache: None, by_name=True)
