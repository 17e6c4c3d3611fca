"""Count what a host's memory and disk have to hold. Bytes."""

from typing import NamedTuple

from ..constants import CONSTANTS
from ..shape.model_shape import ModelShape
from .activations import inputs_on_host
from .communication import held, written
from .comparing import reference_job
from .division import frozen_bytes, gathered_bytes, own_bytes, stages
from .estimate import intervals
from .job import Job


class Host(NamedTuple):
    """Bytes. loading, training: memory of one node; swapped: on its local disks; checkpoint: on the disk that all nodes share."""

    loading: float
    training: float
    checkpoint: float
    swapped: float = 0.0

    @property
    def fullest(self) -> tuple[float, float]:
        """The bytes between which four of five runs lie, of the larger of the two memories."""
        low, high = intervals()["host"]
        return low * max(self.loading, self.training), high * max(self.loading, self.training)


def resident(ranks: int, copied: float = 0.0, offloaded: float = 0.0) -> float:
    """Return the bytes of memory that the ranks of a node own: their own copies of weights, and what is offloaded."""
    return ranks * CONSTANTS.process_bytes + copied + CONSTANTS.pinned * offloaded


def host(job: Job) -> Host:
    """Return what a node has to hold, for a model published in bf16 or MXFP4; benchmarks/hosts.py measures it.

    Loading: copied(), and shards that stay on the host.
    Training: what is offloaded, and layers' inputs; of NVMe the disks hold it, weights, gradients and states
    (runtime/swap_tensor). The data set is read through a memory map, whose pages the system may drop.
    """
    ranks = min(job.node_size, job.gpus)
    psi = stages(job)[0].parameters
    trained = job.trained or job.shape.parameters
    states = 4 + own_bytes(job)
    share = (job.trained or psi) / job.shard_ranks * ranks
    weights = gathered_bytes(job, psi) / job.shard_ranks * ranks
    offloaded = (states + 4) * share if job.offload in ("optimizer", "all") else 0.0
    # FSDP2 has no other copy of trained weights than the fp32 one, which is among the states.
    shards = weights if job.offload == "all" and (job.deepspeed or job.method != "full") else 0.0
    swapped = (states + 4) * share + weights if job.offload == "nvme" else 0.0
    return Host(
        resident(ranks, copied(job), shards or 4 * share * (job.offload == "all")),
        resident(ranks, 0.0, offloaded + shards) + ranks * inputs_on_host(job) + held(job),
        job.replicas.count * checkpoint(job, trained) + written(job),
        swapped,
    )


def copied(job: Job, certain: bool = False) -> float:
    """Return the most bytes of weights that the processes of a node own at once while they read the model.

    certain: only those that are there on any run: without the ends of a model, which its files may have in fp32, and with the
    shard of a single rank, as others may copy theirs a moment later

    Weights that keep their precision and shape are pages of the model's files, which all ranks share and the system may drop.
    What becomes fp32 (weights that are trained without DeepSpeed: train/engines/engine.py: load_dtype), what was published in
    MXFP4 and the experts of a layer, which become one tensor, is made of them one tensor after the other: on the GPU, where it
    stays
    there (Engine.where); under FSDP2 on one rank, which sends the others their shards (train/model/load.py: read_weights); under
    ZeRO-3 on the first rank of all (transformers, integrations/deepspeed.py). Four bits are made on the GPU
    (quantizers/quantizer_bnb_4bit.py). Whole in memory are what DeepSpeed's tensor groups divide later, a second model that is
    sharded, and what DoRA measures, if they are converted. Under ZeRO-3 each rank then copies its shard of what is trained by way
    of the host into one piece (deepspeed/runtime/zero/utils.py: defragment).
    """
    s, ranks, width = job.shape, min(job.node_size, job.gpus), 4 if not job.deepspeed and job.method == "full" else 2
    # The ends become fp32, else they are sent as they lie in the files.
    ends = (s.embedding, s.head) if width == 4 and not certain else (0, 0)
    largest = max(*ends, 3 * converted(s) / s.layers)  # what is fused, its parts, and parts of these
    whole = 0.0
    if job.method == "qlora":
        largest = 0.0
    elif job.engine == "fsdp2":
        whole = 2 * converted(s) if job.dora else 0.0
    elif job.deepspeed and job.tensor > 1:
        whole = 2 * converted(s) * ranks
    elif job.stage < 3:  # each rank has a thread for either end of the model, whose precision the CPU changes
        largest = sum(ends) * ranks
    if job.comparison.second and job.stage >= 3:
        whole = max(whole, 2 * converted(reference_job(job).shape) * ranks)
    in_one_piece = job.deepspeed and job.stage == 3 and job.offload in ("", "optimizer")
    shard = 2 * (job.trained or stages(job)[0].parameters) / job.shard_ranks if in_one_piece else 0.0
    return max(width * largest + whole, shard * (1 if certain else ranks))


def converted(shape: ModelShape) -> float:
    """Return how many parameters a model has in other tensors than its files: all of one in MXFP4, and else its experts."""
    return shape.parameters if shape.family.sinks else shape.moe_layers * shape.experts * shape.expert


def whole_on_gpu(job: Job) -> float:
    """Return the bytes that each GPU holds of a model in 4 bits before its shards are cut (accelerate's FSDP2 and DeepSpeed's
    ZeRO-3 take it when it is quantised, whole). 0 where nothing is cut."""
    cut = job.method == "qlora" and job.stage >= 3 and job.shard_ranks > 1
    return frozen_bytes(job, stages(job)[0].parameters) if cut else 0.0


def checkpoint(job: Job, trained: float) -> float:
    """Return the bytes of a checkpoint with `trained` parameters: they are in fp32, with the optimizer's states.

    DeepSpeed adds the model's own file in half precision, and ZeRO-1 and 2 the engine's copy of it. These two keep a weight that
    two layers share once more (deepspeed/runtime/engine.py saves a state_dict by names), as FSDP2's sharded files do.
    """
    zero = job.stage if job.deepspeed else 0
    kept = (4 + own_bytes(job) + {0: 0, 1: 4, 2: 4, 3: 2}[zero]) * trained
    if job.shape.tied:
        whole = 4 if job.engine == "fsdp2" and job.method == "full" else 0
        kept += {0: whole, 1: 2, 2: 2, 3: 0}[zero] * job.shape.vocab * job.shape.hidden
    return kept
