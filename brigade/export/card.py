"""The model card of an exported run: README.md, with the front matter that the Hub reads."""

import json
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..train.recipe.files import read_yaml
from ..train.recipe.flags import Settings
from ..train.recipe.method import method_name
from ..train.recipe.objectives import ANSWERS, objective_of
from ..train.run.directory import RECORD, SUCCESS
from .base import Base

CARD = "<!-- This card was made by `python -m brigade export --push`, which replaces it as long as this line stands here. -->"
# Keys whose values are directories and files of one machine, of which only the names are shown.
_PATHS = (
    "model_name_or_path",
    "tokenizer_name_or_path",
    "processor_name_or_path",
    "adapter_name_or_path",
    "train_file",
    "validation_file",
    "dataset_name",
    "chat_template",
)


CLASSIFIER = "AutoModelForSequenceClassification"  # of reward models
WITH_IMAGES = "AutoModelForImageTextToText"


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
        pipeline_tag="image-text-to-text" if settings.recipe.data.images else "text-generation",
        license=base.licence or None,
        datasets=_on_hub(settings) or None,
        tags=["brigade", method_name(model).lower().replace(" ", "-"), *(["gguf"] if files else [])],
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
    return WITH_IMAGES if settings.recipe.data.images else "AutoModelForCausalLM"


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
    unit = " nats per token" if objective.rows == ANSWERS else f" ({objective.title})"
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
                rows.append(f"| {section}.{key} | {_shown(value) if key in _PATHS else json.dumps(value)} |")
    return "\n".join(rows)


def _shown(value: Any) -> str:
    """Return a name on the Hub as it is, and only the last part of a path: what lies above it is its owner's."""
    text = str(value)
    is_path = text.count("/") > 1 or text.startswith(("/", ".", "~")) or Path(text).exists()
    return Path(text).name if is_path else text
