"""What one rank's activations need for a row of 128k tokens, or for a pair of such answers: over several ranks, and with tiles.

    python -m benchmarks.long_context            # traces -> results/long_context.jsonl, docs/evidence/long-context.md

Each model's own code in Transformers runs forward and backward on tensors without data, as in docs/evidence/traced.md, with
Brigade's own all-to-alls, tiles and losses: bf16, activation checkpointing, flash attention, and a label for every token.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import pages
from benchmarks.pages import EVIDENCE, Row, markdown
from brigade.plan.shape.built import versions
from brigade.plan.shape.find import known_config
from brigade.train.model.config_json import read_config
from testing.trace_settings import TraceSettings

RESULTS = pages.RESULTS / "long_context.jsonl"
PAGE = EVIDENCE / "long-context.md"
MODELS = ("qwen3-8b", "llama-3.1-8b")
TOKENS = 131_072
ANSWERS = {"sft": 1, "dpo": 2}  # of TOKENS each, end to end in a row
RANKS = (1, 2, 4, 8)
TILES: dict[str, tuple[Any, Any]] = {"none": (None, None), "loss": ("auto", None), "loss and MLP": ("auto", "auto")}


def trace(config: Any, ranks: int, loss: Any, mlp: Any, tokens: int = TOKENS, by_token: bool = False) -> Any:
    """A rank's trace_settings.Trace, of its part of a row of so many tokens. by_token: whether the loss is each token's"""
    from brigade.train.engines.parallel import sequence
    from brigade.train.loss import own_loss, tiled
    from testing import stand_ins, traced_model

    part = tokens // ranks

    def change(model: Any) -> dict[str, Any]:
        if by_token and not loss:
            own_loss.return_token_losses(model)
        tiled.apply(model, loss, mlp, by_token)
        if by_token:
            losses = model.loss_function
            model.loss_function = lambda *given, **named: losses(*given, **named).sum()
        if ranks == 1:
            return {}
        sequence.install(stand_ins.FLASH, dist.new_group(list(range(ranks))))
        return {sequence.IN_PARTS: True, "shift_labels": torch.zeros(1, part, dtype=torch.long)}

    with FakeTensorMode(), torch.device("cpu"):
        return traced_model.run(config, TraceSettings(part, checkpointing=True), change)


def rows() -> Iterator[Row]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(RANKS))
    for model, objective in itertools.product(MODELS, ANSWERS):
        recipe = known_config(model)
        assert recipe
        config = read_config(recipe)
        for (name, (loss, mlp)), ranks in itertools.product(TILES.items(), RANKS):
            found = trace(config, ranks, loss, mlp, TOKENS * ANSWERS[objective], by_token=objective != "sft")
            figures = {"kept": found.kept, "back": found.back, "loss": found.loss}
            about = {"model": model, "objective": objective, "tiles": name, "ranks": ranks, "tokens": TOKENS}
            yield {**about, **figures, "versions": versions()}
    dist.destroy_process_group()


def tables() -> dict[str, str]:
    results = pages.read(RESULTS)
    versions = f"Versions: {pages.in_words(results[0]['versions'])}."
    names = {"sft": "long-context", "dpo": "long-context-pairs"}
    found = {names[objective]: [row for row in results if row["objective"] == objective] for objective in ANSWERS}
    return {name: f"{_table(rows)}\n\n{versions}" for name, rows in found.items()}


def _table(rows: list[Row]) -> str:
    beside = ["kept by all layers", "beside, in a layer", "beside, in the loss", "together"]
    lines = []
    for row in rows:
        most = row["kept"] + max(row["back"], row["loss"])
        figures = (f"{row_bytes / 2**30:,.1f} GiB" for row_bytes in (row["kept"], row["back"], row["loss"], most))
        lines.append([row["model"], row["tiles"], row["ranks"], *figures])
    return markdown(["model", "tiles", "ranks of a row", *beside], lines)


def main() -> None:
    pages.command_line(__doc__).parse_args()
    pages.save(RESULTS, list(rows()))
    pages.write(PAGE, tables())


if __name__ == "__main__":
    main()
