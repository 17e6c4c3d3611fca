"""What ranks must hold alike, compared: by exact digests, of those that hold the same part."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from brigade.train.distributed.digests import Comparison, Held, digests, total
from brigade.train.engines.shares import in_four_bits

WEIGHT = torch.linspace(-1, 1, 24).view(4, 6)


@pytest.mark.parametrize("tensor", [
    WEIGHT,
    WEIGHT.bfloat16(),
    WEIGHT.half().flatten()[:7],
    WEIGHT.to(torch.float8_e4m3fn),
    torch.arange(13, dtype=torch.uint8),  # two weights of 4 bits in each
    torch.tensor(3.0),
    torch.tensor([True, False, True]),
], ids=lambda tensor: str(tensor.dtype))  # fmt: skip
def test_a_digest_is_of_the_bits_wherever_they_lie(tensor):
    size = tensor.numel()
    behind = torch.cat([tensor.new_zeros(3), tensor.flatten()])[3:].view(
        tensor.shape
    )  # begins at no multiple of 8 bytes
    across = torch.stack([tensor, tensor], dim=-1)[..., 1]  # not contiguous
    assert total(tensor) == total(behind) == total(across)
    changed = tensor.clone()
    changed.view(-1).view(torch.uint8)[-1] ^= 1
    assert total(changed) != total(tensor)
    if tensor.is_floating_point() and size > 1:
        order = torch.randperm(size // 8 * 8 // 8)
        words = tensor.flatten()[: len(order) * 8].view(-1, 8)
        assert total(words) == total(words[order].contiguous()), "no order of summation may change it"


def test_sums_beyond_64_bits_and_empty_tensors_have_digests():
    most = torch.full((64,), -1, dtype=torch.int64)
    (number,) = digests([Held("weight", (), most)]).values()
    assert number == 2**64 - 64 and total(torch.empty(0)) == 0


def compared(*times):
    """What each rank's Comparison says in the end, the ranks being threads. times: of each comparison, what each rank holds"""
    size, met, sent = len(times[0]), threading.Barrier(len(times[0])), {}

    def work(rank):
        def gather(value):
            sent[rank] = value
            met.wait(10)
            every = [sent[other] for other in range(size)]
            met.wait(10)
            return every

        comparison = Comparison(gather, rank)
        return [comparison.compare(of_ranks[rank]) for of_ranks in times][-1]

    with ThreadPoolExecutor(size) as pool:
        said = list(pool.map(work, range(size)))
    assert all(each == said[0] for each in said), "all ranks come to the same verdict"
    return said[0]


def whole(factor=1.0, **further):
    held = [Held("first", (), WEIGHT), Held("second", (), factor * WEIGHT)]
    return held + [Held(name, (), value) for name, value in further.items()]


@pytest.mark.parametrize("of_ranks, name, odd, known", [
    ([whole(), whole(1.5), whole()], "second", (1,), True),
    ([whole(), whole(1.5)], "second", (0, 1), False),
    ([whole(), whole(1.5), whole(), whole(1.5)], "second", (0, 1, 2, 3), False),
    ([whole(), whole(), whole(), whole(1.5), whole(1.25)], "second", (3, 4), True),
    ([whole(step=4), whole(step=4), whole(step=5)], "step", (2,), True),
])  # fmt: skip
def test_the_odd_rank_is_named_where_a_majority_agrees(of_ranks, name, odd, known):
    found = compared(of_ranks)
    assert (found.name, found.odd, found.known) == (name, odd, known)
    assert found.values == tuple(str(rank[-1].value) if name == "step" else "" for rank in of_ranks)


def shard(number, factor=1.0):
    """What a rank of two groups of two holds: a half of a matrix as its peer in the other group, and a norm as all do."""
    return [Held("matrix", (2 * (number % 2), 2), factor * WEIGHT[2 * (number % 2) :][:2]), Held("norm", (), WEIGHT[0])]


def test_ranks_are_compared_with_those_that_hold_the_same_part():
    sound = [shard(rank) for rank in range(4)]
    assert compared(sound, sound) is None
    found = compared([shard(0), shard(1), shard(2), shard(3, 1.5)])
    assert (found.name, found.of, found.odd, found.known) == ("matrix", (1, 3), (1, 3), False)
    alone = [Held("part", rank, torch.empty(4, device="meta")) for rank in range(3)]  # its bits cannot be read
    assert compared([[each, *whole()] for each in alone]) is None


def test_where_kernels_may_round_only_a_difference_of_norms_counts():
    def held(value):
        return [Held("norm", (), value, rounded=True)]

    nearly = WEIGHT + 1e-4 * torch.randn_like(WEIGHT)
    assert compared([held(WEIGHT), held(nearly), held(WEIGHT)]) is None
    found = compared([held(WEIGHT), held(1.5 * WEIGHT), held(nearly)])
    assert (found.odd, found.known) == ((1,), True)
    assert compared([held(WEIGHT), held(torch.full_like(WEIGHT, torch.nan))]).odd == (0, 1)


def test_ranks_that_hold_further_things_than_before_are_grouped_anew():
    after = [[*whole(), Held("moment", (), factor * WEIGHT)] for factor in (1, 1, 2)]
    assert compared([whole()] * 3) is None
    assert compared([whole()] * 3, after).odd == (2,)


def test_weights_in_four_bits_are_known_after_they_are_sharded():
    """FSDP2 puts shards in their place, whose numbers are bits of several weights each: a norm of them says nothing."""
    from bitsandbytes.nn import Linear4bit

    packed = Linear4bit(64, 64, quant_storage=torch.float32)
    model = torch.nn.ModuleDict({"packed": packed, "plain": torch.nn.Linear(4, 4)})
    model.to("cpu")
    assert in_four_bits(model) == {"packed.weight"}
    model["packed"].weight = torch.nn.Parameter(model["packed"].weight.detach()[:256].clone(), requires_grad=False)
    assert in_four_bits(model) == {"packed.weight"}
