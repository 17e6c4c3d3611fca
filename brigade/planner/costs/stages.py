"""What each stage of a pipeline has on one rank before data-parallel sharding; without a pipeline there is one stage."""

from dataclasses import dataclass

from ..choice.job import Job

NF4 = 0.516  # bytes of a weight in four bits, with nested constants of its blocks of 64 (arXiv 2305.14314, section 3)


@dataclass(frozen=True)
class Stage:
    """parameters: of one rank, over tensor and expert parallelism; experts: those among them that expert parallelism divides"""

    place: int
    last: bool
    layers: int
    parameters: float
    trained: float
    experts: float

    @property
    def first(self) -> bool:
        return self.place == 0


def stage_layers(job: Job) -> list[int]:
    """How many layers each stage has.

    Evenly, or by cost (nanotron): blocks go to a stage until it has its share of the cost, of which the head has as much as its
    product weighs against a layer's.
    """
    s, p = job.shape, job.pipeline
    if not job.conventions.cut_by_cost:
        return [s.layers // p + (stage < s.layers % p) for stage in range(p)]
    share, counts, cost = (s.layers * s.layer_matmul + s.vocab * s.hidden) / p, [0], 0.0
    for _ in range(s.layers):
        if cost >= share * len(counts) and len(counts) < p:
            counts.append(0)
        counts[-1] += 1
        cost += s.layer_matmul
    return counts + [0] * (p - len(counts))


def stages(job: Job) -> list[Stage]:
    s, found = job.shape, []
    per_layer = (s.dense_layers * s.dense_layer + s.moe_layers * s.moe_base) / s.layers
    for place, layers in enumerate(stage_layers(job)):
        first, last = place == 0, place == job.pipeline - 1
        head = s.head or (0 if first else s.vocab * s.hidden)  # a tied head is a copy on the last stage
        ends = first * s.embedding + last * (head + s.final_norm)
        experts = layers / s.layers * s.moe_layers * s.experts * s.expert / expert_divisor(job)
        psi = (layers * per_layer + ends) / job.tensor + first * s.other + experts
        trained = job.trained / job.tensor / job.pipeline if job.trained else psi
        found.append(Stage(place, last, layers, psi, trained, experts if job.expert > 1 else 0.0))
    return found


def expert_divisor(job: Job) -> int:
    """Over how many ranks of a stage one copy of the experts is spread: tensor parallelism cuts each, unless expert parallelism
    needs its ranks as well."""
    return job.expert * (job.tensor if job.expert <= job.data * job.context else 1)


def gathered_bytes(job: Job, psi: float) -> float:
    """Of `psi` parameters as they are gathered or moved: in half precision, but QLoRA's."""
    return frozen_bytes(job, psi) if job.method == "qlora" else job.conventions.gathered * psi


def frozen_bytes(job: Job, psi: float) -> float:
    """The weights under adapters: bf16, or in linear layers four bits with nested constants (QLoRA).

    Experts are no linear layers since Transformers 5: it holds those of a layer in one 3D parameter, and gives bitsandbytes
    nn.Linear alone (transformers 5.23, integrations/bitsandbytes.py: replace_with_bnb_linear).
    """
    if job.method == "full":
        return 0.0
    if job.method == "lora":
        return 2 * psi
    s = job.shape
    experts = 0 if job.linear_experts else s.moe_layers * s.experts * s.expert
    whole = (s.embedding + s.head + experts) / job.tensor / job.pipeline
    return 2 * whole + NF4 * (psi - whole)
