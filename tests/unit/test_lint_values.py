"""What lint says of the values of keys, in files of well-known projects too."""

import copy

import pytest
import yaml

from brigade.train.strategy import deepspeed_config
from brigade.train.strategy.ds_keys import key_table
from testing.lint_files import ZERO3, fsdp, names
from testing.ranks import REPOSITORY as ROOT
from testing.strategies import changed

VARIANTS = yaml.safe_load((ROOT / "tests/unit/lint/zero3_variants.yaml").read_text())


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_difference_of_a_well_known_file_is_explained(check, variant):
    config = copy.deepcopy(ZERO3)
    for key, value in VARIANTS[variant]["differences"].items():
        (config if key == "zero_allow_untested_optimizer" else config["zero_optimization"])[key] = value
    found = check({"ds.json": config}).findings
    assert len(found) <= 3 and {finding.severity for finding in found} == {"note"}
    text = " ".join(finding.problem for finding in found)
    for key, word in VARIANTS[variant]["explained"].items():
        assert key in text.replace("stage3_", "") and word in text, (key, text)


@pytest.mark.parametrize("path", key_table()["meanings"])
def test_every_value_of_an_explained_key_is_spoken_of_once(check, path):
    for stage in (1, 2, 3):
        for value in (True, False) if key_table()["allowed"][path]["type"] == "bool" else (0, 5, 1e9, 10**12):
            zero, key = {"stage": stage}, path.rpartition(".")[2]
            zero |= {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
            found = check({"ds.json": changed(path, value, {**ZERO3, "zero_optimization": zero})}).findings
            assert len(found) == 1 and key in found[0].problem and not found[0].problem.endswith(": "), (stage, value)


def test_a_timer_that_waits_for_the_device_is_warned_of(check):
    report = check({"ds.json": {**ZERO3, "wall_clock_breakdown": True, "timers": {"throughput": {"enabled": True}}}})
    (found,) = (finding for finding in report.findings if finding.rule == "ds-timers")
    assert found.severity == "warning" and "each micro-step" in found.problem and "each forward pass" in found.problem


# Files as axolotl and LLaVA have them, the two keys of the recipe's numbers aside: sound, with at most two lines of notes.
FP16 = {
    "enabled": "auto",
    "auto_cast": False,
    "loss_scale": 0,
    "initial_scale_power": 32,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
OWNED = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
AUTO = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
)
SOUND = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, **AUTO}


@pytest.mark.parametrize("zero, top", [
    (
        {
            "sub_group_size": 0,
            "max_live_parameters": 0,
            "max_reuse_distance": 0,
            "gather_16bit_weights_on_model_save": True,
        },
        {"gradient_clipping": "auto", "wall_clock_breakdown": False},
    ),
    (
        {
            "sub_group_size": 1e9,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        {"steps_per_print": 1e5},
    ),
])  # fmt: skip
def test_files_of_well_known_projects_are_sound(check, load, zero, top):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        settings = load()
    config = {"zero_optimization": SOUND | zero, "bf16": {"enabled": "auto"}, "fp16": FP16, **OWNED, **top}
    report = check({"ds.json": config})
    assert len(report.findings) <= 2 and set(report.counts()) == {"note"}
    taken = deepspeed_config.check(config, "ds.json", settings)
    assert taken["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True


@pytest.mark.parametrize("key, value, found", [
    ("num_processes", "2", True), ("num_processes", 0, True), ("num_processes", 2.5, True), ("num_machines", "1", True),
    ("machine_rank", "0", True), ("num_processes", -1, False), ("num_processes", None, False),
], ids=str)  # fmt: skip
def test_a_count_that_accelerate_cannot_read_is_an_error(check, key, value, found):
    """It ends with a TypeError on text, and starts one process for 0; lint took both for a count that is not there."""
    report = check({"a.yaml": {"distributed_type": "MULTI_GPU", "num_processes": 2} | {key: value}})
    assert names(report) == ({"accelerate-not-a-number"} if found else set())


@pytest.mark.parametrize("sizes, said", [
    ({"tp_size": 8}, "tp_size 8 does not divide num_processes 4"), ({"tp_size": 2}, ""), ({"dp_shard_size": 4}, ""),
    ({"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2}, "2 x dp_shard_size 2 x tp_size 2 is not num_processes 4"),
    ({"dp_replicate_size": 2, "sp_size": 2}, ""), ({"dp_shard_size": 2}, "dp_shard_size 2 is not num_processes 4"),
], ids=str)  # fmt: skip
def test_a_mesh_has_as_many_places_as_there_are_processes(check, sizes, said):
    mesh = fsdp({f"parallelism_config_{key}": size for key, size in sizes.items()}) | {"num_processes": 4}
    problems = [finding.problem for finding in check({"a.yaml": mesh}).findings if finding.rule == "accelerate-mesh"]
    assert [said in problem for problem in problems] == [True] * bool(said)


@pytest.mark.parametrize("value, found", [
    ('"x y"', True), ("'x'", True), ("plain # a comment", True), ("x y", False), ("b=c", False), ("a#b", False),
])  # fmt: skip
def test_what_deepspeeds_launcher_makes_of_a_value_is_told(check, value, found):
    assert names(check({".deepspeed_env": f"A={value}\n"})) == ({"env-value"} if found else set())
