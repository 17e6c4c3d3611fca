"""What a host's memory and disk have to hold, by formula. Bytes."""

from dataclasses import dataclass

from .job import Job
from .memory import gathered_bytes, stage_parameters
from .states import OPTIMIZER_BYTES

PROCESS = 3.5e9  # resident, of one rank: Python, torch with CUDA's libraries, Transformers
PINNED = (
    1.5  # times what is offloaded: DeepSpeed's own advice (docs: zero3 memory needs), buffers and page-locked copies
)
FILE = 5e9  # bytes of a safetensors file that Transformers writes, and reads one at a time under ZeRO-3


@dataclass(frozen=True)
class Host:
    """Bytes. loading, training: memory of one node; swapped: on its local disks; checkpoint: on the disk that all nodes share."""

    loading: float
    training: float
    checkpoint: float
    swapped: float = 0.0


def host(job: Job) -> Host:
    """A node's share.

    Loading: under DDP and ZeRO-1 and 2 every rank reads all weights before they go to its GPU, in fp32 where they are
    trained without DeepSpeed (brigade/arguments.py: load_dtype). Of FSDP2 one rank of a node does, and sends
    (cpu_ram_efficient_loading). ZeRO-3 reads file by file, and each rank keeps its shard. So it is in 4 bits: tensors go to the
    GPU, and are quantised there, one at a time (transformers 5.23, quantizers/quantizer_bnb_4bit.py: update_device_map).
    Training: what is offloaded; of NVMe the disks hold it, weights, gradients and states (runtime/swap_tensor). The data set is
    read through a memory map, whose pages the system may drop.
    Checkpoint: fp32 weights and the optimizer's states; under DeepSpeed model.safetensors in half precision besides, and
    under ZeRO-1 and 2 the engine's own copy of the same.
    """
    ranks = min(job.node_size, job.gpus)
    psi = stage_parameters(job, job.shape.layers // job.pipeline, first=True, last=job.pipeline == 1)
    trained = job.trained or psi
    width = 4 if job.engine != "zero" and job.method == "full" else 2
    if job.method == "qlora" or (job.engine == "zero" and job.stage == 3):
        loading = ranks * min(width * psi, FILE)
    else:
        loading = width * psi * (1 if job.engine == "fsdp2" else ranks)
    states = 4 + OPTIMIZER_BYTES[job.optimizer]
    share = trained / job.shard_ranks * ranks
    weights = gathered_bytes(job, psi) / job.shard_ranks * ranks
    offloaded = (states + 4) * share if job.offload in ("optimizer", "all") else 0.0
    if job.offload == "all":
        offloaded += weights
    halves = {1: 4, 2: 4, 3: 2}.get(job.stage, 0) if job.engine == "zero" and job.method == "full" else 0
    kept = states * trained + halves * psi
    swapped = (states + 4) * share + weights if job.offload == "nvme" else 0.0
    return Host(loading + ranks * PROCESS, PINNED * offloaded + ranks * PROCESS, kept, swapped)
