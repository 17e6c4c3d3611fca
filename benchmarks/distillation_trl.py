"""The loss of TRL's GKDTrainer on a batch, beside ours of the same models and tokens, and why they differ where they do.

    python -m benchmarks.distillation_trl          # -> docs/evidence/distillation.md; asks .venv/peers (benchmarks/peers.py)

compute_loss() of GKDTrainer is called as TRL calls it, with the models, the batch and the trainer's beta; nothing of it is
rewritten. Ours is what the loss of a run is made of (brigade/train/loss/divergence.py). Both read eight rows, padded, in fp32.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

IGNORED, ROWS, HALF = -100, 8, 4


class Row(NamedTuple):
    """A setting. ours: form, beta, temperature and ratio; theirs: attributes of a GKDTrainer; split: whether two micro-batches
    are read, and TRL is given no count of their tokens; unused: whether the teacher's vocabulary ends with unused rows"""

    name: str
    ours: tuple[str, float, float, float]
    theirs: dict[str, float]
    why: str = ""
    split: bool = False
    unused: bool = False


RATIO = "TRL has no cross-entropy beside the divergence. `kd_ratio: 1` leaves it out of ours"
TABLE = [
    Row("forward_kl; beta 0", ("forward_kl", 0.5, 1.0, 1.0), {"beta": 0.0}),
    Row("reverse_kl; beta 1", ("reverse_kl", 0.5, 1.0, 1.0), {"beta": 1.0}),
    Row("jsd, beta 0.5", ("jsd", 0.5, 1.0, 1.0), {"beta": 0.5}),
    Row("jsd, beta 0.1", ("jsd", 0.1, 1.0, 1.0), {"beta": 0.1}),
    Row(
        "forward_kl, kd_temperature 2; beta 0, temperature 2",
        ("forward_kl", 0.5, 2.0, 1.0),
        {"beta": 0.0, "temperature": 2.0},
        "TRL's temperature is that of sampling: its loss divides no logits by it. Ours does, and multiplies by its square",
    ),
    Row("forward_kl, kd_ratio 0.5; beta 0", ("forward_kl", 0.5, 1.0, 0.5), {"beta": 0.0}, RATIO),
    Row(
        "forward_kl, two micro-batches; beta 0, without a count of tokens",
        ("forward_kl", 0.5, 1.0, 1.0),
        {"beta": 0.0},
        "without `num_items_in_batch` TRL takes each micro-batch's mean; ours is always the mean over the whole batch's tokens",
        split=True,
    ),
    Row(
        "forward_kl, a teacher with unused rows; beta 0",
        ("forward_kl", 0.5, 1.0, 1.0),
        {"beta": 0.0},
        "TRL compares logits of equal sizes only; ours compares the words that both have",
        unused=True,
    ),
]


def loaded(folder: Path, unused: bool) -> tuple[Any, Any]:
    """Return the model and its teacher, which ends with as many rows as the model, or with more."""
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval() for name in ("llama", "teacher")
    )
    if not unused:
        teacher.resize_token_embeddings(student.config.vocab_size)
    return student, teacher


def micro_batches(batch: dict[str, torch.Tensor], split: bool) -> list[dict[str, torch.Tensor]]:
    parts = [slice(0, HALF), slice(HALF, ROWS)] if split else [slice(0, ROWS)]
    return [{key: value[part] for key, value in batch.items()} for part in parts]


# ---- in the peers' environment ---------------------------------------------------------------------------------------
def theirs(folder: Path, batch: dict[str, torch.Tensor]) -> list[float | str]:
    """Return TRL's loss of each row of TABLE, or the error that it raises."""
    from trl.experimental.gkd import GKDTrainer

    found: list[float | str] = []
    for row in TABLE:
        student, teacher = loaded(folder, row.unused)
        trainer = object.__new__(GKDTrainer)
        vars(trainer).update({"temperature": 0.9} | row.theirs | {"teacher_model": teacher})
        parts = micro_batches(batch, row.split)
        count = None if row.split else (batch["labels"][:, 1:] != IGNORED).sum()
        try:
            losses = [float(trainer.compute_loss(student, part, num_items_in_batch=count)) for part in parts]
        except RuntimeError as error:
            found.append(f"{type(error).__name__}: {str(error).splitlines()[0][:60]}")
        else:
            found.append(sum(losses) / len(losses))
    return found


# ---- in ours ---------------------------------------------------------------------------------------------------------
def ours(folder: Path, batch: dict[str, torch.Tensor]) -> list[float]:
    from brigade.train.loss import divergence

    found = []
    for row in TABLE:
        student, teacher = loaded(folder, row.unused)
        options, total = divergence.Options(*row.ours), torch.zeros(3)
        for part in micro_batches(batch, row.split):
            asked = {key: part[key] for key in ("input_ids", "attention_mask")}
            with torch.no_grad():
                own, other = (each(**asked).logits[:, :-1].flatten(0, 1) for each in (student, teacher))
            known = (other[:, : own.shape[-1]] / options.temperature).log_softmax(-1)
            total += divergence.sums(options, own, part["labels"][:, 1:].flatten(), None, known)
        crossed, apart, tokens = total.tolist()
        found.append(((1 - options.ratio) * crossed + options.ratio * apart) / tokens)
    return found


def batch_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return eight rows of testing/distilling.py, padded on the right."""
    from transformers import PreTrainedTokenizerFast

    from testing.distilling import MAX_LENGTH, MODEL, rows_of
    from testing.plain_preferences import tokens_of

    words = PreTrainedTokenizerFast.from_pretrained(folder / MODEL)
    samples = [tokens_of(words, row["prompt"], row["completion"], MAX_LENGTH) for row in rows_of()[0][:ROWS]]
    width = max(len(each.ids) for each in samples)
    batch = {key: torch.zeros(ROWS, width, dtype=torch.long) for key in ("input_ids", "attention_mask", "labels")}
    batch["labels"] += IGNORED
    for number, each in enumerate(samples):
        batch["input_ids"][number, : len(each.ids)] = torch.tensor(each.ids)
        batch["attention_mask"][number, : len(each.ids)] = 1
        batch["labels"][number, each.first : each.end] = torch.tensor(each.ids[each.first : each.end])
    return batch


def main() -> None:
    from benchmarks.pages import EVIDENCE, REPOSITORY, markdown, write
    from testing import distilling

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--peers", default=str(REPOSITORY / ".venv/peers/bin/python"), help="a Python that has TRL")
    peers = parser.parse_args().peers
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        distilling.write_inputs(folder)
        torch.save(batch_of(folder), folder / "batch.pt")
        own = ours(folder, batch_of(folder))
        subprocess.run([peers, "-m", "benchmarks.distillation_trl", str(folder)], check=True, cwd=REPOSITORY)
        other = json.loads((folder / "theirs.json").read_text())
    lines = []
    for row, mine, their in zip(TABLE, own, other["losses"], strict=True):
        apart = f"{abs(mine - their) / mine:.0e}" if isinstance(their, float) else "-"
        shown = f"{their:.6f}" if isinstance(their, float) else their
        lines.append([row.name, f"{mine:.6f}", shown, apart, row.why or "the same"])
    table = markdown(["ours; TRL's", "ours", "TRL", "relative difference", "why"], lines)
    print(table)
    write(EVIDENCE / "distillation.md", {"distillation-trl": f"{table}\n\nTRL {other['version']}."})


if __name__ == "__main__":
    if len(sys.argv) == 2 and Path(sys.argv[1], "batch.pt").exists():
        import trl

        where = Path(sys.argv[1])
        losses = theirs(where, torch.load(where / "batch.pt"))
        (where / "theirs.json").write_text(json.dumps({"losses": losses, "version": trl.__version__}))
    else:
        main()
