"""DPO on a pair of 131,072 tokens: train.py with its loss by tiles, beside a plain loop that makes all logits.

    python -m benchmarks.long_pairs          # -> docs/evidence/preferences.md

The model has one layer. Both answers follow one prompt; the chosen one is cut at 131,072 tokens, and the rejected one ends far
before. With two ranks, each has half of the sequence that holds both.
"""

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.pages import EVIDENCE, command_line, markdown, where, write
from brigade.train.data import builtin
from testing.command_line import as_flags
from testing.preferences import MODEL, Case, plain, run_groups, steps_of, worst, write_inputs

TOKENS, STEPS = 131_072, 2
MOVED = {"beta": 0.01, "learning_rate": 1e-6}  # by which the loss falls by a part of itself, and not to 0
LENGTHS = {"prompt": 60_000, "chosen": 80_000, "rejected": 5_000}  # tokens, nearly
KEYS = {
    "max_length": TOKENS,
    "max_steps": STEPS,
    "global_batch_size": 1,
    "per_device_train_batch_size": 1,
    "tiled_loss": True,
    "activation_checkpointing": "true",
    **MOVED,
}
COMPARED = ("loss", "grad_norm", "logps/chosen")
CASES = [Case("sigmoid"), Case("sigmoid", "zero3_sp2", 2), Case("sigmoid", "fsdp2_sp2", 2)]


def pair() -> dict[str, str]:
    """Return a row of texts that have LENGTHS, which follow one another in the documentation of Python."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(builtin.TOKENIZER)
    chats = (json.loads(line)["messages"] for line in builtin.TRAIN.read_text().splitlines())
    ids = tokenizer(" ".join(turn["content"] for chat in chats for turn in chat))["input_ids"]
    row, begin = {}, 0
    for column, count in LENGTHS.items():
        row[column], begin = tokenizer.decode(ids[begin : begin + count]), begin + count
    return row


def write_model(folder: Path) -> None:
    """Write a Llama of one layer, with as many positions as TOKENS."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=4096, max_position_embeddings=TOKENS, bos_token_id=0, eos_token_id=2, **sizes)
    shutil.copytree(builtin.TOKENIZER, folder)
    LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    command_line(__doc__).parse_args()
    row, lines = pair(), list[list[Any]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / MODEL)
        write_inputs(folder)
        (folder / "pairs-train.jsonl").write_text(json.dumps(row) + "\n")
        begin = time.monotonic()
        expected = plain(folder, CASES[0], rows=[row], max_length=TOKENS, global_batch_size=1, max_steps=STEPS, **MOVED)
        print(f"plain loop: {time.monotonic() - begin:.0f} s, {expected}", flush=True)
        for case in CASES:
            begin = time.monotonic()
            log = run_groups(folder, {case: case.run(folder, *as_flags(**KEYS))})[case]
            found = steps_of(log)
            differences = worst(found, expected)
            print(f"{case}: {time.monotonic() - begin:.0f} s, {found}, {differences}", flush=True)
            figures = (f"{step['loss']:.6f}" for step in found)
            lines.append([case.strategy, case.ranks, *figures, *(f"{differences[key]:.0e}" for key in COMPARED)])
    heads = ["strategy", "ranks", "first loss", "second loss", "loss", "gradient norm", "`logps/chosen`"]
    write(EVIDENCE / "preferences.md", {"parity-long": f"{markdown(heads, lines)}\n\nVersions: {where()['versions']}."})


if __name__ == "__main__":
    main()
