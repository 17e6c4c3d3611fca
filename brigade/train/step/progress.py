"""A progress bar and one line per log entry, on the main rank."""

import shutil
import sys
import time
from typing import Any

from transformers import TrainerCallback

from ...errors.console import folded, has_width

_COLUMNS = (
    ("loss", "loss {:.4f}"),
    ("eval_loss", "held-out loss {:.4f}"),
    ("eval_perplexity", "ppl {:.2f}"),
    ("eval_rewards/accuracies", "held-out accuracy {:.1%}"),
    ("eval_answer_score", "score of answers {:.4f}"),
    ("rewards/accuracies", "accuracy {:.1%}"),
    ("rewards/margins", "margin {:.4f}"),
    ("grad_norm", "grad norm {:.3f}"),
    ("learning_rate", "lr {:.2e}"),
    ("tokens_per_second", "{:,.0f} tokens/s"),
    ("tokens_per_second_per_gpu", "{:,.0f} per rank"),
    ("step_time", "{:.2f} s/step"),
    ("data_time", "data wait {:.0%}"),
    ("token_spread", "ranks' tokens differ {:.0f} %"),
    ("expert_balance", "busiest expert {:.1f}x the mean"),
    ("peak_memory_gib", "{:.1f} GiB"),
    ("mfu", "MFU {:.1f} %"),
)


class Progress(TrainerCallback):
    """One line per log entry; a bar beneath it where the error output is a terminal, else the times that it would show."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.began = (0, 0.0)

    def on_train_begin(self, args, state, control, **_):
        if state.is_world_process_zero:
            from tqdm import tqdm

            self.began = state.global_step, time.monotonic()
            self.bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                unit="step",
                dynamic_ncols=True,
                disable=not sys.stderr.isatty(),
            )

    def on_step_end(self, args, state, control, **_):
        if self.bar is not None:
            self.bar.total = state.max_steps  # an elastic run's grows
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **_):
        parts = figures(state.global_step, state.max_steps, logs or {})
        if self.bar is not None and parts:
            if self.bar.disable and state.global_step > self.began[0]:
                parts += self._times(state.global_step - self.began[0], state.max_steps - state.global_step)
            self.write(parts)

    def write(self, parts: list[str]) -> None:
        """Print these parts on a line, above the bar."""
        width = shutil.get_terminal_size().columns if has_width() else None
        self.bar.write(folded(parts, width), file=sys.stdout)
        sys.stdout.flush()

    def _times(self, done: int, left: int) -> list[str]:
        """Evaluations and checkpoints so far count in what is still to come."""
        elapsed = time.monotonic() - self.began[1]
        shown = self.bar.format_interval
        return [f"elapsed {shown(elapsed)}", f"ETA {shown(elapsed / done * left)}"]

    def on_train_end(self, args, state, control, **_):
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def figures(step: int, steps: int, logs: dict[str, float]) -> list[str]:
    """`step 10/100`, `loss 4.2113`, `grad norm 1.204`, ... from a Trainer's log entry; what is not in it is left out, and
    nothing is left of an entry without figures."""
    shown = dict(logs)
    if shown.get("tokens_per_second_per_gpu") == shown.get("tokens_per_second"):
        shown.pop("tokens_per_second_per_gpu", None)  # one process
    if shown.get("step_time"):
        shown["data_time"] = shown.get("data_time", 0.0) / shown["step_time"]
    parts = [form.format(shown[key]) for key, form in _COLUMNS if isinstance(shown.get(key), (int, float))]
    for key, loss in shown.items():
        name = key.removeprefix("eval_").removesuffix("_loss")
        if key == f"eval_{name}_loss":
            perplexity = shown.get(f"eval_{name}_perplexity")
            parts.append(f"{name} {loss:.4f}" + ("" if perplexity is None else f" ppl {perplexity:.2f}"))
    return [f"step {step}/{steps}", *parts] if parts else []
