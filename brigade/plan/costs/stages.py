"""Count what each stage of a pipeline has on one rank before data-parallel sharding; without a pipeline there is one stage."""

import functools
from dataclasses import dataclass

from ..constants import CONSTANTS
from .division import division
from .job import Job


@dataclass(frozen=True)
class Stage:
    """The parameters of one rank.

    parameters: over tensor and expert parallelism; experts: those among them that expert parallelism divides
    whole: those among them that every rank of a tensor group has
    embedding, head: those among them of the two ends; a head that is the embedding counts where it is another copy
    """

    place: int
    last: bool
    layers: int
    parameters: float
    trained: float
    experts: float
    embedding: float
    head: float
    whole: float = 0.0


def stages(job: Job) -> list[Stage]:
    """What each stage of the pipeline computes and holds; one stage where there is no pipeline."""
    s, t, parts = job.shape, job.tensor, division(job)
    of_job, whole, (of_embedding, of_head) = [], parts.whole_norms, parts.ends

    def divided(parameters: float, undivided: float) -> float:
        return (parameters - undivided * whole) / t + undivided * whole

    dense = s.dense_layers * divided(s.dense_layer, s.undivided())
    per_layer = (dense + s.moe_layers * divided(s.moe_base, s.undivided(moe=True))) / s.layers
    whole_per_layer = (s.dense_layers * s.undivided() + s.moe_layers * s.undivided(moe=True)) / s.layers * whole
    for place, layers in enumerate(parts.layers):
        first, last = place == 0, place == job.pipeline - 1
        head = last * (s.head or (0 if first else s.vocab * s.hidden)) / of_head  # a copy on the last where it is tied
        embedding = first * s.embedding / of_embedding
        experts = layers / s.layers * s.moe_layers * s.experts * s.expert / parts.experts
        ends = embedding + head + last * divided(s.final_norm, s.final_norm) + first * s.other
        psi = layers * per_layer + ends + experts
        trained = job.trained * parts.adapters * layers / s.layers if job.trained else psi - first * job.frozen_beside
        spread = experts if job.expert > 1 else 0.0
        ends_whole = embedding * (of_embedding == 1) + head * (of_head == 1) + last * s.final_norm
        undivided = layers * whole_per_layer + ends_whole * whole
        of_job.append(Stage(place, last, layers, psi, trained, spread, embedding, head, undivided))
    return of_job


def gathered_bytes(job: Job, psi: float) -> float:
    """Return the bytes of `psi` parameters as they are gathered or moved: in half precision, except under QLoRA."""
    return frozen_bytes(job, psi) if job.method == "qlora" else job.conventions.gathered * psi


@functools.singledispatch
def frozen_bytes(job: Job, psi: float) -> float:
    """Return the bytes of weights under adapters: in bf16, or in linear layers four bits with nested constants (QLoRA).

    Experts are no linear layers since Transformers 5: it holds those of a layer in one 3D parameter, and gives bitsandbytes
    only nn.Linear (transformers, integrations/bitsandbytes.py: replace_with_bnb_linear). A vision tower and its projector
    stay in bf16 too (train/model/load.py: quantization_config).
    """
    if job.method == "full":
        return 0.0
    if job.method == "lora":
        return 2 * psi
    s = job.shape
    whole = (s.embedding + s.head + s.moe_layers * s.experts * s.expert) / job.tensor / job.pipeline
    whole += job.images.tower.parameters + job.images.tower.projector if job.images else 0
    return 2 * whole + (CONSTANTS.nf4_cut_bytes if job.tensor > 1 else CONSTANTS.nf4_bytes) * (psi - whole)
