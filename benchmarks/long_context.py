"""What one rank's activations need for a row of 128k tokens: with its tokens over several ranks, and with tiles.

    python -m benchmarks.long_context            # traces -> results/long_context.jsonl, docs/evidence/long-context.md
    python -m benchmarks.long_context --draw     # the table from the results that are there

Each model's own code in Transformers runs forward and backward on tensors without data, as in docs/evidence/traced.md, with
Brigade's own all-to-alls and tiles: bf16, activation checkpointing, flash attention, and a label for every token.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import pages
from benchmarks.pages import EVIDENCE, Row, markdown
from brigade.plan.shape.find import known_config
from brigade.plan.shape.remembered import versions
from brigade.train.model.config_json import read_config
from testing.trace_settings import TraceSettings

RESULTS = pages.RESULTS / "long_context.jsonl"
PAGE = EVIDENCE / "long-context.md"
MODELS = ("qwen3-8b", "llama-3.1-8b")
TOKENS = 131_072
RANKS = (1, 2, 4, 8)
TILES: dict[str, tuple[Any, Any]] = {"none": (None, None), "loss": ("auto", None), "loss and MLP": ("auto", "auto")}


def trace(config: Any, ranks: int, loss: Any, mlp: Any, tokens: int = TOKENS) -> Any:
    """A rank's trace_settings.Trace, of its part of a row of so many tokens."""
    from brigade.train.parallel import sequence, tiled
    from testing import stand_ins, traced_model

    part = tokens // ranks

    def change(model: Any) -> dict[str, Any]:
        tiled.apply(model, loss, mlp)
        if ranks == 1:
            return {}
        sequence.install(stand_ins.FLASH, dist.new_group(list(range(ranks))))
        return {sequence.IN_PARTS: True, "shift_labels": torch.zeros(1, part, dtype=torch.long)}

    with FakeTensorMode(), torch.device("cpu"):
        return traced_model.run(config, TraceSettings(part, checkpointing=True), change)


def rows() -> Iterator[Row]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(RANKS))
    for model in MODELS:
        recipe = known_config(model)
        assert recipe
        config = read_config(recipe)
        for name, tiles in TILES.items():
            for ranks in RANKS:
                found = trace(config, ranks, *tiles)
                figures = {"kept": found.kept, "back": found.back, "loss": found.loss}
                yield {
                    "model": model,
                    "tiles": name,
                    "ranks": ranks,
                    "tokens": TOKENS,
                    **figures,
                    "versions": versions(),
                }
    dist.destroy_process_group()


def tables() -> dict[str, str]:
    results = pages.read(RESULTS)
    head = [
        "model",
        "tiles",
        "ranks of a row",
        "kept by all layers",
        "beside, in a layer",
        "beside, in the loss",
        "together",
    ]
    lines = []
    for row in results:
        most = row["kept"] + max(row["back"], row["loss"])
        figures = (f"{row_bytes / 2**30:,.1f} GiB" for row_bytes in (row["kept"], row["back"], row["loss"], most))
        lines.append([row["model"], row["tiles"], row["ranks"], *figures])
    versions = pages.in_words(results[0]["versions"])
    return {"long-context": f"{markdown(head, lines)}\n\nVersions: {versions}."}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="trace nothing")
    if not parser.parse_args().draw:
        pages.save(RESULTS, list(rows()))
    pages.write(PAGE, tables())


if __name__ == "__main__":
    main()
