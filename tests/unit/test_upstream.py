"""Names of other packages: that the pinned versions have them, and that private ones are touched in upstream/ alone.

A row that fails after an upgrade names the file to look at; brigade/train/upstream/ says what each name is for.
"""

import ast
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path

import pytest
import torch.distributed
import transformers

from brigade.train import upstream
from brigade.train.step.pipeline_trainer import PipelineTrainer
from brigade.train.upstream import peft_layers
from brigade.train.upstream.trainer import HookedTrainer
from testing import upstream_names
from testing.command_line import run_here

ROOT = Path(__file__).resolve().parents[2]
UPSTREAM = ROOT / "brigade/train/upstream"
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes")
# Where the pinned versions define what upstream/ touches and does not import: private names, and public ones that no
# documentation promises. What it imports is looked for by testing.upstream_names.
DEFINED = {
    "torch/optim/adam.py": (
        "_foreach_addcmul_, _foreach_sqrt, _foreach_div_, _foreach_add_, _foreach_lerp_, _multi_tensor_adam"
    ),
    "transformers/training_args.py": "_n_gpu",
    "transformers/configuration_utils.py": "_attn_implementation",
    "transformers/modeling_utils.py": (
        "_no_split_modules, _supports_sdpa, _supports_attention_backend, _init_weights, "
        "_can_record_outputs, _gradient_checkpointing_func, _keep_in_fp32_modules_strict"
    ),
    "transformers/models/deepseek_v3/modeling_deepseek_v3.py": "e_score_correction_bias",
    "transformers/models/afmoe/modeling_afmoe.py": "expert_bias",
    "transformers/models/llama4/modeling_llama4.py": (
        "Llama4TextAttention, attn_temperature_tuning, use_rope, floor_scale, attn_scale"
    ),
    "transformers/image_processing_backends.py": "_preprocess",
    "transformers/models/bamba/modeling_bamba.py": "mamba2_split_conv1d_scan_combined",
    "transformers/utils/output_capturing.py": "target_class, layer_name",
    "transformers/models/mixtral/modeling_mixtral.py": "load_balancing_loss_func",
    "transformers/core_model_loading.py": (
        "_weight_conversions, was_used, _is_hf_initialized, HF_DEACTIVATE_ASYNC_LOAD"
    ),
    "transformers/trainer.py": (
        "_tr_loss, _globalstep_last_logged, _initial_global_step, _prepare_for_training, _prepare_inputs, "
        "_clip_grad_norm, _get_grad_norm, _load_from_checkpoint, _load_best_model, "
        "_load_optimizer_and_scheduler, _load_scaler, _save, _save_checkpoint, _save_optimizer_and_scheduler, "
        "_save_scaler, _save_rng_state"
    ),
    "transformers/distributed/mixin.py": "should_save_on_this_rank",
    "transformers/models/auto/auto_factory.py": "_model_mapping",
    "transformers/integrations/integration_utils.py": "_SummaryWriter, _init_summary_writer",
    "transformers/integrations/moe.py": "_is_expert_parallel, _apply_gate, _default_apply_gate",
    "transformers/integrations/deepspeed.py": "_hf_deepspeed_config_weak_ref",
    "accelerate/state.py": "_shared_state, _reset_state",
    "accelerate/accelerator.py": "native_amp",
    "accelerate/parallelism_config.py": "_sizes",
    "accelerate/utils/other.py": "is_deepspeed_available",
    "accelerate/utils/fsdp_utils.py": "fsdp2_load_full_state_dict",
    "peft/tuners/tuners_utils.py": ("_check_lora_target_modules_mamba, _get_embed_scale"),
    "peft/helpers.py": "import bitsandbytes as bnb",
    "peft/tuners/lora/model.py": "is_bnb_available, is_bnb_4bit_available",
    "peft/tuners/trainable_tokens/layer.py": "_collect_token_weights",
    "peft/utils/other.py": "_getattr_wrapped",
    "cpuinfo/cpuinfo.py": "get_cpu_info_json",
    "bitsandbytes/nn/modules.py": "support_avx512bf16_for_cpu",
    "deepspeed/module_inject/auto_tp.py": (
        "_create_row_parallel_layer, _ds_grad_allreduce_registered, _replace_module, _replace_with_config, "
        "update_mp_params"
    ),
    "deepspeed/module_inject/layers.py": "_partition_sizes",
    "deepspeed/module_inject/tp_plan_converter.py": "SUPPORTED_STYLES",
    "deepspeed/runtime/tensor_parallel/config.py": "_tp_plan",
    "transformers/distributed/tensor_parallel.py": "_hf_quantized_needs_local_tp",
    "deepspeed/utils/groups.py": (
        "_ZERO_PARAM_INTRA_PARALLEL_GROUP, _TENSOR_MODEL_PARALLEL_GROUP, _MODEL_PARALLEL_GROUP, _DATA_PARALLEL_GROUP"
    ),
    "deepspeed/ops/adam/cpu_adam.py": "ds_opt_adam, opt_id",
    "deepspeed/runtime/engine.py": "_get_zero_ckpt_name, _replace_module_consolidated_state_dict",
    "deepspeed/runtime/swap_tensor/optimizer_utils.py": "_get_param_swap_info, release_memory",
    "deepspeed/runtime/zero/partitioned_param_coordinator.py": (
        "__params_to_release, __submodule_order, __max_reuse_dist_in_numel, __most_recent_step_id_param_fetched_for"
    ),
    "deepspeed/runtime/zero/stage3.py": (
        "_set_fp32_optimizer_param_groups, _clear_fp32_optimizer_param_groups, _swappable_optimizer_subgroup, "
        "_reassign_or_swap_out_partitioned_parameters, fp16_partitioned_groups_flat_numel, "
        "checkpoint_event_prologue, checkpoint_event_epilogue, _get_param_partition_rank, grad_position"
    ),
    "deepspeed/runtime/zero/stage_1_and_2.py": "_link_all_hp_params, update_lp_params",
    "deepspeed/utils/mixed_precision_linkage.py": "_hp_mapping",
    "torch/utils/data/dataloader.py": "_iterator, _shutdown_workers",
    "torch/include/torch/csrc/distributed/c10d/FlightRecorder.hpp": "dump_fr_trace_json",
    "torch/include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp": "dump_nccl_trace_json",
    "deepspeed/utils/z3_leaf_module.py": "_z3_leaf",
    "torch/_C/_distributed_c10d.pyi": "_set_default_timeout",
    "torch/distributed/distributed_c10d.py": "_new_process_group_helper",
    "torch/distributed/device_mesh.py": "_flatten",
    "torch/cuda/memory.py": "_record_memory_history, _dump_snapshot, _snapshot",
    "torch/nn/utils/clip_grad.py": "_foreach_norm, _foreach_mul_",
    "torch/optim/lr_scheduler.py": "_last_lr",
    "torch/autograd/graph.py": "_C, _current_graph_task_id",
    "torch/distributed/pipelining/schedules.py": "_step_microbatches",
    "torch/distributed/pipelining/stage.py": "args_recv_info, grad_recv_info, get_fwd_recv_ops, is_root_arg",
    "torch/nn/modules/module.py": "_buffers, _parameters, _non_persistent_buffers_set",
    "torch/utils/file_baton.py": "try_acquire, release",
    "torch/distributed/fsdp/_fully_shard/_fully_shard.py": "_get_fsdp_state, _fsdp_param_groups",
    "torch/distributed/fsdp/_fully_shard/_fsdp_param.py": "_unsharded_param, unsharded_accumulated_grad",
}
# torch's, outside of upstream/: each beside what it serves.
OF_TORCH = {"_orig_mod", "_set_pg_timeout", "_softmax_backward_data", "_to_copy"}
OF_GLOO = {"_Options", "_devices", "_timeout"}  # compiled
# The last is documented.
OF_PYTHON = {"_current_frames", "_exit", "_run_exitfuncs", "_actions", "_transport", "_replace"}
FILES = [ROOT / "train.py", *sorted((ROOT / "brigade").rglob("*.py"))]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """All nodes below one, walked once."""
    return list(ast.walk(tree))


@cache
def of_the_same_room(folder: Path) -> set[str]:
    """Names that the modules in this folder define."""
    return set().union(*(own(parsed(path)) for path in FILES if path.parent == folder))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def touched(tree: ast.AST) -> set[str]:
    """Private attributes that a module reads, sets, or names in getattr(); and private names that it imports from elsewhere."""
    found = {node.attr for node in nodes(tree) if isinstance(node, ast.Attribute)}
    for node in nodes(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            found |= {word.value for word in node.args[1:2] if isinstance(word, ast.Constant)}
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in PACKAGES[1:]:
            found |= {alias.name for alias in node.names} | set((node.module or "").split("."))
    return set(filter(is_private, found))


def own(tree: ast.AST) -> set[str]:
    """Names that a module of ours defines: functions, classes, variables, attributes of its own objects."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    found = {node.name for node in nodes(tree) if isinstance(node, kinds)}
    found |= {node.id for node in nodes(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    stored = (node for node in nodes(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return found | {node.attr for node in stored if getattr(node.value, "id", "") == "self"}


@pytest.mark.parametrize("file, name", [(file, name) for file, names in DEFINED.items() for name in names.split(", ")])
def test_the_pinned_versions_have_what_we_touch(file, name):
    package, _, inside = file.partition("/")
    (folder,) = importlib.util.find_spec(package).submodule_search_locations
    text = (Path(folder) / inside).read_text()
    assert re.search(rf"\b{name}\b", text), "what was it for? brigade/train/upstream/ says"


@pytest.mark.slow
def test_the_installed_versions_have_every_module_and_name_that_is_imported():
    """In a process of its own, for it imports all of them; for other versions: python -m testing.upstream_names"""
    done = run_here([sys.executable, "-m", "testing.upstream_names"], 300)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_module_or_name_that_is_gone_is_named_with_its_line_also_within_a_function():
    code = """
import torch.no_such_module
from torch import nn as layers, no_such_name
def later(model):
    from torch.nn import functional, no_such_layer
    import torch
    model.no_such_attribute, functional.relu, torch.optim.Adam.no_such_method
    return functional.no_such_function(layers.Linear), torch.optim.no_such_optimizer.more
try:
    from torch import another
except ImportError:
    another = None
"""
    found = upstream_names.missing(ast.parse(code))
    assert [(line, what.partition(" ")[0]) for line, what in sorted(found)] == [
        (2, "torch.no_such_module"),
        (3, "torch.no_such_name"),
        (5, "torch.nn.no_such_layer"),
        (8, "torch.nn.functional.no_such_function"),
        (8, "torch.optim.no_such_optimizer"),
    ]
    counts = [len(list(upstream_names.used(parsed(file)))) for file in upstream_names.files()]
    assert sum(counts) > 1_000  # it has read the files


def test_the_pinned_gloo_has_what_we_touch():
    kind = torch.distributed.ProcessGroupGloo
    assert {*dir(kind), *dir(kind._Options())} >= OF_GLOO


def test_the_experts_of_a_mixture_are_known_by_their_sign():
    """Without it a run would train as before, and log no expert_balance."""
    sizes = {"vocab_size": 32, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_hidden_layers": 2}
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**sizes, **experts))
    found = [name for name, module in model.named_modules() if upstream.are_experts(module)]
    assert found == [f"model.layers.{number}.mlp.experts" for number in range(2)]


def test_peft_imports_bitsandbytes_where_it_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / "bitsandbytes.py").write_text("nn = 'imported'\n")
    peft = peft_layers.import_peft()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(peft, "helpers", None)
    for name in ("bitsandbytes", "peft.helpers"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    with upstream.quick_imports():
        helpers = importlib.import_module("peft.helpers")
        assert importlib.util.find_spec("bitsandbytes") and not hasattr(sys.modules["bitsandbytes"], "__file__")
    model = peft.tuners.lora.model
    assert "bitsandbytes" not in sys.modules and not model.is_bnb_available() and not model.is_bnb_4bit_available()
    assert helpers.bnb.nn == "imported" and "bitsandbytes" in sys.modules
    assert model.is_bnb_available() and model.is_bnb_4bit_available()


def test_only_the_first_run_of_its_own_process_leaves_its_imports_out_of_collections():
    code = """
import gc, sys
from brigade.train import upstream
with upstream.quick_imports():
    import yaml
print(gc.get_freeze_count())
with upstream.quick_imports(for_good=True):
    import xml.dom.minidom
print(gc.get_freeze_count() > 1_000, gc.isenabled())
gc.unfreeze()
sys.modules["transformers.trainer"] = None
with upstream.quick_imports(for_good=True):
    import sqlite3
print(gc.get_freeze_count())
"""
    told = run_here([sys.executable, "-c", code], 100)
    assert told.stdout.split() == ["0", "True", "True", "0"]


def test_models_are_unwrapped_without_importing_deepspeed():
    code = """
import sys
import torch
from accelerate.utils import extract_model_from_parallel
from brigade.train import upstream
upstream.unwrap_without_importing_deepspeed()
model = torch.nn.Linear(1, 1)
assert extract_model_from_parallel(model) is model and "deepspeed" not in sys.modules
import deepspeed
assert extract_model_from_parallel(model) is model
"""
    done = run_here([sys.executable, "-c", code], 100)
    assert done.returncode == 0, done.stderr


def test_nobody_imports_peft_but_import_peft():
    """Else a run whose first import of it stands elsewhere imports bitsandbytes, too: three seconds of each rank."""
    imports = re.compile(r"^ *(from|import) peft\b(?!\.)", re.M)
    assert [path.name for path in FILES if imports.search(path.read_text())] == ["peft_layers.py"]


def test_every_private_name_of_the_upstream_room_is_looked_for_above():
    trees = [parsed(path) for path in UPSTREAM.rglob("*.py")]
    known = {name for names in DEFINED.values() for name in names.split(", ")} | OF_GLOO | OF_PYTHON
    ours = set().union(*map(own, trees)) - known
    assert set().union(*map(touched, trees)) - ours - OF_PYTHON <= known


def test_no_other_room_touches_a_private_name_of_another_package():
    others = [path for path in FILES if UPSTREAM not in path.parents]
    known = OF_TORCH | OF_PYTHON
    strange = {str(path): touched(parsed(path)) - of_the_same_room(path.parent) - known for path in others}
    assert not {path: names for path, names in strange.items() if names}, "move them to brigade/train/upstream/"


# Which releases an index has is data, as are versions in an example of what is printed.
OF_VERSIONS = ("brigade/train/distributed/torch_build.py", "brigade/train/checkpoint/manifest.py")


def test_comments_name_functions_of_other_packages_and_neither_lines_nor_versions_which_move_with_every_release():
    moving = re.compile(rf"\w\.py:\d+|\b(?:{'|'.join(PACKAGES)})(?:'s)?,? \d+\.\d+", re.IGNORECASE)
    found = {str(path.relative_to(ROOT)): moving.findall(path.read_text()) for path in FILES}
    assert {path: words for path, words in found.items() if words}.keys() == {*OF_VERSIONS}
    assert moving.findall("# transformers 5.23, trainer.py:12; Transformers' own") == ["transformers 5.23", "r.py:12"]


def test_our_trainer_overrides_few_methods_of_its_parent_and_private_ones_only_in_the_upstream_room():
    """A private method that its parent no longer has would be overridden without any effect."""
    kinds = [kind for kind in PipelineTrainer.__mro__ if kind.__module__.startswith("brigade.")]
    functions = {kind: {name for name, value in vars(kind).items() if callable(value)} for kind in kinds}
    parents = {name for name in dir(transformers.Trainer) if not name.startswith("__")}
    overridden = set().union(*functions.values()) & parents
    assert len(overridden) <= 13
    private = set(filter(is_private, functions[HookedTrainer]))
    assert private <= parents
    assert set(filter(is_private, overridden)) == private


def named(tree: ast.AST, owners: tuple[str, ...]) -> set[str]:
    """Attributes of these names that a piece of code reads: {"seed"} of `self.args.seed` and of `args.seed` for ("args",)."""
    attributes = (node for node in nodes(tree) if isinstance(node, ast.Attribute))
    ends = ((getattr(node.value, "attr", getattr(node.value, "id", "")), node.attr) for node in attributes)
    return {name for owner, name in ends if owner in owners}


def ignored(handed: set[str]) -> set[str]:
    """Options of TrainingArguments that Transformers' Trainer reads only where a run never comes: in methods that ours replaces,
    or that only these call; and that nothing of ours reads."""
    body = parsed(Path(transformers.trainer.__file__)).body
    (trainer,) = (node for node in body if getattr(node, "name", "") == "Trainer")
    methods = {node.name: node for node in trainer.body if isinstance(node, ast.FunctionDef)}
    ours = [parsed(path) for path in (ROOT / "brigade/train").rglob("*.py")]
    room = [kind for kind in PipelineTrainer.__mro__ if kind.__module__.startswith("brigade.")]
    own_methods = {name for kind in room for name in vars(kind)}
    called = set().union(*(named(tree, ("trainer", "self")) for tree in ours)) - own_methods
    on_super = {
        node.attr
        for tree in ours
        for node in nodes(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call)
    }
    todo, reached = [*((called | on_super | {"train"}) & set(methods))], set()
    while todo:
        method = todo.pop()
        if method not in reached:
            reached.add(method)
            todo += (named(methods[method], ("self",)) & set(methods)) - own_methods
    reads = {name: named(node, ("args",)) for name, node in methods.items()}
    alive = set().union(*(reads[name] for name in reached), *(named(tree, ("args", "arguments")) for tree in ours))
    return (handed & set().union(*reads.values())) - alive


def test_every_option_that_is_handed_to_transformers_is_read_where_a_run_comes():
    """torch_empty_cache_steps is read in training_step, which ours replaces: handed on, it would do nothing without a word."""
    options = set(transformers.TrainingArguments.__dataclass_fields__)
    assert ignored(options) >= {"torch_empty_cache_steps", "remove_unused_columns", "prediction_loss_only"}
    places = [ROOT / "brigade/train" / room for room in ("step", "engines")]
    rooms = [
        parsed(file) for place in places for file in place.glob("*.py") if re.search("arguments|engine", file.name)
    ]
    words = {node.value for tree in rooms for node in nodes(tree) if isinstance(node, ast.Constant)}
    words |= {node.arg for tree in rooms for node in nodes(tree) if isinstance(node, ast.keyword)}
    assert "seed" in words and ignored(options & words) == set()
