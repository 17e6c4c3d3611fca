"""What tests ask of the fake GPU, in two processes that find it: python -m testing.fake_gpu_proof RANK PORT PORT."""

import os
import sys
from datetime import timedelta
from typing import Any

import torch


def error_of(call: Any) -> str:
    """Return what a call raises; an empty text if it raises nothing."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def operators() -> None:
    from testing.fake_gpu.native import native

    assert torch.cuda.device_count() == 2 and torch.cuda.is_available()
    assert torch.cuda.get_device_name() == "Tesla T4" and torch.cuda.get_device_properties(0).major == 7
    assert torch.cuda.is_bf16_supported() and not torch.cuda.is_bf16_supported(including_emulation=False)
    on_0, on_1 = torch.ones(4, device="cuda:0"), torch.ones(4, device="cuda:1", requires_grad=True)
    assert "all tensors to be on the same device" in error_of(lambda: on_0 @ torch.ones(4))
    assert "all tensors to be on the same device" in error_of(lambda: on_0 @ on_1)
    assert "invalid device ordinal" in error_of(lambda: torch.ones(1, device="cuda:2"))
    (on_1 * 3).sum().backward()
    assert on_1.grad is not None and on_1.grad.device.index == 1 and on_1.grad.tolist() == [3, 3, 3, 3]

    half = torch.randn(3, 5).half()
    softmax = torch.softmax(half.to("cuda"), -1, dtype=torch.float32)
    assert torch.equal(softmax.cpu(), torch.softmax(half.float(), -1))

    native.reset_counts()
    on_0.to("cpu"), on_0.sum().item(), on_0[on_0 > 0]
    pinned = torch.empty(4, pin_memory=True)
    assert pinned.is_pinned() and not torch.empty(4).is_pinned()
    pinned.copy_(on_0, non_blocking=True), on_0.copy_(pinned, non_blocking=True)  # no wait
    torch.empty(4).copy_(on_0, non_blocking=True)
    counts = native.counts()
    assert counts["wait: copy to host"] == counts["wait: item"] == 1, counts
    assert counts["wait: copy to host memory that is not pinned"] == 1 and sum("mask" in name for name in counts) == 1


def attention() -> None:
    """Flash attention of two sequences, with grouped heads, against scaled dot products on the CPU. The second sees two keys of
    the first one before its own."""
    from torch.nn.attention.varlen import varlen_attn

    torch.manual_seed(0)
    on_cpu = [torch.randn(7, heads, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]
    q, k, v = on_gpu = [each.detach().to("cuda").requires_grad_() for each in on_cpu]
    starts, key_starts = (torch.tensor(each, dtype=torch.int32, device="cuda") for each in ([0, 3, 7], [0, 3, 9]))
    own, seen = [[0, 1, 2], [3, 4, 5, 6]], [[0, 1, 2], [0, 1, 3, 4, 5, 6]]
    places = torch.tensor([*seen[0], *seen[1]], device="cuda")
    keys = (each.index_select(0, places) for each in (k, v))
    out = varlen_attn(q, *keys, starts, key_starts, 4, 6, window_size=(-1, 0), enable_gqa=True)
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(each[at].transpose(0, 1).float() for each, at in zip(on_cpu, (queries, keyed, keyed), strict=True)),
            attn_mask=torch.tensor(queries)[:, None] >= torch.tensor(keyed),
            enable_gqa=True,
        ).transpose(0, 1)
        for queries, keyed in zip(own, seen, strict=True)
    ]
    torch.testing.assert_close(out.cpu().float(), torch.cat(parts), rtol=0.02, atol=0.02)
    weights = torch.randn(7, 4, 8)
    (out.float() * weights.to("cuda")).sum().backward()
    (torch.cat(parts) * weights).sum().backward()
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=0.05, atol=0.05)


def collectives(port: int, rank: int, devices: tuple[int, int]) -> None:
    """Print what NCCL makes of a sum on the ranks' devices; CPU tensors are refused before."""
    import torch.distributed as dist

    torch.cuda.set_device(devices[rank])
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=120))
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
    assert "No backend type associated with device type cpu" in error_of(lambda: dist.all_reduce(torch.ones(1)))
    values = torch.full((3,), 1.0 + rank, device="cuda")
    said = error_of(lambda: dist.all_reduce(values))
    if not said:
        (result,) = dist.all_reduce(torch.ones(1, device="cuda"), async_op=True).get_future().wait()
        assert result.is_cuda and result.item() == 2, result
    print(f"devices {devices}:", said or values.tolist(), flush=True)
    store.set(f"told by {rank}", "")
    if rank == 0:  # it keeps the store, which the other rank still asks
        store.wait(["told by 0", "told by 1"])
    dist.destroy_process_group()


if __name__ == "__main__":
    rank, *ports = map(int, sys.argv[1:])
    if rank == 0:
        operators()
        attention()
        print("operators and attention hold", flush=True)
    for port, devices in zip(ports, ((0, 1), (0, 0)), strict=True):
        collectives(port, rank, devices)
    # The last backward pass is milliseconds old. A thread of autograd's that asks for the interpreter while it ends dies with the
    # whole process ("terminate called without an active exception", pytorch #38228): end without it.
    sys.stdout.flush()
    os._exit(0)
