"""How long a run is, and its warm-up."""

from ..data.sampling import GlobalBatches
from ..run.directory import Run


def run_length(run: Run, train_samples: int) -> float:
    """Optimizer steps of a run, in parts where it ends within an epoch."""
    training, batch = run.settings.recipe.training, run.batch
    if training.max_steps > 0:
        return training.max_steps
    return GlobalBatches(train_samples, batch.global_size, 1, 0, 1).steps * training.num_train_epochs


def warmup(run: Run, total: float) -> int:
    """Steps of warm-up of a run of so many steps: a share is of those that our batches make, not of Trainer's estimate."""
    wanted = run.settings.recipe.training.warmup_steps
    return round(wanted * total) if wanted < 1 else int(wanted)
