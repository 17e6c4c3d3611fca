"""Adapters in a run's directory that another has changed: PEFT would build and import what their adapter_config.json says."""

import json
import shutil

import pytest

from brigade.train.model import adapters
from brigade.train.model.load import load_base, weights
from brigade.train.model.load_trained import load_trained
from brigade.train.model.location import load_config
from brigade.train.model.sizes import half_or_full

FILE, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
STRANGE = {  # what is changed, and what the error names
    "another kind, with a tokenizer's own code": (
        {"peft_type": "PROMPT_TUNING", "prompt_tuning_init": "TEXT", "tokenizer_kwargs": {"trust_remote_code": True}},
        "peft_type",
    ),
    "no kind": ({"peft_type": None}, "peft_type"),
    "a kind that is no text": ({"peft_type": [1]}, "peft_type"),
    "a module to import": ({"megatron_config": {"a": 1}, "megatron_core": "loss"}, "megatron_config"),
    "another scale": ({"lora_alpha": 999}, "999.0, but the run had 32"),
    "a rank without end": ({"r": 10**9}, "1000000000, but the run had 16"),
    "a rank that is none": ({"r": "8 "}, "r"),
    "another method": ({"use_dora": True}, "use_dora"),
    "ranks by a pattern": ({"rank_pattern": {".*": 1}}, "rank_pattern"),
    "a pattern of targets": ({"target_modules": "(m*)*(o*)*x"}, "no list of names"),
    "layers without end": ({"layer_replication": [[0, 10**6]]}, "layer_replication"),
    "another start": ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    "targets that are not there": ({"target_modules": ["nothing"]}, "do not fit their base"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """saved(settings): a directory with adapters as a run of these settings leaves them."""
    folder = tmp_path_factory.mktemp("saved")

    def save(settings):
        if not (folder / FILE).exists():
            source = weights(settings, load_config(settings))
            base = load_base(settings, source, half_or_full(settings))
            adapters.wrap(base, settings, source).save_pretrained(folder)
        return folder

    return save


@pytest.fixture
def settings(load):
    return load("--from_scratch", "true", "--use_peft", "true", "--max_length", "1024")


@pytest.mark.parametrize("change, says", STRANGE.values(), ids=STRANGE)
def test_adapters_of_another_kind_than_the_runs_are_refused(saved, settings, tmp_path, mistake, change, says):
    folder = shutil.copytree(saved(settings), tmp_path / "run")
    document = json.loads((folder / FILE).read_text()) | change
    (folder / FILE).write_text(json.dumps(document))
    assert says in mistake(lambda: load_trained(settings, folder))


def test_adapters_as_the_run_left_them_are_loaded_and_damaged_ones_refused(saved, settings, tmp_path, mistake):
    folder = shutil.copytree(saved(settings), tmp_path / "run")
    assert load_trained(settings, folder).peft_config["default"].r == 16
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-64])
    assert "damaged" in mistake(lambda: load_trained(settings, folder))
