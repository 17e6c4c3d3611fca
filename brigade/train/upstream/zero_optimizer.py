"""DeepSpeed's optimizers where Transformers takes them for torch's."""


def name_first_rate(learning_rate: float) -> None:
    """Give DeepSpeed's optimizers, which have no `defaults`, the learning rate that polynomial and cosine_with_min_lr read there
    (transformers/optimization.py; deepspeed/runtime/base_optimizer.py: DeepSpeedOptimizer)."""
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer

    DeepSpeedOptimizer.defaults = {"lr": learning_rate}
