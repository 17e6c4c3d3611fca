"""`save_steps: auto`: how often a checkpoint pays, by what it costs and how often a cluster of this size fails."""

import math
import time
from collections.abc import Callable

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState

from ...errors.console import counted
from ..distributed import ranks
from ..run.directory import Run

FIRST = 10  # steps from the start to the first checkpoint, which is measured
LONGEST = 3600.0  # seconds: small clusters fail seldom, and an hour is enough to lose
CHANGED = 1.25  # an interval that differs by more than this from the one that was printed is printed again


def best_interval(cost: float, mttf: float) -> float:
    """Seconds of training between two checkpoints that lose least: sqrt(2 C M), of Young (1974) and Daly (2006).

    cost: seconds of training that a checkpoint takes away; mttf: mean seconds between two failures of the run
    """
    return min(math.sqrt(2 * cost * mttf), LONGEST)


class SaveInterval(TrainerCallback):
    """Asks for a checkpoint after FIRST steps, and from then on in the best interval by all that was measured so far. The last
    step is saved by Transformers' own callback."""

    def __init__(self, run: Run, blocked: Callable[[], float]) -> None:
        """blocked: seconds that the last checkpoint held this rank up"""
        training, self.blocked = run.settings.recipe.training, blocked
        self.size = run.world.size * run.strategy.replicas  # whichever of them fails, the run ends
        self.mttf = run.settings.recipe.cluster.gpu_mttf_hours * 3600 / self.size
        # Then each checkpoint has a held-out loss.
        meets = training.load_best_model_at_end or training.early_stopping_patience
        self.multiple = (training.eval_steps or 1) if meets else 1
        self.next = self.printed = 0
        self.began = 0.0
        self.times: list[float] = []

    def on_train_begin(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        self.next = self._from(state.global_step, FIRST)

    def on_step_begin(self, args: object, state: object, control: object, **_: object) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.times = [*self.times[-99:], time.perf_counter() - self.began]
        if state.global_step >= self.next:
            control.should_save = True

    def on_save(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        # The slowest rank decides, and rank 0 says how: all must ask for the same step.
        measured = ranks.gather((self.blocked(), sorted(self.times)[len(self.times) // 2] if self.times else 0.0))
        cost, step = (max(max(column), 1e-6) for column in zip(*measured, strict=True))
        steps = ranks.gather(max(1, round(best_interval(cost, self.mttf) / step)))[0]
        self.next = self._from(state.global_step, steps)
        every = self.next - state.global_step
        ending = state.global_step >= state.max_steps
        if state.is_world_process_zero and not ending and not self.printed / CHANGED <= every <= self.printed * CHANGED:
            self.printed = every
            tqdm.write(
                f"save_steps auto: a checkpoint costs {cost:.3g} s of training, a step takes {step:.3g} s, and "
                f"of {counted(self.size, 'rank')} one fails every {self.mttf / 3600:,.3g} hours: "
                f"the next after {every} steps ({every * step:,.0f} s)"
            )

    def _from(self, step: int, steps: int) -> int:
        """The step that lies at least so many after this one, and has an evaluation where it needs one."""
        return -(-(step + steps) // self.multiple) * self.multiple
