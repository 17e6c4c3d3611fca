"""The cases of resuming: every strategy continues what every strategy wrote, on as many ranks or on others.

Each case is a run of 14 steps, ten of them after the checkpoint that it continues from: fp32, AdamW with weight decay at a rate
that moves the loss by more than 20 %, a cosine schedule, clipped gradients; the checkpoint lies in the middle of an epoch.
"""

from .parity import STRATEGIES

STEPS, SAVED = 14, 4  # an epoch has five steps
TOLERANCE = 1e-5  # relative, over the ten further steps
METHODS: dict[str, list[str]] = {
    "full": [],
    "LoRA": ["--use_peft", "--learning_rate", "2e-2"],
}
SHARED = [
    *["--optim", "adamw_torch", "--learning_rate", "3e-3", "--weight_decay", "0.1", "--max_grad_norm", "1"],
    *["--lr_scheduler_type", "cosine", "--max_steps", str(STEPS), "--eval_steps", "7", "--eval_answers", "0"],
    *["--save_steps", str(SAVED), "--save_total_limit", "1"],
]


def flags(strategy: str, method: str = "full") -> list[str]:
    return [*SHARED, *METHODS[method], *STRATEGIES.get(strategy, [])]
