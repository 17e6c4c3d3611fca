"""What bitsandbytes computes on a base in 8 bits, beside bf16 and 4 bits: LoRA on SmolLM2 135M, on a CPU.

python -m benchmarks.eight_bits              # prints a line for each; about ten minutes on one core
"""

import itertools
import json
import logging
from typing import Any

import torch

from brigade.train.data import builtin
from brigade.train.model import gguf_file, packaged

MODEL, LENGTH, STEPS = "smollm2-135m", 96, 12
KINDS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "8 bits": {"load_in_8bit": True},
    "8 bits, no outliers": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
    "4 bits": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16},
}


def main() -> None:
    from transformers import AutoTokenizer

    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # a line for each product
    folder = gguf_file.as_folder(packaged.file_of(MODEL, MODEL), MODEL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = itertools.islice((row for row in builtin.TRAIN.read_text().splitlines() if len(row) < 400), 64)
    texts = ["\n".join(message["content"] for message in json.loads(row)["messages"]) for row in rows]
    samples = [tokenizer(text)["input_ids"][:LENGTH] for text in texts]
    for kind, options in KINDS.items():
        print(kind, measured(str(folder), options, samples), sep=": ", flush=True)


def measured(folder: str, options: dict[str, Any], samples: list[list[int]]) -> str:
    """Return how far the first sample's logits change beside seven others, in evaluation and in training, and a few losses."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantized = {"quantization_config": BitsAndBytesConfig(**options), "device_map": "cpu"} if options else {}
    torch.manual_seed(0)
    base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **quantized)
    for module in base.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # which has no backward pass
            module.support_avx512bf16_for_cpu = False
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    changes = []
    for training in (False, True):
        model.train(training)
        with torch.no_grad():
            alone, among = (model(**batch(samples[:count])).logits[0, : len(samples[0])] for count in (1, 8))
        changes.append(f"{(alone - among).abs().max():.3g}")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-3), []
    for step in range(STEPS):
        loss = model(**batch([samples[(4 * step + number) % len(samples)] for number in range(4)])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{loss.item():.4f}")
    return (
        f"logits change by {changes[0]} in evaluation, {changes[1]} in training; losses {losses[0]}, ..., {losses[-1]}"
    )


def batch(samples: list[list[int]]) -> dict[str, torch.Tensor]:
    """Return samples beside each other, (samples, longest), padded on the right."""
    longest = max(map(len, samples))
    padded = [sample + [0] * (longest - len(sample)) for sample in samples]
    labels = [sample + [-100] * (longest - len(sample)) for sample in samples]
    mask = [[1] * len(sample) + [0] * (longest - len(sample)) for sample in samples]
    return {"input_ids": torch.tensor(padded), "labels": torch.tensor(labels), "attention_mask": torch.tensor(mask)}


if __name__ == "__main__":
    main()
