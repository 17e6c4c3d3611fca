"""What a ds_config may not decide beside the recipe: the optimizer and its states, the dtype of sums, the NVMe disk."""

import pytest

from brigade.train.strategy import deepspeed_config


@pytest.mark.parametrize("stage, offload, said", [
    (3, {"ratio": 0.5}, "its first learning rate"), (3, {"super_offload": True}, "no checkpoint"),
    (2, {"ratio": 1}, ""), (3, {"ratio": 1.0, "super_offload": False}, ""), (3, {"device": "none", "ratio": 0.5}, ""),
])  # fmt: skip
def test_states_are_offloaded_whole_and_in_the_ranks_process(pick_config, mistake, stage, offload, said):
    config = {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"} | offload}}
    if not said:
        assert pick_config(config).is_deepspeed
        return
    message = mistake(pick_config, config)
    assert f"ds.json: zero_optimization.offload_optimizer.{next(iter(offload))}" in message and said in message


@pytest.mark.parametrize("stage, dtype, training, offload, refused", [
    (1, "fp32", {"bf16": True}, {}, True), (1, "torch.float32", {"bf16": True}, {"device": "none"}, True),
    (1, "fp32", {"bf16": True}, {"device": "cpu"}, False), (2, "fp32", {"bf16": True}, {}, False),
    (3, "float", {"bf16": True}, {}, False), (1, "bf16", {"bf16": True}, {}, False),
    (1, "fp32", {}, {}, False), (1, "fp32", {"fp16": True}, {}, False),
])  # fmt: skip
def test_no_gradients_in_fp32_where_deepspeed_would_take_an_optimizer_of_another_form(
    pick_config, mistake, stage, dtype, training, offload, refused
):
    config = {
        "zero_optimization": {"stage": stage, "offload_optimizer": offload},
        "data_types": {"grad_accum_dtype": dtype},
    }
    if not refused:
        assert pick_config(config, training=training).is_deepspeed
        return
    message = mistake(pick_config, config, training=training)
    assert "ds.json: data_types.grad_accum_dtype" in message and dtype in message and "remove the line" in message


def test_no_file_puts_adam_in_the_place_of_the_recipes_optimizer(pick_config, mistake):
    def config(offload, force=True):
        return {"zero_optimization": {"stage": 2, "offload_optimizer": offload}, "zero_force_ds_cpu_optimizer": force}

    for optim in ("sgd", "muon", "lion_8bit", "adamw_8bit", "paged_adamw_32bit"):
        message = mistake(pick_config, config({"device": "cpu"}), training={"optim": optim})
        assert "ds.json: zero_force_ds_cpu_optimizer" in message and optim in message and "remove the line" in message
    for optim, said in [
        ("adamw_torch", config({"device": "cpu"})), ("adamw_torch_fused", config({"device": "cpu"})),
        ("sgd", config({"device": "cpu"}, False)), ("sgd", config({"device": "none"})), ("sgd", config({})),
    ]:  # fmt: skip
        assert pick_config(said, training={"optim": optim}).is_deepspeed


@pytest.mark.parametrize("block", ["offload_param", "offload_optimizer"])
def test_one_path_to_the_nvme_disk(pick_config, mistake, block):
    def config(path, device="nvme"):
        return {"zero_optimization": {"stage": 3, block: {"device": device, "nvme_path": path}}}

    for recipe in ({"nvme_path": "/fast"}, {}):
        flags = [] if recipe else ["--nvme_path", "/fast"]
        message = mistake(pick_config, config("/local"), flags=flags, cluster=recipe)
        assert f"ds.json: zero_optimization.{block}.nvme_path" in message and "/local" in message and "/fast" in message
        for said in (config("auto"), config("/fast"), config("/fast/")):
            assert pick_config(said, flags=flags, cluster=recipe).is_deepspeed
    assert pick_config(config("/local")).is_deepspeed
    assert pick_config(config("/local", "cpu"), cluster={"nvme_path": "/fast"}).is_deepspeed


@pytest.mark.parametrize("strategy", [
    ["--ds_config", "ds_configs/zero3.json"], ["--ds_config", "none"],
    ["--accelerate_config", "accelerate_configs/fsdp2_1x2.yaml"],
])  # fmt: skip
def test_a_path_to_the_nvme_disk_that_nothing_swaps_to(pick, mistake, strategy):
    message = mistake(pick, *strategy, "--nvme_path", "/fast")
    assert "flag --nvme_path" in message and "/fast" in message and "zero3_nvme.json" in message
    assert pick(*strategy, cluster={"nvme_path": "/fast"})  # a recipe's is for the strategies that do swap
    assert pick("--ds_config", "ds_configs/zero3_nvme.json", "--nvme_path", "/fast").is_deepspeed


@pytest.mark.parametrize("optim, kept", [("adamw_torch", False), ("adamw_torch_fused", False), ("sgd", True),
                                         ("adamw_8bit", True), ("paged_adamw_8bit", True)])  # fmt: skip
def test_offload_keeps_an_optimizer_that_is_not_torchs_adamw(optim, kept, tmp_path):
    filled = deepspeed_config.fill(
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, 2, tmp_path, optim
    )
    assert ("zero_force_ds_cpu_optimizer" in filled) is kept and not filled.get("zero_force_ds_cpu_optimizer", False)
