"""Held-out losses of runs beside those of a few lines of plain Transformers that share no code with them.

    python -m benchmarks.independent        # trains 12 tiny models, one process -> docs/evidence/independent.md

Each architecture is trained for six steps from random weights. What the run saved is then loaded by from_pretrained, its own
chat template renders the held-out chats one by one, and the loss is a cross-entropy in float64 over the assistant's tokens.
"""

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.pages import EVIDENCE, markdown, where, write
from testing import runs
from testing.command_line import as_flags

TOLERANCE = 1e-6  # relative
# Their configurations need no more than sizes; among them are mixtures of experts, sliding windows, latent attention and
# a parallel block.
ARCHITECTURES = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3"),
    *("gpt_neox", "olmo2", "granite", "deepseek_v3"),
)


def write_model(model_type: str, folder: Path) -> None:
    """A config.json of tiny sizes."""
    from transformers import CONFIG_MAPPING

    from brigade.train.model.tiny import shrink

    config = shrink(CONFIG_MAPPING[model_type]().to_dict()) | {"model_type": model_type}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))


def plain_loss(saved: Path, held_out: Path) -> tuple[float, int]:
    """(mean cross-entropy in nats per token of the assistant's, number of such tokens), only by Transformers."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    # Not AutoTokenizer: for a model of type qwen2 it puts Qwen's own splitting of words in place of what tokenizer.json says, and
    # these models were made with the built-in tokenizer.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(saved)
    model = AutoModelForCausalLM.from_pretrained(saved).eval()
    total, tokens = 0.0, 0
    for line in held_out.read_text().splitlines():
        chat = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = torch.tensor(chat["input_ids"]), torch.tensor(chat["assistant_masks"]).bool()
        with torch.inference_mode():
            log_probabilities = model(ids[None]).logits[0, :-1].double().log_softmax(-1)
        total -= float(log_probabilities.gather(1, ids[1:, None])[mask[1:]].sum())
        tokens += int(mask[1:].sum())
    return total / tokens, tokens


def compare(model_type: str, folder: Path) -> dict[str, Any]:
    """Train one architecture in this process, and measure what it saved both ways."""
    import train

    shared = runs.write_inputs(folder)
    write_model(model_type, folder / model_type)
    output = folder / f"run-{model_type}"
    flags = as_flags(
        model_name_or_path=str(folder / model_type),
        max_length=512,
        max_steps=6,
        eval_steps=6,
        optim="sgd",
        learning_rate=0.1,
        output_dir=str(output),
    )
    with contextlib.redirect_stdout(io.StringIO()):
        train.main([*shared, *flags])
    run = json.loads((output / "success.json").read_text())["held_out_loss"]
    plain, tokens = plain_loss(output, folder / "heldout.jsonl")
    return {
        "architecture": model_type,
        "run": run,
        "plain": plain,
        "tokens": tokens,
        "difference": abs(run - plain) / plain,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The table of docs/evidence/independent.md."""
    head = ["architecture", "the run's loss", "by plain Transformers", "tokens", "relative difference"]
    lines = [
        [row["architecture"], f"{row['run']:.7f}", f"{row['plain']:.7f}", row["tokens"], f"{row['difference']:.1e}"]
        for row in rows
    ]
    worst = f"Largest relative difference: {max(row['difference'] for row in rows):.1e}."
    return f"{worst} Versions: {where()['versions']}; CPU, fp32.\n\n{markdown(head, lines)}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = [compare(name, Path(folder)) for name in ARCHITECTURES]
    worst = max(row["difference"] for row in rows)
    write(EVIDENCE / "independent.md", {"losses": table(rows)})
    if worst > TOLERANCE:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
