"""How a model is divided over the ranks of a job's axes: layers, the vocabulary's two ends, adapters and experts."""

import functools

from ...train.model.experts import shards
from ..shape.lora import linears
from .job import Job


class Division:
    """How train.py divides a model. Of tensor groups: Transformers' plans, with norms and routers whole on each rank."""

    def __init__(self, job: Job) -> None:
        self.job = job

    @property
    def layers(self) -> list[int]:
        """How many layers each stage has: the most costly stage is as cheap as can be, a head as costly as its product."""
        job, shape = self.job, self.job.shape
        if job.pipeline == 1:
            return [shape.layers]
        head = shape.vocab * shape.hidden / shape.layer_matmul
        chunks = _cheapest(shape.layers, job.pipeline * job.virtual, head)
        return [sum(chunks[rank :: job.pipeline]) for rank in range(job.pipeline)]

    @property
    def whole_norms(self) -> bool:
        """Whether each rank of a tensor group has whole norms and routers, and not a part of them."""
        return self.job.tensor > 1

    @property
    def ends(self) -> tuple[int, int]:
        """How many ranks of a tensor group (the embedding, the output head) is divided over.

        Transformers' plans divide both. Where the two are one weight, train.py's own division leaves it whole
        (train/engines/parallel/tensor.py); AutoTP divides it, unless there are adapters (train/engines/deepspeed_engine.py),
        and leaves an embedding of its own whole (deepspeed, module_inject/tp_plan_converter.py).
        """
        tensor, auto = self.job.tensor, self.job.deepspeed
        if self.job.shape.tied:
            return (tensor, tensor) if auto and self.job.method == "full" else (1, 1)
        return (1 if auto else tensor), tensor

    @property
    def logits(self) -> int:
        """How many ranks logits stay divided over: they are gathered, except AutoTP's of a head that is the embedding."""
        job = self.job
        return job.tensor if job.deepspeed and job.shape.tied and job.method == "full" else 1

    @property
    def adapters(self) -> float:
        """The share of adapters that one rank of a tensor group has.

        Of an adapter's two matrices the one with the divided side of its base is divided: B where the base's outputs are
        divided, A where its inputs are.
        """
        job = self.job
        if job.tensor == 1:
            return 1.0
        whole = cut = 0
        for moe, count in job.shape.kinds:
            for reads, inner, outer, _ in linears(
                job.shape, job.targets, moe=moe
            ):  # of no hybrid: all layers have them
                by_input = reads in ("attention", "activation")
                whole, cut = (
                    whole + count * (outer if by_input else inner),
                    cut + count * (inner if by_input else outer),
                )
        return (whole + cut / job.tensor) / (whole + cut)

    @property
    def whole_experts(self) -> bool:
        """Whether a tensor group divides the tokens of experts, and not their matrices."""
        return self.job.expert > 1

    @property
    def experts(self) -> int:
        """How many ranks of a stage one copy of the experts is spread over.

        Tensor parallelism cuts each expert, unless expert parallelism needs its ranks as well.
        """
        job = self.job
        together = job.expert <= job.data * job.context and not self.whole_experts
        return job.expert * (job.tensor if together else 1)

    @property
    def expert_stride(self) -> int:
        """How far apart two ranks of an expert group are: train.py's groups are of neighbours."""
        return 1

    @property
    def same_experts(self) -> tuple[int, int]:
        """(ranks that shard one copy of the same experts, all ranks of a stage that hold them) under expert parallelism."""
        job = self.job
        of_stage = job.data * job.context * job.tensor
        # Groups of neighbours, of any axis, within a copy of all else.
        sharing = shards(job.expert, of_stage if job.pipeline > 1 else job.shard_ranks * job.tensor)
        return sharing, max(1, of_stage // self.experts)


@functools.singledispatch
def division(job: Job) -> Division:
    """Return how a job's model is divided."""
    return Division(job)


@functools.cache
def _cheapest(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """Return the layers of each stage for which the most costly stage costs least, and the most even of such divisions.

    head: what the last stage has besides, in layers. Every stage has at least one layer
    (train/engines/parallel/pipeline_split.py).
    """

    def others(last: int) -> list[int]:
        each, more = divmod(layers - last, stages - 1)
        return [each + (stage >= stages - 1 - more) for stage in range(stages - 1)]

    def cost(last: int) -> tuple[float, float]:
        every = [*others(last), last + head]
        return max(every), sum(layers**2 for layers in every)

    last = min(range(1, layers - stages + 2), key=cost)
    return (*others(last), last)
