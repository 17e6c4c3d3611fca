"""Buffers are sent to FSDP2's ranks beside the weights, also those of a layer that checkpointing wraps."""

import torch
from accelerate.utils import fsdp_utils
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from brigade.train.upstream import fsdp2


def test_buffers_are_sent_whole(monkeypatch):
    class Accelerator:
        device, is_main_process = torch.device("cpu"), True

    seen = {}
    monkeypatch.setattr(
        fsdp_utils, "fsdp2_load_full_state_dict", lambda _, model, full: seen.update(model.state_dict())
    )
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *_, **__: None)
    fsdp2.send_buffers_with_weights()
    layer = torch.nn.Linear(2, 2, bias=False)
    layer.register_buffer("scale", torch.zeros(1))
    model = torch.nn.Sequential(checkpoint_wrapper(layer))
    fsdp_utils.fsdp2_load_full_state_dict(Accelerator, model, {"0.weight": layer.weight, "0.scale": torch.ones(1)})
    assert seen.keys() == {"0.weight"}  # the rest are taken for shards
    assert layer.scale == 1 and model.state_dict().keys() == {"0.weight", "0.scale"}
