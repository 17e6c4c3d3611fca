"""The model card of an exported run: README.md, with the front matter that the Hub reads."""

import json
import re
from contextlib import suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ..errors import UserError
from ..train.data.sources import each
from ..train.host.hub import is_path
from ..train.model import packaged
from ..train.model.location import location
from ..train.recipe.files import read_yaml
from ..train.recipe.method import method_name
from ..train.recipe.objectives import objective_of
from ..train.recipe.program import NAMES_CODE
from ..train.recipe.settings import Settings
from ..train.run.directory import RECORD
from ..train.run.success import SUCCESS

CARD = "<!-- This card was made by `python -m brigade export --push`, which replaces it as long as this line stands here. -->"
# Keys whose values are names on the Hub, built-in names or paths; and keys whose values with a slash are paths.
_NAMES = {
    "model_name_or_path", "tokenizer_name_or_path", "processor_name_or_path", "adapter_name_or_path", "dataset_name", "reference",
}  # fmt: skip
_PATHS = {"train_file", "validation_file", "image_folder", "chat_template", "eval_tasks", *NAMES_CODE}
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# Of files that a recipe names: `losses/mine.py:loss` is no name on the Hub, although it has one slash.
_FILE = re.compile(r"\.(py|jinja|jsonl?|ya?ml|csv|tsv|txt|parquet|arrow|gguf|safetensors|zst|gz|zip|tar)(:|$)")
_IN_A_TEXT = re.compile(r"(?<![\w:/.~])(?:~|\.{1,2})?(?:/[^\s/'\"`,;]+)+/")

_BEGINS = ("/", "./", "../", "~")
_WINDOWS = re.compile(r"[A-Za-z]:\\|\\\\\w")  # a drive's or a host's; regular expressions have backslashes, too

CLASSIFIER = "AutoModelForSequenceClassification"  # of reward models
WITH_IMAGES = "AutoModelForImageTextToText"
LANGUAGE = "AutoModelForCausalLM"
# What the Hub calls their tasks (https://huggingface.co/docs/hub/models-tasks).
_TASKS = {CLASSIFIER: "text-classification", WITH_IMAGES: "image-text-to-text", LANGUAGE: "text-generation"}


class Base(NamedTuple):
    """name: on the Hub, "" of a local directory and of random weights; licence: an SPDX name in lower case, "" where unknown"""

    name: str = ""
    licence: str = ""


def base_of(settings: Settings) -> Base:
    """Return the base of a run. Its licence is that of its model card, which the Hub or its directory has."""
    model = settings.recipe.model
    if model.from_scratch:
        return Base()
    name = model.model_name_or_path
    if name in packaged.MODELS:
        known = packaged.MODELS[name]
        return Base(known.source, known.licence.lower())
    folder = Path(location(settings))
    if folder.is_dir():
        return Base("", _licence(folder / "README.md"))
    from huggingface_hub import hf_hub_download

    with suppress(Exception):  # no card, or no network: the licence is unknown
        return Base(name, _licence(Path(hf_hub_download(name, "README.md", revision=model.revision))))
    return Base(name)


def _licence(card: Path) -> str:
    from huggingface_hub import ModelCard

    with suppress(Exception):  # no card, or one whose front matter is no YAML
        return str(ModelCard.load(card, ignore_metadata_errors=True).data.license or "").lower()
    return ""


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
    batch = run.get("batch")
    if batch:
        parts.append(f"Batch: {batch}.")
    versions = run.get("versions")
    if versions:
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
    title = _shown(objective.title, "objective")
    unit = f" ({title})" if objective.compares else " nats per token"
    return [f"Held-out loss: {after:.4f}{unit} after {recorded['steps']} steps{fell}."]


def load_call(name: str, auto: str, adapters: bool, dora: bool, base: str) -> str:
    """Return the expression that loads what was exported. auto: see auto_class(); base: of adapters"""
    if adapters and auto == CLASSIFIER:  # with one label, which a base does not say
        return f'AutoPeftModelForSequenceClassification.from_pretrained("{name}", num_labels=1)'
    if adapters and dora:  # Transformers leaves DoRA's magnitudes out, without a word
        return f'PeftModel.from_pretrained({auto}.from_pretrained("{base}"), "{name}")'
    return f'{auto}.from_pretrained("{name}")'


def _loading(name: str, whole: bool, dora: bool, base: Base, files: list[Path], auto: str) -> str:
    call = load_call(name, auto, not whole, dora, base.name)
    reader = "AutoProcessor" if auto == WITH_IMAGES else "AutoTokenizer"
    of_peft = re.match(r"\w*Peft\w+", call)
    imports = [f"from peft import {of_peft[0]}"] if of_peft else []
    imports += [f"from transformers import {f'{auto}, ' if auto in call else ''}{reader}", ""]
    variable = reader.removeprefix("Auto").lower()
    lines = ["```python", *imports, f'{variable} = {reader}.from_pretrained("{name}")', f"model = {call}", "```"]
    for file in files:
        lines += ["", f"llama.cpp: `llama-cli -hf {name} --hf-file {file.name}`"]
    return "\n".join(lines)


def _sources(settings: Settings) -> list[str]:
    named = ((source.dataset_name, source.train_file) for source, _ in each(settings))
    return [_shown(name, "dataset_name") if name else _shown(file, "train_file") for name, file in named]


def _on_hub(settings: Settings) -> list[str]:
    """Return the data sets that are names on the Hub."""
    names = (source.dataset_name for source, _ in each(settings))
    return [name for name in names if name and "/" in name and _is_on_hub(name)]


def _keys(settings: Settings) -> str:
    rows = ["| key | value |", "| --- | --- |"]
    for section in ("model", "data", "training"):
        values = getattr(settings.recipe, section).model_dump(exclude_defaults=True)
        for key, value in values.items():
            if key != "datasets":
                rows.append(f"| {section}.{key} | {json.dumps(_shown(value, key))} |")
    return "\n".join(rows)


def _shown(value: object, key: str = "") -> Any:
    """Return a value of a recipe's key with names on the Hub as they are, and of each path the last part: what lies above it is
    its owner's, and so is what an address asks for behind its path."""
    if isinstance(value, dict):
        return {_shown(name): _shown(each, key) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(each, key) for each in value]
    if not isinstance(value, str):
        return value
    if _WINDOWS.match(value):
        return PureWindowsPath(value).name
    if key in _NAMES:
        is_path = not _is_on_hub(value)
    elif key not in _PATHS and len(value.split()) > 1:  # a text may name a path, too
        return _IN_A_TEXT.sub("", value)
    else:
        is_path = key in _PATHS or value.count("/") > 1 or value.startswith(_BEGINS) or _is_there(value)
        is_path = is_path or bool(_FILE.search(value))
    return PurePosixPath(urlsplit(value).path if "://" in value else value).name if is_path else value


def _is_on_hub(name: str) -> bool:
    """Whether a name can be one on the Hub, or a built-in one."""
    return bool(_HUB.fullmatch(name)) and not (is_path(name) or _FILE.search(name) or _is_there(name))


def _is_there(name: str) -> bool:
    with suppress(OSError, ValueError):  # too long, or a null byte
        return Path(name).exists()
    return False
