"""Numbers as bytes for the network: fp32, bf16, or int8 with a scale for each block."""

import torch
from torch import Tensor

BLOCK = 256  # values with one scale: 4 bytes, 1.6 % of the int8 ones
LARGEST = 127.0


def encode(values: Tensor, precision: str) -> Tensor:
    """fp32 values, in rows whose length is a multiple of BLOCK, as bytes in as many rows.

    int8: v = scale x q with q from -127 to 127 and scale = max |v| / 127 of a block, rounded to the nearest. What rounding leaves
    out is lost. A block with a value that is not finite decodes to NaN.
    """
    if precision == "int8":
        blocks = values.view(len(values), -1, BLOCK)
        scales = blocks.abs().amax(-1, keepdim=True) / LARGEST
        whole = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().nan_to_num(0).to(torch.int8)
        return torch.cat(
            [whole.view(len(values), -1).view(torch.uint8), scales.view(len(values), -1).view(torch.uint8)], 1
        )
    return (values.bfloat16() if precision == "bf16" else values.contiguous()).view(torch.uint8)


def decode(sent: Tensor, precision: str) -> Tensor:
    """What encode() has made bytes of."""
    if precision == "int8":
        count = sent.shape[1] // (BLOCK + 4) * BLOCK
        whole = sent[:, :count].contiguous().view(torch.int8).view(len(sent), -1, BLOCK)
        scales = sent[:, count:].contiguous().view(torch.float32)
        return (whole * scales[:, :, None]).view(len(sent), -1)
    return sent.contiguous().view(torch.bfloat16).float() if precision == "bf16" else sent.view(torch.float32)
