"""Count the bytes that a node sends to others in one optimizer step; docs/evidence/communication.md compares counters.

Ranks stand node by node in a ring, so that a ring over several nodes crosses each node's link once, whatever a node's
ranks: gathering or scattering S bytes over n ranks sends (n-1)/n S from a node, reducing to all twice that. NCCL's trees
send as much. Dense models whose every parameter is trained.

Where the volumes come from (DeepSpeed 0.19.8, accelerate 1.15.0, torch 2.13.0):
- DDP reduces the fp32 gradients of fp32 weights to all ranks, once per step.
- ZeRO-1 and 2 do not scatter: they reduce every bucket to all ranks (runtime/zero/stage_1_and_2.py:1695), ZeRO-1 once per
  step, ZeRO-2 in every micro-batch (:2294); each gathers the weights after the step. All in the run's precision.
- ZeRO-3 gathers every parameter for the forward and again for the backward pass, and scatters gradients, in every
  micro-batch; parameters below stage3_param_persistence_threshold stay whole and are gathered once per step (stage3.py:2841).
  What the backward pass needs within stage3_max_reuse_distance elements is gathered once per micro-batch: by default the last
  5 x 10^8 parameters (partitioned_param_coordinator.py:633), which per_node() leaves out as if all of a model were far larger.
  hpZ: the first gather of a step goes over all ranks, the others stay in a node (:2846).
- FSDP2 gathers in bf16 and reduces in fp32, in every micro-batch as train.py sets it. Output head and final norm stay
  gathered between the two passes (accelerate/utils/fsdp_utils.py:879). HSDP reduces across groups in the last micro-batch.
- gloo has no scatter: it reduces to all ranks and keeps a part.
- Axes besides data parallelism (per_node): a tensor group stays in its node, and each of its ranks is in a ring of its own, over
  the ranks that have the same part. A stage hands on its activations, and gradients back, in the precision of its weights; a tied
  embedding's gradient is summed up by the two stages that have it. Ranks with the same experts gather and reduce them.
Norms, losses and barriers are a few hundred bytes; TCP/IP's headers stand in docs/evidence/communication.md.
"""

from dataclasses import dataclass

from brigade.plan.costs.division import Stage, stages
from brigade.plan.costs.job import Job
from brigade.plan.shape.model_shape import ModelShape


@dataclass(frozen=True)
class Traffic:
    """Bytes. reduced: of gradients; gathered: of weights; handed: from stage to stage."""

    reduced: float
    gathered: float
    handed: float = 0.0

    @property
    def total(self) -> float:
        return self.reduced + self.gathered + self.handed

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.reduced + other.reduced, self.gathered + other.gathered, self.handed + other.handed)

    def __mul__(self, times: float) -> "Traffic":
        return Traffic(times * self.reduced, times * self.gathered, times * self.handed)


def traffic(
    kind: str,
    parameters: float,
    nodes: int,
    node_size: int,
    accumulation: int = 1,
    *,
    half: bool = True,
    shard: int = 0,
    hpz: int = 0,
    kept: float = 0,
    whole: float = 0,
    gloo: bool = False,
) -> Traffic:
    """Return what one of `nodes` nodes of `node_size` ranks sends per optimizer step of `accumulation` micro-batches.

    kind: ddp, zero1, zero2, zero3 or fsdp2; half: bf16 or fp16
    shard: FSDP2's ranks that share one copy (HSDP), 0 for all; hpz: ZeRO-3's ranks with a second copy of the weights
    kept: elements that stay gathered from the forward to the backward pass: FSDP2's unreleased(), or those that ZeRO-3 needs
        again within stage3_max_reuse_distance
    whole: ZeRO-3's parameters below stage3_param_persistence_threshold, which are gathered once per step
    """
    ranks, k = nodes * node_size, accumulation
    scatter = 2 if gloo else 1

    def halves(payload: float, members: int, rings: int = 1) -> float:
        return rings * (members - 1) / members * payload

    if nodes == 1:
        return Traffic(0.0, 0.0)
    weight = 2 if half else 4
    if kind == "ddp":
        return Traffic(2 * halves(4 * parameters, ranks), 0.0)
    if kind in ("zero1", "zero2"):
        one = halves(weight * parameters, ranks)
        return Traffic(2 * one * (k if kind == "zero2" else 1), one)
    if kind == "zero3":
        twice = 2 * (parameters - whole) - kept
        elements = parameters - whole if 0 < hpz <= node_size else k * twice  # hpZ's later gathers stay in the node
        gathered = halves(weight * (elements + whole), ranks)
        return Traffic(k * scatter * halves(weight * parameters, ranks), gathered)
    shard = shard or ranks
    reduced = gathered = 0.0
    if shard > node_size:
        reduced = k * scatter * halves(4 * parameters, shard)
        gathered = k * halves(weight * (2 * parameters - kept), shard)
    replicas = ranks // shard  # one ring for each rank of a group, of which a node has at most node_size
    reduced += 2 * halves(4 * parameters / shard, replicas, min(node_size, shard))
    return Traffic(reduced, gathered)


def unreleased(shape: ModelShape) -> int:
    """Return what FSDP2 gathers once per micro-batch, in elements: the head, which may be the embedding, and the final norm."""
    return (shape.head or shape.embedding) + shape.hidden


def per_node(job: Job, *, gloo: bool = False) -> list[Traffic]:
    """Return what each node of a Job sends per optimizer step.

    Of what train.py divides; full fine-tuning in bf16. The ranks of a stage fill whole nodes, or several stages one node; tensor
    and expert groups stay in a node.
    """
    found, parts, ranks = [], stages(job), job.gpus // job.pipeline
    nodes, per = max(1, ranks // job.node_size), max(1, job.node_size // ranks)  # of a stage; stages on a node
    one = job.tokens * job.shape.hidden * (4 if job.autocast else 2) * job.accumulation * min(ranks, job.node_size)
    for place in range(0, job.pipeline, per):
        first, last = parts[place], parts[place + per - 1]
        handed = Traffic(0.0, 0.0, one * ((not last.last) + (first.place != 0)))
        if job.shape.tied and job.pipeline > per and (first.place == 0 or last.last):
            handed += Traffic(4 * job.shape.vocab * job.shape.hidden * min(ranks, job.node_size), 0.0)
        found += [handed + _shared(job, first, nodes, gloo)] * nodes
    return found


def _shared(job: Job, stage: Stage, nodes: int, gloo: bool) -> Traffic:
    """Return what a node sends of gradients and weights, among the nodes of one stage."""
    kind = "ddp" if job.stage == 0 else f"zero{job.stage}" if job.engine != "fsdp2" else "fsdp2"
    half = job.engine != "stages"
    size, accumulation = min(job.node_size, job.gpus), job.accumulation
    dense = stage.parameters - stage.experts
    # What FSDP2 does not release after the forward pass: the head, or the embedding that is also it, and the final norm.
    kept = (stage.head or stage.embedding) + job.shape.hidden if kind == "fsdp2" else 0.0
    sent = traffic(kind, dense, nodes, size // job.tensor, accumulation, half=half, kept=kept, gloo=gloo) * job.tensor
    if stage.experts:
        sent += traffic(kind, stage.experts, nodes, size // job.expert, accumulation, half=half, gloo=gloo) * job.expert
    return sent
