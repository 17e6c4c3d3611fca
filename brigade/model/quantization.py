"""Weights in 4 bits: as bitsandbytes loads them, and as MXFP4 files are read."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..recipe.flags import Settings

if TYPE_CHECKING:
    import torch


def quantization(settings: Settings, dtype: "torch.dtype") -> Any:
    """transformers' BitsAndBytesConfig of a QLoRA run that computes in `dtype`, or None.

    The container of the 4-bit values has that type too: FSDP2 and ZeRO-3 shard floating-point tensors, and accelerate
    would leave uint8 ones whole on every rank (utils/fsdp_utils.py:797). The bits are the same.
    """
    section = settings.recipe.model
    if not section.load_in_4bit:
        return None
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=section.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=section.use_bnb_nested_quant,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )


def _dequantised(source: str) -> Any:
    """What has weights that were published in MXFP4 (gpt-oss) loaded in the run's own precision, or None.

    Transformers cannot train them as they are (quantizers/quantizer_mxfp4.py: is_trainable), and keeps them so wherever the
    `kernels` package is installed.
    """
    from transformers import Mxfp4Config

    published = json.loads((Path(source) / "config.json").read_text()).get("quantization_config") or {}
    return Mxfp4Config(dequantize=True) if published.get("quant_method") == "mxfp4" else None
