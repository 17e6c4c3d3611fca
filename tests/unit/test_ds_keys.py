"""brigade/train/strategy/ds_keys.yaml equals what the installed DeepSpeed knows, and its judge says what DeepSpeed's models say.

DeepSpeed ignores an unknown top-level key without a word, so its own code is the only list there is: typed blocks are read from
their pydantic models, and for all other keys a dict that notes what it is asked for goes through DeepSpeedConfig.
"""

import dataclasses
import enum
import inspect
import json
import re
import typing
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.inference.config import WeightQuantConfig
from deepspeed.module_inject.auto_ep_presets.base import AutoEPConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime.config import (
    _REMOVED_TOP_LEVEL_CONFIG_KEYS,
    _REMOVED_ZERO_CONFIG_KEYS,
    DEEPSPEED_OPTIMIZERS,
    DeepSpeedConfig,
    HybridEngineConfig,
)
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPConfig, TPTrainingConfig
from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from hypothesis import example, given
from hypothesis import strategies as st

from brigade.train.strategy.deepspeed_config import judge
from testing.ds_keys import ALLOWED, DEPRECATED, OWNED, REMOVED, TABLE
from testing.strategies import changed

LIMITS = ("gt", "ge", "lt", "le")

MODELS = {
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.zenflow": ZenFlowConfig,
    "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
    "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
    "hybrid_engine": HybridEngineConfig,
    "compile": CompileConfig,
    "comms_logger": CommsLoggerConfig,
    "tensorboard": TensorBoardConfig,
    "wandb": WandbConfig,
    "csv_monitor": CSVConfig,
    "comet": CometConfig,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
    "tensor_parallel": TPTrainingConfig,
    "tensor_parallel.tp": TPConfig,
    "weight_quantization": WeightQuantConfig,
}
# blocks that DeepSpeed reads key by key, and keys that it reads outside DeepSpeedConfig, with the place
ASKED_BLOCKS = ("optimizer", "scheduler", "torch_autocast", "data_types", "checkpoint", "checkpoint.writer",
                "checkpoint.parallel_write", "aio", "flops_profiler", "activation_checkpointing", "autotuning", "timers",
                "data_efficiency")  # fmt: skip
ELSEWHERE = {
    "sequence_parallel_size",  # deepspeed/runtime/config.py, once a process group is up
    "data_parallel_size",  # deepspeed/__init__.py, the device mesh
    "inference",  # transformers/integrations/deepspeed.py
}


def children(block):
    return {path for path in ALLOWED if path.rpartition(".")[0] == block}


def nested(path, value):
    """nested("a.b", 1) is {"a": {"b": 1}}."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def test_table_is_for_the_installed_deepspeed():
    assert TABLE["deepspeed"] == version("deepspeed")


def test_every_entry_has_its_fields():
    for path, entry in ALLOWED.items():
        assert "what" in entry and ("default" in entry or entry.get("block")), path
        more = {"type", "any_case", "stages", "by_stage", "here", "no_effect", *LIMITS}
        assert set(entry) <= {"what", "default", "block", "free", "also", "auto"} | more, path
        assert entry.get("auto") in (None, "huggingface", "brigade"), path
        parent = path.rpartition(".")[0]
        assert not parent or ALLOWED[parent].get("block"), f"{path}: {parent} is not a block"
    for path, entry in REMOVED.items():
        assert set(entry) == {"since", "status", "use", "issue"}, path
        assert path not in ALLOWED, path


@pytest.mark.parametrize("block", MODELS)
def test_typed_block_has_the_fields_of_its_model(block):
    fields = {field.alias or name: (name, field) for name, field in MODELS[block].model_fields.items()}
    dropped = {path.rpartition(".")[2] for path in [*REMOVED, *DEPRECATED] if path.rpartition(".")[0] == block}
    assert ALLOWED[block]["block"] == "model"
    assert {path.rpartition(".")[2] for path in children(block)} == set(fields) - dropped
    for key, (name, field) in fields.items():
        entry = ALLOWED.get(f"{block}.{key}")
        if entry is None:
            continue
        assert entry.get("also") == (name if name != key else None), key
        if entry.get("block"):
            continue
        default = field.get_default(call_default_factory=True)
        if isinstance(default, enum.Enum):
            default = default.value
        assert entry["default"] == (str(default) if isinstance(default, torch.dtype) else default), key
        limits = {limit: getattr(m, limit) for m in field.metadata for limit in LIMITS if hasattr(m, limit)}
        if f"{block}.{key}" not in BY_VALIDATOR:
            assert {limit: entry[limit] for limit in LIMITS if limit in entry} == limits, key
            assert entry.get("type") == type_of(field.annotation) or entry.get("free"), key


# What a validator of the model narrows, or ours does: test_our_judge_says_what_deepspeeds_models_say holds these too.
BY_VALIDATOR = {
    "zero_optimization.stage",
    "zero_optimization.zenflow.select_strategy",
    "zero_optimization.zenflow.update_interval",
    "fp16.loss_scale",
    "fp16.loss_scale_window",
    "fp16.min_loss_scale",
}


def type_of(annotation):
    """An annotation of DeepSpeed's as the table writes it; None where only Python code can give a value."""
    options = [option for option in typing.get_args(annotation) if option is not type(None)]
    if typing.get_origin(annotation) is typing.Union:
        return "interval" if options == [str, int] else type_of(options[0])
    if typing.get_origin(annotation) is typing.Literal:
        return options
    if typing.get_origin(annotation) is list:
        return "strings" if options == [str] else None
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return [member.value for member in annotation]
    names = {bool: "bool", int: "int", float: "float", str: "str", Path: "path", list: "list"}
    return names.get(annotation)


def test_expert_parallel_has_the_fields_of_its_dataclass():
    fields = {field.name: field.default for field in dataclasses.fields(AutoEPConfig) if not field.name.startswith("_")}
    assert children("expert_parallel") == {f"expert_parallel.{name}" for name in fields}
    for name, default in fields.items():
        if isinstance(default, (bool, int, float, str, type(None))):  # "not given" is an object of its own
            assert ALLOWED[f"expert_parallel.{name}"]["default"] == default, name


class Asked(dict):
    """A config that notes every dotted path it is asked for, and the default given with `get`."""

    def __init__(self, content=(), prefix="", log=None):
        super().__init__(content)
        self.prefix, self.log = prefix, {} if log is None else log

    def __contains__(self, key):
        self.log.setdefault(self.prefix + key, None)
        return super().__contains__(key)

    def get(self, key, default=None):
        self.log[self.prefix + key] = default
        return super().get(key, default)

    def __getitem__(self, key):
        self.log.setdefault(self.prefix + key, None)
        return super().__getitem__(key)

    def keys(self):
        return self

    def __copy__(self):
        return Asked(dict(self.items()), self.prefix, self.log)


def asked_by_deepspeed():
    config = Asked()
    for block in ASKED_BLOCKS:
        parent = config
        *parents, key = block.split(".")
        for name in parents:
            parent = dict.__getitem__(parent, name)
        dict.__setitem__(parent, key, Asked(prefix=f"{block}.", log=config.log))
    for block in ("optimizer", "scheduler"):  # their other keys are read only where a type is given
        dict.__setitem__(dict.__getitem__(config, block), "type", "AdamW")
    dict.__setitem__(config, "train_micro_batch_size_per_gpu", 1)
    DeepSpeedConfig(config)
    return config.log


def test_every_key_that_deepspeed_asks_for_is_in_the_table_and_no_other():
    asked = asked_by_deepspeed()
    free = tuple(f"{path}." for path, entry in ALLOWED.items() if entry.get("free"))
    assert [path for path in asked if path not in {*ALLOWED, *REMOVED, *DEPRECATED} and not path.startswith(free)] == []
    typed = tuple(f"{block}." for block in (*MODELS, "expert_parallel", "pipeline"))
    assert {path for path in ALLOWED if path not in asked and not path.startswith(typed)} == ELSEWHERE
    for path, default in asked.items():
        entry = ALLOWED.get(path, {})
        if default is not None and "default" in entry and not entry.get("free"):
            assert entry["default"] == default, path


def test_pipeline_defaults():
    pipeline = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1}).pipeline
    table = {path.partition(".")[2]: ALLOWED[path]["default"] for path in children("pipeline")}
    for ours in ("schedule", "virtual_stages"):
        del table[ours]
    assert table == {**pipeline, "use_reentrant": True}  # the last one from deepspeed/runtime/pipe/engine.py


def test_reject_lists_of_deepspeed_are_all_here():
    ours = {path for path, entry in REMOVED.items() if entry["since"] != "older"}
    assert ours == {*_REMOVED_TOP_LEVEL_CONFIG_KEYS, *(f"zero_optimization.{key}" for key in _REMOVED_ZERO_CONFIG_KEYS)}


def as_text(config):
    """All that DeepSpeedConfig understood, without addresses of objects and keys that it has read as others."""
    aside = "0x[0-9a-f]+|" + "|".join(rf"\b{path.rpartition('.')[2]}=\w+ ?" for path in DEPRECATED)
    return {name: re.sub(aside, "", str(value)) for name, value in vars(config).items() if name != "_param_dict"}


@pytest.mark.parametrize("path", REMOVED)
def test_removed_key_fares_as_the_table_says(path, monkeypatch):
    status = REMOVED[path]["status"]
    config = {"train_micro_batch_size_per_gpu": 1, **nested(path, {} if path == "bfloat16" else True)}
    if path.startswith("optimizer."):
        config["optimizer"]["type"] = "AdamW"
    warnings = []
    monkeypatch.setattr("deepspeed.runtime.config_utils.logger.warning", lambda text, *_, **__: warnings.append(text))
    if status == "rejected":
        # its own DeepSpeedConfigError for the lists, pydantic's ValidationError ("Extra inputs are not permitted") for the rest
        with pytest.raises(Exception, match=r"removed|no longer supported|not permitted"):
            DeepSpeedConfig(config)
        return
    read = DeepSpeedConfig(config)
    key = path.rpartition(".")[2]
    if status == "deprecated" and path != "bfloat16":
        assert any(key in text for text in warnings), warnings
    elif status == "engine":
        assert f"zero_{key}()" in inspect.getsource(DeepSpeedEngine._configure_zero_optimizer)
    elif status == "ignored":
        assert as_text(read) == as_text(DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1}))


# ---- the same verdict --------------------------------------------------------------------------------------------
# Python code alone gives values to the keys without a type; parallelism is refused whole, whatever stands in it.
JUDGED = [
    path
    for path, entry in {**ALLOWED, **DEPRECATED}.items()
    if "type" in entry and path.rpartition(".")[0] in MODELS and not path.startswith("tensor_parallel")
]
SPELLINGS = {
    path: [path, f"{path.rpartition('.')[0]}.{entry['also']}"] for path, entry in ALLOWED.items() if "also" in entry
}
VALUES = st.one_of(
    st.none() | st.booleans() | st.integers(-2, 3) | st.integers() | st.floats(),
    st.text(max_size=3) | st.lists(st.text(max_size=2), max_size=2),
    st.sampled_from([1e9, 0.5, 1.0, {}, {"a": 1}]),
    st.sampled_from(
        ["1", " 1 ", "1.5", "1e3", "1_0", "true", "yes", "off", "yes please", "gpu", "cpu", "nvme", "step"]
    ),
)


def values_of(path):
    wanted = ALLOWED.get(path, {}).get("type")
    return VALUES | st.sampled_from(wanted) if isinstance(wanted, list) else VALUES


SETTINGS = st.sampled_from(JUDGED).flatmap(
    lambda path: st.tuples(st.sampled_from(SPELLINGS.get(path, [path])), values_of(path))
)


@given(st.lists(SETTINGS, min_size=1, max_size=3), st.sampled_from([1, 2, 3]))
@example([("zero_optimization.max_live_parameters", 1), ("zero_optimization.stage3_max_live_parameters", 1)], 3)
@example([("fp16.enabled", True), ("bf16.enabled", True)], 2)
@example([("zero_optimization.offload_optimizer.ratio", 0.5)], 2)
@example([("fp16.enabled", True), ("fp16.loss_scale_window", 0)], 2)
@example([("zero_optimization.offload_optimizer.device", "gpu")], 2)
@example([("zero_optimization.reduce_bucket_size", "5e8")], 2)
@example([("zero_optimization.overlap_comm", "yes please")], 2)
@example([("zero_optimization.cpu_offload", True)], 2)
@example([("zero_optimization.cpu_offload_param", True), ("zero_optimization.cpu_offload_use_pin_memory", True)], 3)
@example([("zero_optimization.stage3_gather_fp16_weights_on_model_save", "yes")], 3)
@example([("zero_optimization.cpu_offload", True), ("zero_optimization.offload_optimizer.device", "cpu")], 3)
@example([("bf16", None), ("bfloat16", {"enabled": True})], 3)
@example([("bf16", None), ("zero_optimization.offload_param", None), ("zero_optimization.leaf_module", None)], 3)
@example([("zero_optimization.zenflow.select_interval", "5")], 2)
@example([("weight_quantization.num_bits", False)], 1)
def test_our_judge_says_what_deepspeeds_models_say(settings, stage):
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": False}, "fp16": {"enabled": False}}
    config["zero_optimization"] = {"stage": stage}
    for path, value in settings:
        config = changed(path, value, config)
    ours, found = judge(json.loads(json.dumps(config)), "f")
    errors = [finding for finding in found if finding.severity == "error" and finding.rule not in STRICTER]
    try:
        theirs = as_text(DeepSpeedConfig(config))
    except Exception as error:
        assert errors, error
    else:
        assert not errors
        assert as_text(DeepSpeedConfig(ours)) == theirs  # what is handed on means the same


# Refused though DeepSpeed takes it: it would do nothing (offload_param below stage 3, what only inference reads), crash later
# (nvme without a path), or let a gradient that is NaN change weights.
STRICTER = {"ds-offload-stage", "ds-nvme-path", "ds-auto-not-filled", "ds-unsound", "ds-unread"}


@pytest.mark.parametrize("name", TABLE["removed_optimizers"])
def test_removed_optimizer_is_unknown(name):
    assert name.lower() not in DEEPSPEED_OPTIMIZERS and not hasattr(torch.optim, name)


def test_auto_is_filled_by_hugging_face_where_the_table_says_so():
    source = (
        Path(find_spec("transformers").origin).parent / "integrations/deepspeed.py"
    )  # read, not imported: that takes seconds
    filled = set(re.findall(r'self\.fill_(?:match|only)\(\s*"([^"]+)"', source.read_text()))
    assert filled, "transformers fills its autos in another way now"
    params = {path for path in filled if ".params." in path}
    assert params - {"scheduler.params.warmup_min_lr"} <= set(OWNED)  # that one is always 0
    assert filled - params == {path for path, entry in ALLOWED.items() if entry.get("auto") == "huggingface"}


def test_owned_keys_are_allowed():
    for path in OWNED:
        assert path in ALLOWED or ALLOWED[path.rpartition(".")[0]].get("free"), path
