"""What ZeRO-3 allocates at most, beside the planner's count: DeepSpeed's own code as rank 0 of eight ranks.

    python -m benchmarks.zero3_peak            # prints both, in MB

One process is rank 0 of a group whose other ranks are only pretended (benchmarks/launching.py). It trains a small Llama on a CPU,
with the proportions of a 32B model's layers, head, live parameters and sub-groups, and every storage is counted while it lives.
"""

import json
import weakref
from typing import Any

from brigade.plan.constants import CONSTANTS
from brigade.plan.costs import memory
from brigade.plan.costs.job import Job
from brigade.plan.shape.find import described
from brigade.train.strategy import state_bytes

from .launching import pretend

RANKS, TOKENS, STEPS = 8, 64, 3
SIZES = {"hidden_size": 512, "intermediate_size": 2760, "num_hidden_layers": 8, "vocab_size": 15200}
CONFIG = SIZES | {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "model_type": "llama",
    "tie_word_embeddings": False,
}
LIVE, SUB_GROUP = (
    2.05,
    4.1,
)  # layers that may stay gathered, and sub-groups of a shard, as a 32B model on eight ranks has them


def measured() -> dict[str, int]:
    """Return the most bytes that lived in forward and backward passes, and in steps, with `live` and `sub_group` elements."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    pretend(RANKS)
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    from brigade.train.upstream import deepspeed_kernels

    deepspeed_kernels.without_shared_memory()
    living: dict[int, int] = {}
    most, phase = {"passes": 0, "step": 0, "before": 0}, "before"

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = function(*args, **(kwargs or {}))
            for tensor in tree_leaves(given):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    if storage._cdata not in living:
                        weakref.finalize(storage, living.pop, storage._cdata, 0)
                    living[storage._cdata] = storage.nbytes()
            most[phase] = max(most[phase], sum(living.values()))
            return given

    with Count():
        model = LlamaForCausalLM(LlamaConfig(**{key: CONFIG[key] for key in CONFIG if key != "model_type"}))
        model = model.to(torch.bfloat16)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.enable_input_require_grads()
        model.train()
        parameters = sum(weight.numel() for weight in model.parameters())
        live = int(LIVE * sum(weight.numel() for weight in model.model.layers[0].parameters()))
        sub_group, square = int(parameters / RANKS / SUB_GROUP), SIZES["hidden_size"] ** 2
        zero = {"stage": 3, "sub_group_size": sub_group, "reduce_bucket_size": square}
        zero |= {"stage3_prefetch_bucket_size": int(0.9 * square), "stage3_max_live_parameters": live}
        zero |= {"stage3_param_persistence_threshold": 10 * SIZES["hidden_size"], "stage3_max_reuse_distance": live}
        config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
        config |= {"zero_allow_untested_optimizer": True, "gradient_clipping": 1.0}
        adam = torch.optim.AdamW(model.parameters(), lr=0.0, foreach=True)
        run, *_ = deepspeed.initialize(model=model, config=config, optimizer=adam, dist_init_required=False)
        tokens = torch.zeros((1, TOKENS), dtype=torch.long)
        for _ in range(STEPS):  # from the second on DeepSpeed knows the order of its parameters
            phase = "passes"
            run.backward(run(input_ids=tokens, labels=tokens).loss)
            phase = "step"
            run.step()
    return most | {"live": live, "sub_group": sub_group}


def counted(live: int, sub_group: int) -> dict[str, float]:
    """Return the planner's count of the same, for a model that may have so many elements gathered, and stepped at once."""
    object.__setattr__(CONSTANTS, "live", live)
    memory.SUB_GROUP_SIZE = state_bytes.SUB_GROUP_SIZE = sub_group
    shape = described(CONFIG, "a small Llama", "small")
    job = Job(
        shape,
        TOKENS,
        engine="zero",
        stage=3,
        data=RANKS,
        checkpointing="full",
        loss="released",
        optimizer="adamw_torch",
    )
    *passes, step = (moment.allocated for moment in memory.moments(job))
    return {"passes": max(passes), "step": step}


def main() -> None:
    found = measured()
    by_formula = counted(found["live"], found["sub_group"])
    print(json.dumps({name: [round(found[name] / 1e6, 1), round(by_formula[name] / 1e6, 1)] for name in by_formula}))


if __name__ == "__main__":
    main()
