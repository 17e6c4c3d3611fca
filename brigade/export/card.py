"""The model card of an exported run: README.md, with the front matter that the Hub reads."""

import json
import re
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import UserError
from ..train.recipe.files import read_yaml
from ..train.recipe.flags import Settings
from ..train.recipe.method import method_name
from ..train.recipe.objectives import ANSWERS, objective_of
from ..train.run.directory import RECORD, SUCCESS
from .base import Base

CARD = "<!-- This card was made by `python -m brigade export --push`, which replaces it as long as this line stands here. -->"
# Of files that a recipe names: `losses/mine.py:loss` is no name on the Hub, although it has one slash.
_FILE = re.compile(r"\.(py|jinja|jsonl?|ya?ml|csv|tsv|txt|parquet|arrow|gguf|safetensors|zst|gz|zip|tar)(:|$)")
_IN_A_TEXT = re.compile(r"(?<![\w:/.~])(?:~|\.{1,2})?(?:/[^\s/'\"`,;]+)+/")

CLASSIFIER = "AutoModelForSequenceClassification"  # of reward models
WITH_IMAGES = "AutoModelForImageTextToText"
LANGUAGE = "AutoModelForCausalLM"
# What the Hub calls their tasks (https://huggingface.co/docs/hub/models-tasks).
_TASKS = {CLASSIFIER: "text-classification", WITH_IMAGES: "image-text-to-text", LANGUAGE: "text-generation"}


def write(folder: Path, name: str, settings: Settings, base: Base, output: Path, whole: bool, final: bool) -> Path:
    """Write README.md into an exported directory. Returns its path.

    name: of the repository; whole: a whole model, not only adapters; final: the weights that the run ended with, whose losses it
    recorded
    Raises UserError where there is a README.md already.
    """
    path = folder / "README.md"
    if path.exists():
        raise UserError(str(path), "there is a model card already", "remove it, or export to a new directory")
    path.write_text(_text(folder, name, settings, base, output, whole, final))
    return path


def _text(folder: Path, name: str, settings: Settings, base: Base, output: Path, whole: bool, final: bool) -> str:
    from huggingface_hub import ModelCard, ModelCardData

    model, files = settings.recipe.model, sorted(folder.glob("*.gguf"))
    run: dict[str, Any] = read_yaml(output / RECORD).get("run") or {}
    data = ModelCardData(
        base_model=base.name or None,
        library_name="transformers" if whole else "peft",
        pipeline_tag=_TASKS[auto_class(settings)],
        license=base.licence or None,
        datasets=_on_hub(settings) or None,
        tags=[
            *("brigade", method_name(model).lower().replace(" ", "-")),
            *(["reward-model"] if auto_class(settings) == CLASSIFIER else []),
            *(["gguf"] if files else []),
        ],
    )
    started = f"[{base.name}](https://huggingface.co/{base.name})" if base.name else "a model of its own"
    start = "random weights" if model.from_scratch else started
    what = "A whole model" if whole else "Adapters"
    parts = [
        f"# {name.rpartition('/')[2]}",
        CARD,
        f"{what}, trained from {start} by {method_name(model)} with Brigade.",
        *_losses(settings, output, final),
        "## Load it\n\n" + _loading(name, whole, model.use_dora, base, files, auto_class(settings)),
        "## Training data\n\n" + "\n".join(f"- {source}" for source in _sources(settings)),
        "## Recipe\n\nKeys that are not at their defaults:\n\n" + _keys(settings),
    ]
    if batch := run.get("batch"):
        parts.append(f"Batch: {batch}.")
    if versions := run.get("versions"):
        parts.append("## Versions\n\n" + ", ".join(f"{package} {version}" for package, version in versions.items()))
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n", ignore_metadata_errors=True))


def auto_class(settings: Settings) -> str:
    """Return the name of Transformers' class that loads the run's model."""
    if objective_of(settings.recipe.training).scores:
        return CLASSIFIER
    return WITH_IMAGES if settings.recipe.data.images else LANGUAGE


def _losses(settings: Settings, output: Path, final: bool) -> list[str]:
    """Return a sentence about the held-out loss, in a list; none where these weights' was not recorded."""
    if not final or not (output / SUCCESS).is_file():
        return []
    recorded = json.loads((output / SUCCESS).read_text())
    before, after = recorded.get("held_out_loss_before"), recorded.get("held_out_loss")
    if after is None:
        return []
    fell = f", {before:.4f} before training" if before else ""
    objective = objective_of(settings.recipe.training)
    unit = " nats per token" if objective.rows == ANSWERS else f" ({_shown(objective.title)})"
    return [f"Held-out loss: {after:.4f}{unit} after {recorded['steps']} steps{fell}."]


def _loading(name: str, whole: bool, dora: bool, base: Base, files: list[Path], auto: str) -> str:
    load = f'model = {auto}.from_pretrained("{name}")'
    reader = "AutoProcessor" if auto == WITH_IMAGES else "AutoTokenizer"
    imports = [f"from transformers import {auto}, {reader}", ""]
    if not whole and dora:  # transformers 5.23 leaves DoRA's magnitudes out, without a word
        imports.insert(0, "from peft import PeftModel")
        load = f'base = {auto}.from_pretrained("{base.name}")\n'
        load += f'model = PeftModel.from_pretrained(base, "{name}")'
    if not whole and auto == CLASSIFIER:  # with one label, which a base does not say
        imports = [
            "from peft import AutoPeftModelForSequenceClassification",
            "from transformers import AutoTokenizer",
            "",
        ]
        load = f'model = AutoPeftModelForSequenceClassification.from_pretrained("{name}", num_labels=1)'
    variable = reader.removeprefix("Auto").lower()
    lines = ["```python", *imports, f'{variable} = {reader}.from_pretrained("{name}")', load, "```"]
    for file in files:
        lines += ["", f"llama.cpp: `llama-cli -hf {name} --hf-file {file.name}`"]
    return "\n".join(lines)


def _named(settings: Settings) -> list[tuple[str | None, str | None]]:
    """Return (dataset_name, train_file) of each source of a run's data."""
    data = settings.recipe.data
    sources = [(source.dataset_name, source.train_file) for source in data.datasets or ()]
    return sources or [(data.dataset_name, data.train_file)]


def _sources(settings: Settings) -> list[str]:
    return [_shown(name or file) for name, file in _named(settings)]


def _on_hub(settings: Settings) -> list[str]:
    """Return the data sets that are names on the Hub."""
    names = [name for name, _ in _named(settings) if name]
    return [name for name in names if name.count("/") == 1 and not Path(name).expanduser().exists()]


def _keys(settings: Settings) -> str:
    rows = ["| key | value |", "| --- | --- |"]
    for section in ("model", "data", "training"):
        values = getattr(settings.recipe, section).model_dump(exclude_defaults=True)
        for key, value in values.items():
            if key != "datasets":
                rows.append(f"| {section}.{key} | {json.dumps(_shown(value))} |")
    return "\n".join(rows)


def _shown(value: Any) -> Any:
    """Return a value with names on the Hub as they are, and of each path the last part: what lies above it is its owner's."""
    if isinstance(value, dict):
        return {_shown(key): _shown(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(each) for each in value]
    if not isinstance(value, str):
        return value
    if len(value.split()) > 1:  # a text may name a path, too
        return _IN_A_TEXT.sub("", value)
    is_path = value.count("/") > 1 or value.startswith(("/", ".", "~")) or _FILE.search(value) or _is_there(value)
    return PurePosixPath(value.replace("\\", "/")).name if is_path or "\\" in value else value


def _is_there(name: str) -> bool:
    with suppress(OSError, ValueError):  # too long, or a null byte
        return Path(name).exists()
    return False
