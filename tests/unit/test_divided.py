"""Parameters put together from the parts that the ranks of a tensor group wrote, and states that are another parameter's."""

import pytest
import torch
from safetensors.torch import save_file

from brigade.errors import UserError
from brigade.train.checkpoint.states import WEIGHT, Divided, States, of_checkpoint, telling

WHOLE = {
    "rows": torch.arange(24.0).view(6, 4),
    "columns": torch.arange(24.0, 48.0).view(6, 4),
    "norm": torch.arange(5.0),
    "bias": torch.arange(6.0),
}
DIVIDED = {"rows": 0, "columns": 1, "bias": 0}
PARTS = [WHOLE | {name: WHOLE[name].chunk(2, dim)[part] for name, dim in DIVIDED.items()} for part in range(2)]


class Part(States):
    def __init__(self, tensors):
        self.tensors = tensors
        self.sizes = {name: tensor.numel() for name, tensor in tensors.items()}

    def read(self, name, key, start, stop):
        assert 0 <= start <= stop <= self.sizes[name]
        return self.tensors[name].reshape(-1)[start:stop]


@pytest.mark.parametrize("name", WHOLE)
def test_any_range_of_the_whole_is_read_from_its_parts(name):
    shapes = ({key: tuple(tensor.shape) for key, tensor in tensors.items()} for tensors in (WHOLE, PARTS[0]))
    states = Divided([Part(part) for part in PARTS], *shapes)
    size = WHOLE[name].numel()
    assert states.sizes[name] == size
    for start in range(size):
        for stop in range(start, size + 1):  # a rank may have nothing of it
            assert torch.equal(states.read(name, WEIGHT, start, stop), WHOLE[name].reshape(-1)[start:stop])


@pytest.mark.parametrize("shape", [(4, 6), (6, 4, 1), (5, 6), (24,)])
def test_a_state_of_another_shape_than_its_weight_is_no_state_of_it(shape, tmp_path):
    """One process writes states by number. Where the order is another one, some parameters have as many elements."""
    save_file({"wide": torch.ones(6, 4), "norm": torch.ones(4)}, tmp_path / "model.safetensors")
    own = {"momentum_buffer": torch.zeros(4), "step": torch.tensor(2.0)}
    kept = {"state": {0: {"momentum_buffer": torch.zeros(shape)}, 1: own}, "param_groups": [{"params": [0, 1]}]}
    torch.save(kept, tmp_path / "optimizer.pt")
    source = of_checkpoint(tmp_path, ["wide", "norm"], {})
    assert source.moments_of("norm") == ("momentum_buffer",) and source.read("wide", WEIGHT, 0, 24).sum() == 24
    with pytest.raises(UserError) as caught, telling(tmp_path):
        source.moments_of("wide")
    assert f"momentum_buffer of wide has the shape {shape}, and the weight (6, 4)" in caught.value.problem
