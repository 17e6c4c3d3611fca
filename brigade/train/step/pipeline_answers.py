"""Greedy answers of a model whose layers lie on several ranks: each token is a pass through all stages, without a cache."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..data.collate import MicroBatch
from ..distributed import heartbeat, ranks
from ..distributed.process import this_process
from ..engines.parallel.pipeline import Pipeline
from ..engines.parallel.pipeline_split import Part
from .context import TrainingContext
from .sample_answers import Question, stops


@torch.no_grad()
def generate(trainer: TrainingContext, pipeline: Pipeline, questions: list[Question], longest: int) -> list[list[int]]:
    """Answer questions as sample_answers.generate does; each pipeline has its share of them. A collective.

    Pipelines that divide experts answer all of them together: a rank without tokens has experts that others' tokens visit.
    """
    place, size = trainer.place, trainer.run.batch.data_parallel_size
    together = pipeline.axes.experts > 1
    ends = stops(trainer.model, trainer.processing_class, questions)
    positions = getattr(trainer.model.config.get_text_config(), "max_position_embeddings", None) or 2**31
    last = pipeline.last_rank

    def compute(part: Part, inputs: MicroBatch, _: object, hidden: torch.Tensor | None) -> torch.Tensor:
        with trainer.accelerator.autocast():
            output = part(hidden, **inputs, use_cache=False, logits_to_keep=1)
        return output.logits[0, -1].argmax() if part.last else output

    mine: dict[int, list[int]] = {}
    for index in range(len(questions)) if together else range(place.data, len(questions), size):
        ids = questions[index].prompt[-max(1, positions - longest) :]
        begin = len(ids)
        while len(ids) - begin < longest and (len(ids) == begin or ids[-1] not in ends):
            tokens = torch.tensor([ids], device=pipeline.device)
            found = pipeline.forward_alone(
                {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, None, compute
            )
            token = torch.zeros((), dtype=torch.long, device=pipeline.device) if found is None else found
            dist.broadcast(token, last, group=pipeline.groups.stages)
            if together:
                dist.broadcast(token, group_src=0, group=pipeline.groups.data)
            ids = [*ids, int(token)]
            this_process.heartbeat.enter(heartbeat.EVALUATION)
        mine[index] = ids[begin:]
    given = {index: answer for of_rank in ranks.gather(mine) for index, answer in of_rank.items()}
    return [given[index] for index in range(len(questions))]
