"""What train.py and TRL have to multiply for the short rows of benchmarks/preferences.py: counted, and not measured.

python -m benchmarks.preference_products      # -> docs/evidence/preferences.md
"""

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.pages import markdown, write
from benchmarks.preferences import PAGE, RUNS, SHORT, STEPS, TITLES, build


def products() -> str:
    """Return a line for each objective on rows of one sentence: tokens of a step, with the prompt of a pair once, with padding,
    and with a label, and what the matrix products of a step cost: 6 operations for a weight and token (forward, and twice
    backward), without attention.

    Brigade multiplies tokens by the layers' weights, those of a pair's prompt but its last one once, and those with a label by
    the output layer's; TRL all and their padding by both. What KTO reads of other rows' answers comes on top for both.
    """
    lines = []
    for name in SHORT:
        run = RUNS[name]
        data = build(run, False, True)
        tokenizer = AutoTokenizer.from_pretrained(data["model"])
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(data["model"]))
        head = model.get_output_embeddings().weight
        layers = (
            sum(each.weight.numel() for each in model.modules() if isinstance(each, torch.nn.Linear)) - head.numel()
        )
        answers = ("chosen", "rejected") if run.rows == "pairs" else ("completion",)
        drawn = [json.loads(line) for line in Path(data["drawn"]).read_text().splitlines()]
        counts = torch.zeros(4)
        for begin in range(0, len(drawn), run.batch):
            rows = [
                [len(tokenizer(row[key]).input_ids) for key in ("prompt", answer)]
                for row in drawn[begin : begin + run.batch]
                for answer in answers
            ]
            lengths = [prompt + answer + 1 for prompt, answer in rows]  # and the end token
            shared = sum(prompt - 1 for prompt, _ in rows[1::2]) if len(answers) == 2 else 0
            told = sum(answer + 1 for _, answer in rows)
            counts += torch.tensor([sum(lengths), sum(lengths) - shared, max(lengths) * len(rows), told])
        tokens, once, padded, told = (counts / STEPS).tolist()
        own, other = 6 * (layers * once + head.numel() * told), 6 * (layers + head.numel()) * padded
        figures = [f"{own / 1e9:.0f} GFLOP", f"{other / 1e9:.0f} GFLOP", f"{other / own:.2f}"]
        lines.append([TITLES[name], *(round(each) for each in (tokens, once, padded, told)), *figures])
    return markdown(
        ["a step", "tokens", "prompts once", "with padding", "with a label", "Brigade", "TRL", "ratio"], lines
    )


def main() -> None:
    write(PAGE, {"preferences-products": products()})


if __name__ == "__main__":
    main()
