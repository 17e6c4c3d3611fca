"""ds_configs/*.json keep their promise: interchangeable, no key that DeepSpeed does not know, and none that repeats a default."""

import json

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from brigade.train.strategy.axes import without
from testing.ds_keys import ALLOWED, OWNED, paths_of
from testing.ranks import REPOSITORY
from testing.shipped import shipped

DS_CONFIGS = {path.stem: json.loads(path.read_text()) for path in shipped("ds_configs/*.json")}


@pytest.mark.parametrize("name", DS_CONFIGS)
def test_ds_config(name):
    config = DS_CONFIGS[name]
    assert (REPOSITORY / f"ds_configs/{name}.json").read_text() == json.dumps(config, indent=2) + "\n", "formatting"
    assert [path for path in paths_of(config) if path not in ALLOWED] == []
    assert config["gradient_clipping"] == "auto"  # absent would mean 1.0
    zero = config["zero_optimization"]
    assert (zero["stage"] == 3) == ("stage3_gather_16bit_weights_on_model_save" in zero)


@pytest.mark.parametrize("name", DS_CONFIGS)
def test_ds_configs_are_interchangeable(name):
    strip = [
        {key: value for key, value in without(DS_CONFIGS[n]).items() if key != "zero_optimization"}
        for n in (name, "zero1")
    ]
    assert strip[0] == strip[1]


@pytest.mark.parametrize("name", DS_CONFIGS)
def test_no_ds_config_repeats_a_default(name):
    for path in paths_of(DS_CONFIGS[name]):
        value = DS_CONFIGS[name]
        for key in path.split("."):
            value = value[key]
        if value == "auto":
            assert path in OWNED or ALLOWED[path].get("auto"), f"{path}: nobody fills this auto"
        elif not isinstance(value, dict):
            assert value != ALLOWED[path]["default"], path


@pytest.mark.parametrize("name", DS_CONFIGS)
def test_deepspeed_takes_each_ds_config_once_filled(name):
    config = json.loads(json.dumps(DS_CONFIGS[name]))
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config |= dict.fromkeys(sizes, 1) | {"gradient_clipping": 1.0}
    config.update(bf16={"enabled": True}, fp16={"enabled": False})
    zero = config["zero_optimization"]
    for key, value in zero.items():
        zero[key] = 8 if value == "auto" else value
        if isinstance(value, dict) and "nvme_path" in value:
            value["nvme_path"] = "/tmp"
    assert DeepSpeedConfig(config).zero_config.stage == zero["stage"]
