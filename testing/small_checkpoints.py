"""Small checkpoints of each engine for one rank, and an object that would run code where it is loaded."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

RUN = SimpleNamespace(
    replica=SimpleNamespace(size=1, rank=0, local_size=1, local_rank=0), strategy=SimpleNamespace(writes_in_parts=True)
)
OPTIM, MODEL = "zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"
WEIGHTS, MOMENTS = "pytorch_model_fsdp_0", "optimizer_0"


class Forged:
    """An object whose pickle makes a directory where it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def save_whole(folder: Path) -> None:
    """As one process has it."""
    folder.mkdir()
    save_file({"weight": torch.ones(4)}, folder / "model.safetensors")
    moments = {0: {"exp_avg": torch.zeros(4), "step": torch.tensor(2.0)}}
    torch.save({"state": moments, "param_groups": [{"params": [0]}]}, folder / "optimizer.pt")


def save_zero3(folder: Path, **kept: Any) -> None:
    """As DeepSpeed lays it out. kept: what its optimizer's states have besides, objects of its own classes among it"""
    (tag := folder / "global_step2").mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    moments = {"state": {0: {"exp_avg": torch.zeros(4)}}}
    states = {
        "zero_stage": 3,
        "partition_count": 1,
        "fp32_flat_groups": [torch.ones(4)],
        "optimizer_state_dict": moments,
    }
    torch.save({"optimizer_state_dict": states | kept}, tag / OPTIM)
    model = {"param_shapes": [{"weight": torch.Size([4])}], "buffer_names": [], "module": {}, "shared_params": {}}
    torch.save(model | {"ds_version": "0.19.8"}, tag / MODEL)


def save_fsdp2(folder: Path, **besides: Any) -> None:
    """besides: what lies beside the weights"""
    moments = {"state": {"weight": {"exp_avg": torch.zeros(4), "step": torch.tensor(2.0)}}}
    for name, state in ((WEIGHTS, {"model": {"weight": torch.ones(4)} | besides}), (MOMENTS, {"optimizer": moments})):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / name), no_dist=True)


SAVE = {"one process": save_whole, "ZeRO-3": save_zero3, "FSDP2": save_fsdp2}
