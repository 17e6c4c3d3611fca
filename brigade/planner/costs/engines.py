"""How training engines keep states and move them: one row per engine, each number with its source.

The planner chooses among `ddp`, `zero` and `fsdp2`, which train.py runs; the others are here because published runs, which the
formulas are judged on, used them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Engine:
    """An engine's conventions. Bytes are per trained parameter.

    weights, gradients, optimizer: as they lie in memory; optimizer holds moments and, where there is one, the fp32 master copy
    held: gradients are there for the whole step, against freed after the optimizer's step
    accumulated: read and written to add a micro-batch's gradients to the step's
    reduced, gathered: on the wire, of gradients and of weights
    bucket: of gradients that one collective reduces; 0: a layer's
    hidden: how much of the reduction goes on behind the backward pass, 0 to 1
    everywhere: stages 1 and 2 reduce to every rank, not to the owner alone (DeepSpeed: docs/communication.md)
    per_tensor: weights are gathered tensor by tensor after the step (nanotron's ZeRO-1)
    keep_gathered: what tensor parallelism gathered before a product is kept for the backward pass
    cut_by_cost: pipeline stages are cut by cost, of which the head has a part
    host_seconds: that Python and torch take to launch a layer's kernels, forward and backward, for which short kernels wait: a
        Llama layer of Transformers has 115, at 17 us each; nanotron's, under Megatron's parallelism, took twice as long
    fragmentation: what torch's allocator reserves against what is allocated at the peak: 1.10 in torchtitan's runs of December
        2024, 1.04 in 43 of Megatron's (its tensors have few sizes)
    tensor_hidden: how much of tensor parallelism's communication goes on behind products
    """

    weights: float
    gradients: float
    optimizer: float
    held: bool = True
    accumulated: float = 8.0
    reduced: float = 4.0
    gathered: float = 2.0
    bucket: float = 0.0
    hidden: float = 1.0
    everywhere: bool = False
    per_tensor: bool = False
    keep_gathered: bool = False
    cut_by_cost: bool = False
    tensor_hidden: float = 0.0
    host_seconds: float = 2e-3
    fragmentation: float = 1.1


ENGINES = {
    # torch DDP over fp32 weights under autocast, 25 MB buckets (torch/nn/parallel/distributed.py: bucket_cap_mb)
    "ddp": Engine(4, 4, 8, held=False, bucket=25e6, accumulated=12),
    # FSDP2 with fp32 shards, computing and gathering in bf16, reducing in fp32, layer by layer (training/engines.py)
    "fsdp2": Engine(4, 4, 8, held=False, keep_gathered=True),
    # FSDP with a policy that reduces in bf16 as well
    "fsdp-bf16": Engine(4, 4, 8, held=False, reduced=2),
    # DeepSpeed in bf16: states.py has what lies where; reduces in bf16, in buckets of 5e8 elements; stages 1 and 2 hide none
    "zero": Engine(2, 2, 12, reduced=2, bucket=1e9, hidden=0.0, everywhere=True, accumulated=6),
    # Weights, gradients and moments in bf16 (torchtune's full recipes)
    "pure": Engine(2, 2, 4, held=False, reduced=2, accumulated=6),
    # bf16 weights, fp32 main gradients into which products add, fp32 master (megatron/core/optimizer/distrib_optimizer.py)
    "megatron": Engine(2, 4, 12, bucket=160e6, tensor_hidden=0.5, fragmentation=1.04),
    # Megatron-DeepSpeed and Megatron-LM of 2021 and 2022: one reduction of fp16 gradients after the last micro-batch
    "megatron-2022": Engine(2, 4, 12, reduced=2, bucket=1e12, hidden=0.0, fragmentation=1.04),
    # nanotron: bf16 gradients stay beside their fp32 sum (optim/gradient_accumulator.py), tensors are gathered one by one after a
    # ZeRO-1 step (optim/zero.py), stages are cut by cost (models/base.py), gathered inputs stay (tensor_parallel/functional.py)
    "nanotron": Engine(2, 6, 12, accumulated=14, bucket=25e6, hidden=0.5, per_tensor=True, keep_gathered=True,
                       cut_by_cost=True, host_seconds=4.4e-3, fragmentation=1.04),
}  # fmt: skip
