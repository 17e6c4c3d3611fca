"""PowerSGD's memory in checkpoints, and what ddp_comm_hook is refused with."""

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from brigade.train.engines import ddp_engine
from brigade.train.host.cluster import World
from brigade.train.strategy import choose


def world(rank, size):
    return World(rank, rank, size, size, "here", "torchrun")


def state(*errors):
    made = PowerSGDState(None, start_powerSGD_iter=2)
    made.error_dict = {bucket: torch.tensor(error) for bucket, error in enumerate(errors)}
    made.p_memory_dict, made.q_memory_dict, made.iter = {0: torch.ones(2)}, {0: torch.zeros(3)}, 7
    return made


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of two ranks."""
    (tmp_path / "checkpoint-3").mkdir()
    for rank, made in enumerate((state([1.0, 2.0], [4.0]), state([3.0, 0.0], [8.0]))):
        ddp_engine.save(made, tmp_path / "checkpoint-3", world(rank, 2))
    return tmp_path / "checkpoint-3"


def test_each_rank_gets_its_own_memory_back(folder):
    for rank, error in enumerate(([1.0, 2.0], [3.0, 0.0])):
        again = PowerSGDState(None, start_powerSGD_iter=2)
        ddp_engine.restore(again, folder, world(rank, 2))
        assert again.error_dict[0].tolist() == error
        assert again.iter == 7 and again.q_memory_dict[0].tolist() == [0, 0, 0] and again.p_memory_dict[0].numel() == 2


def test_another_number_of_ranks_gets_the_mean_error(folder):
    for rank in range(3):
        again = PowerSGDState(None, start_powerSGD_iter=2)
        ddp_engine.restore(again, folder, world(rank, 3))
        assert {bucket: error.tolist() for bucket, error in again.error_dict.items()} == {0: [2.0, 1.0], 1: [6.0]}


def test_a_missing_ranks_error_is_told(folder, mistake):
    (folder / "power_sgd_1_of_2.pt").unlink()
    message = mistake(ddp_engine.restore, PowerSGDState(None, start_powerSGD_iter=2), folder, world(1, 2))
    assert "1 rank," in message and "saved by 2" in message


def test_a_checkpoint_of_one_process_has_no_memory_to_give(tmp_path):
    again = PowerSGDState(None, start_powerSGD_iter=2)
    ddp_engine.restore(again, tmp_path, world(0, 2))
    assert again.iter == 0 and not again.error_dict


@pytest.mark.parametrize(
    "config", ["ds_configs/zero1.json", "ds_configs/zero3.json", "accelerate_configs/fsdp2_1x2.yaml"]
)
@pytest.mark.parametrize("hook", ["fp16", "bf16", "power_sgd"])
def test_only_ddp_takes_a_hook(load, mistake, config, hook):
    flag = "--ds_config" if config.endswith("json") else "--accelerate_config"
    settings = load(flag, config, "--ddp_comm_hook", hook)
    message = mistake(choose, settings, world(0, 2), {})
    assert "flag --ddp_comm_hook" in message and "--ds_config none" in message


@pytest.mark.parametrize("hook", ["none", "fp16", "bf16", "power_sgd"])
@pytest.mark.parametrize("size", [1, 2])
def test_ddp_and_one_process_take_all(load, hook, size):
    assert choose(load("--ddp_comm_hook", hook), world(0, size), {}).kind == ("ddp" if size == 2 else "single")


def test_power_sgd_and_loss_scaling_exclude_each_other(load, mistake):
    message = mistake(choose, load("--ddp_comm_hook", "power_sgd", "--fp16"), world(0, 2), {})
    assert "power_sgd" in message and "bf16" in message
