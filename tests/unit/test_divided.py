"""Parameters put together from the parts that the ranks of a tensor group wrote."""

import pytest
import torch

from brigade.train.checkpoint.states import WEIGHT, Divided, States

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
