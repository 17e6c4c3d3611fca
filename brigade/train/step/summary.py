"""What a run says of itself before its first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import versions
from ...errors.console import OF_LOGS, console, counted
from ..checkpoint import compatibility
from ..checkpoint.manifest import oddity, other_versions
from ..data import report
from ..distributed import read_once
from ..engines import parameter_groups
from ..loss import distillation, objective_checks
from ..model import adapter_weights, adapters, new_tokens, packed_samples, parts, token_rows
from ..model.location import location
from ..model.sizes import parameter_count
from ..recipe import objectives
from ..recipe.images import has_own_rates, learning_rates
from ..recipe.program import own_code
from ..run.directory import Kernels, Run
from ..upstream.stateful_layers import missing_packages

if TYPE_CHECKING:
    import torch

    from ..data.prepare import Prepared
    from .context import TrainingContext


def summary(run: Run, trainer: TrainingContext, data: Prepared, checkpoint: Path | None) -> None:
    """Print the resolved run as a short table."""
    from rich.table import Table
    from rich.text import Text

    training, world, strategy = run.settings.recipe.training, run.world, run.strategy
    computed = training.model_copy(update={"padding_free": trainer.collate.layout.end_to_end})
    precision = "bf16" if training.bf16 else "fp16" if training.fp16 else "fp32"
    if training.fp16 and trainer.args.use_cpu:
        precision += " (slow on a CPU: for trials)"
    parameters = trainer.engine.parameter_count(trainer.model)
    device, said = trainer.args.device.type, read_once.allocator_setting()
    allocator = f" ({said})" if said and device != "cpu" else ""
    short = ""
    if training.warmup_steps > trainer.args.max_steps > 0:
        short = f" (still in its {training.warmup_steps:g} steps of warm-up at the end)"
    lines = {
        "recipe": f"{run.settings.recipe_path}, run {run.identity}",
        "model": f"{run.settings.recipe.model.model_name_or_path}, {parameters:,} parameters, {precision}",
        **new_tokens.describe(run.settings, location(run.settings)),
        **_tokens(run, trainer, data),
        **_parts(run, trainer),
        **parameter_groups.describe(trainer),
        **({} if run.settings.recipe.model.use_peft else _saved(trainer)),
        **_frozen(trainer.model, run.settings.recipe.data.images),
        **objectives.describe(run.settings.recipe),
        **distillation.describe(run, data),
        "data": report.figures(data, run.settings.recipe.data, computed, run.batch, trainer.collate.layout.squares),
        **report.lines(data),
        "ranks": f"world size {world.size} on {counted(world.hosts, 'host')}, by {world.launcher}, "
        f"device {device}{allocator}",
        "strategy": f"{strategy.label} (from {strategy.source})",
        **trainer.engine.summary(),
        **trainer.replica.summary(),
        "global batch": str(run.batch),
        "learning rate": f"{run.batch.learning_rate:.3g}, {training.lr_scheduler_type}{short}, optimizer {training.optim}",
        "kernels": _kernels(run.kernels, trainer.model),
        **{key: f"{json.dumps(getattr(training, key))} ({why})" for key, why in run.settings.decided.items()},
        "samples": packed_samples.layout(run.settings, trainer.model.config, run.kernels.attention)[2],
        **objective_checks.describe_sharing(run, trainer.model.config),
        "output": str(run.directory) + ("" if run.shared else ", on each host its own: whole checkpoints in each"),
    }
    if others := versions.not_pinned(versions.of_this_process()):
        lines["versions"] = others
    code = own_code(run.settings)
    if code:
        lines["code of your own"] = ", ".join(f"{file}, sha256 {digest}" for file, digest in code.items())
    if run.made_for:
        lines["made for"] = run.made_for
    if checkpoint:
        others = other_versions(checkpoint)
        before = (
            f", which {compatibility.written_by(checkpoint)} wrote" if not trainer.loads_by_itself(checkpoint) else ""
        )
        odd = oddity(checkpoint)
        notes = (f", written by other code: {others}" if others else "", f", {odd}" if odd else "")
        lines["continues"] = f"from {checkpoint}{before}{''.join(notes)}"
    if run.lengthened:
        lines["lengthened"] = run.lengthened
    if run.aside:
        lines["moved aside"] = f"what was here, to {run.aside}"
    if run.skipped:
        lines["left out"] = "; ".join(run.skipped)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key, value in lines.items():
        table.add_row(key, Text(value))  # Text: brackets in a path are no markup
    longest = max(len(word) for value in lines.values() for word in value.split())
    room = max(map(len, lines)) + 2 + longest  # a path in two pieces cannot be copied; 2: blanks between the columns
    console(columns=max(OF_LOGS, room)).print(table)
    if not checkpoint:  # a run that continues has shown it
        report.show_sample(data, trainer.processing_class)
    for note in (*run.settings.overridden, *run.strategy.overridden):
        print(f"overridden: {note}")


def _tokens(run: Run, trainer: TrainingContext, data: Prepared) -> dict[str, str]:
    """What is trained where adapters are, and which tokens of a sample stay unlearned."""
    section, tokenizer = run.settings.recipe.model, trainer.processing_class
    ids = report.first(data)["input_ids"]
    padding = token_rows.describe_padding(tokenizer, ids, trainer.model)  # of a pipeline the first stage says it
    if not section.use_peft:
        return padding
    model = trainer.engine.whole_model(trainer)
    begin = adapter_weights.describe(run.settings, model)
    untrained = adapters.untrained_chat_tokens(section, tokenizer, ids, model)
    return adapters.describe(section, model) | begin | untrained | padding


def _parts(run: Run, trainer: TrainingContext) -> dict[str, str]:
    """{"parts": "language 1,234 parameters, all trained at 2e-05; vision tower ..."}, or {} where rows have no images."""
    recipe = run.settings.recipe
    if not recipe.data.images:
        return {}
    rates, own = learning_rates(recipe.training, run.batch.learning_rate), has_own_rates(recipe.training)
    every, trained = parts.count_of(trainer.model), parts.count_of(trainer.model, trained=True)
    words = []
    for part, count in every.items():
        share = "all" if trained[part] == count else f"{trained[part]:,}"
        rate = f" at {rates[part]:.3g}" if own else ""
        what = f"{share} trained{rate}" if trained[part] else "frozen"
        words.append(f"{part.replace('_', ' ')} {count:,} parameters, {what}")
    return {"parts": "; ".join(words)}


def _frozen(model: torch.nn.Module, with_images: bool = False) -> dict[str, str]:
    """{"frozen": "model.vision_tower: 417 parameters, which texts do not reach"}, or {} where all gets gradients."""
    every = parts.unreached(model, with_images)
    choosing = {name: module for name, module in every.items() if name.rpartition(".")[2] == "indexer"}
    beyond = {name: module for name, module in every.items() if name not in choosing}
    count, samples = sum(map(parameter_count, beyond.values())), "samples" if with_images else "texts"
    words = [f"{', '.join(beyond)}: {count:,} parameters, which {samples} do not reach"] if beyond else []
    count = sum(map(parameter_count, choosing.values()))
    words += (
        [f"{len(choosing)} indexers: {count:,} parameters, which get no gradient: a choice of tokens has none"]
        if choosing
        else []
    )
    return {"frozen": "; ".join(words)} if words else {}


def _saved(trainer: TrainingContext) -> dict[str, str]:
    """In which precision the model is saved, and what is carried over from its base or is not."""
    base, trained = trainer.base_files, trainer.engine.kept_dtype()
    saved = base.saved_dtype("", trained)
    why = (
        "in which the weights are trained: the base's is higher"
        if base.usual and base.usual != saved
        else "as its base"
    )
    return {"saved in": f"{str(saved).removeprefix('torch.')}, {why}"} | base.describe()


def _kernels(kernels: Kernels, model: torch.nn.Module) -> str:
    """What computes attention and the rest, with one reason for what the device lacks."""
    words = [f"attention {kernels.attention}" + (f" ({kernels.why})" if kernels.why else "")]
    words += [f"Liger {kernels.no_liger or 'on'}"] if kernels.use_liger_kernel or kernels.no_liger else []
    words += [f"torch.compile {kernels.no_compile or 'on'}"] if kernels.torch_compile or kernels.no_compile else []
    missing = missing_packages(model)
    if missing:
        words.append(f"layers with a state in torch, slowly ({' and '.join(missing)} not installed)")
    return ", ".join(words)
