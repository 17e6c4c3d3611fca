"""A command line of train.py: the recipe it names, with its flags over it.

Every key of a recipe is also a flag; a flag wins over the recipe. This module imports no torch.
"""

import argparse
import functools
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import ValidationError

from ...errors import UserError, shortened
from ...errors.tables import Fields
from ..host.urls import checked, is_remote, local_of
from . import continued, help_text, images, objectives, remote_code
from .data_section import OF_DATASETS, Source
from .files import DEFAULT_RECIPE, find, parse_yaml, read_yaml
from .mistakes import explain, unknown_flag, unknown_sections
from .schedules import check_schedule
from .schema import BY_MEMORY, BY_PROOF, SECTION_OF, SECTIONS, Recipe
from .settings import Settings
from .training_section import TrainingSection

STRATEGIES = ("ds_config", "accelerate_config")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError("command line", message, "see `python train.py --help`")


@functools.cache
def parser() -> argparse.ArgumentParser:
    """The parser of train.py: how to run, and every key of a recipe. help_text.py says what each key means."""
    parser = _Parser(
        prog="train.py",
        add_help=False,
        allow_abbrev=False,
        usage="train.py [--recipe FILE] [--KEY VALUE ...] [--help [SECTION|KEY|all]]",
        description="Fine-tune a language model as a recipe says. Every key of a recipe is also a flag.",
    )
    run = parser.add_argument_group("run")
    run.add_argument("--recipe", metavar="FILE", help="default: recipes/tiny/full.yaml")
    where = "default: outputs/RECIPE-STRATEGY; s3://, gs:// or hf:// for object storage (docs/hub.md)"
    run.add_argument("--output_dir", metavar="DIR", help=where)
    run.add_argument("--resume_from_checkpoint", metavar="DIR", help="default: the newest one in the output directory")
    run.add_argument("--fresh", action="store_true", help="begin anew; an old output directory is moved aside")
    run.add_argument("--rehearse", action="store_true", help="run the recipe here with tiny shapes and built-in data")
    before = "end before the first step, with data and what a teacher or a reference says of it ready for runs"
    run.add_argument("--prepare", action="store_true", help=before)
    allow = remote_code.ALLOW
    run.add_argument(allow, metavar="FILE=SHA256", action="append", default=[], help=remote_code.ALLOW_HELP)
    run.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # deepspeed injects it
    for section, model in SECTIONS.items():
        group = parser.add_argument_group(section)
        for key, info in model.model_fields.items():
            names = [f"--{key}", "--deepspeed"] if key == "ds_config" else [f"--{key}"]
            # A bare `--bf16` means true; pydantic judges the value later, so that recipe and flag have one grammar.
            is_switch = bool in (info.annotation, *typing.get_args(info.annotation))
            nargs: dict[str, Any] = {"nargs": "?", "const": "true"} if is_switch else {}
            group.add_argument(*names, dest=key, **nargs)
    return parser


def of_run(output: Path, trust_remote_code: bool, allow_code: Sequence[str] = ()) -> Settings:
    """The settings of the run in `output`. trust_remote_code: whether the flag was given; allow_code: the words after each of
    those flags. Raise UserError as load() does."""
    allowed = [word for each in allow_code for word in (remote_code.ALLOW, each)]
    return load(["--recipe", str(output / "run.yaml"), *([remote_code.FLAG] if trust_remote_code else []), *allowed])


def load(argv: list[str], loads_model: bool = True) -> Settings:
    """The settings that a command line of train.py asks for.

    loads_model: whether the command goes on to load the model or its tokenizer. Where it does not, a recipe in which only the key
        asks for the model's code is read as if it did not ask.

    Raise UserError, naming file or flag, key, value and cure.
    """
    argv = [underscores(word) for word in argv]
    known = parser()
    topic = help_text.topic(argv)
    if topic is not None:
        print(help_text.text(parser.__wrapped__(), topic), end="", flush=True)
        raise SystemExit(0)
    options, unknown = known.parse_known_args(argv)
    if unknown:
        raise unknown_flag(unknown[0], names_of(known))
    if options.rehearse and options.prepare:
        cure = "leave --rehearse or --prepare out"
        raise UserError(
            "flag --prepare", "a rehearsal makes nothing ready for a run: its model and its rows are its own", cure
        )
    path = find(options.recipe, "flag --recipe", "recipe") if options.recipe else DEFAULT_RECIPE
    document = read_yaml(path)
    document.pop("run", None)  # run.yaml's record of hosts and versions
    unknown = sorted(str(section) for section in document if section not in SECTIONS)
    if unknown:
        raise unknown_sections(path, unknown)
    flags = {key: text for key, text in vars(options).items() if key in SECTION_OF and text is not None}
    for section in {SECTION_OF[key] for key in flags}:
        if document.get(section) is None:
            document[section] = {}
    sources: dict[str, str] = {}
    overridden: list[str] = []
    by_proof: tuple[str, ...] = ()
    by_memory: tuple[str, ...] = ()
    if all(isinstance(values, dict) for values in document.values()):  # else validation says so
        sources, overridden = _apply(flags, document)
        by_proof, by_memory = _leave_open(document.get("training", {}))
    try:
        recipe = Recipe.model_validate(document)
    except ValidationError as error:
        raise explain(error, sources, path, document) from None
    model = recipe.model
    overridden += _epochs_beside_steps(recipe.training, flags)
    remote, output = _place_of(options, recipe)
    settings = Settings(
        recipe,
        path,
        output,
        options.resume_from_checkpoint,
        options.fresh,
        options.rehearse,
        options.prepare,
        sources,
        tuple(overridden),
        tuple(word for word in argv if not word.startswith("--local_rank=")),
        by_proof,
        needs_code=model.trust_remote_code,
        remote=remote,
        allowed=remote_code.digests(options.allow_code),
        by_memory=by_memory,
    )
    settings = continued.take_from_model(settings)
    recipe, model = settings.recipe, settings.recipe.model
    check_schedule(recipe.training, settings.place)
    objectives.check(recipe, settings.place)
    images.check(recipe, settings.place)
    settings = continued.fold(settings, downloads=loads_model)
    if settings.needs_code and "trust_remote_code" not in flags:
        if loads_model:
            names = remote_code.names_of(model, path)
            raise remote_code.refusal(settings.place("trust_remote_code"), names, model.revision)
        return settings.with_model(trust_remote_code=False)
    return settings


def _place_of(options: argparse.Namespace, recipe: Recipe) -> tuple[str, Path | None]:
    """Return (the URL in object storage that --output_dir names, or "", the local directory). Raise UserError for a URL that is
    none, and for what does not go together with it."""
    if is_remote(options.resume_from_checkpoint):
        problem, cure = f"{options.resume_from_checkpoint!r} is in object storage", "copy it here, and name the copy"
        raise UserError("flag --resume_from_checkpoint", f"{problem}, and a checkpoint is read from a disk", cure)
    if not is_remote(options.output_dir):
        return "", Path(options.output_dir) if options.output_dir else None
    remote = checked(options.output_dir, "flag --output_dir")
    if recipe.training.sync_every:
        problem = f"{remote!r} is in object storage, and replicas (sync_every) have an output directory each"
        raise UserError("flag --output_dir", problem, "give a directory, and copy it when the run has ended")
    return remote, local_of(remote)


def _apply(flags: dict[str, str], document: dict[str, Fields]) -> tuple[dict[str, str], list[str]]:
    """Put flags into the recipe's document. Return the sources of their keys, and a line for each value that they override."""
    sources: dict[str, str] = {}
    overridden: list[str] = []
    for key, text in flags.items():
        section, value = document[SECTION_OF[key]], _value(key, text)
        if key in section and not _same(section[key], value):
            overridden.append(f"--{key} {text} (the recipe says {shortened(str(section[key]))})")
            # Learning-rate scaling is against the recipe's own batch. In run.yaml the key stands there as null.
            unset = section.get("reference_batch_size") is None and "reference_batch_size" not in flags
            if key == "global_batch_size" and unset:
                section["reference_batch_size"] = section[key]
        section[key] = value
        sources[key] = f"flag --{key}"
    strategies = [key for key in STRATEGIES if key in flags]  # one replaces the recipe's strategy as a whole
    if len(strategies) == 2:
        raise UserError("flags --ds_config, --accelerate_config", "both name a strategy", "keep one of them")
    for key in strategies:
        other = STRATEGIES[1 - STRATEGIES.index(key)]
        gone = document["cluster"].pop(other, None)
        if gone not in (None, "none"):
            recipe_says = f"(the recipe says {other} {shortened(str(gone))})"
            overridden.append(f"--{key} {flags[key]} {recipe_says}")
    data = document.get("data", {})
    if "train_file" in flags and not ("dataset_name" in flags and data.get("dataset_name")):
        for key in ("dataset_name", *OF_DATASETS):  # the flag's data instead of the recipe's, not besides
            value = None if key in flags else data.pop(key, None)
            if value not in (None, Source.model_fields[key].default):
                overridden.append(f"--train_file replaces the recipe's {key}")
    return sources, overridden


def _epochs_beside_steps(training: TrainingSection, flags: dict[str, str]) -> Iterator[str]:
    """A line where num_train_epochs says something and max_steps decides. Raise UserError where a flag is void."""
    steps, epochs = training.max_steps, training.num_train_epochs
    by_flag, default = "num_train_epochs" in flags, TrainingSection.model_fields["num_train_epochs"].default
    if steps < 1 or (epochs == default and not by_flag):
        return
    if by_flag and "max_steps" not in flags:
        problem = f"{epochs:g} has no effect: the recipe's max_steps {steps} decides how long the run is"
        raise UserError("flag --num_train_epochs", problem, "add --max_steps -1, or leave the flag out")
    said, decides = ("--" if key in flags else "the recipe's " for key in ("num_train_epochs", "max_steps"))
    yield f"{said}num_train_epochs {epochs:g} has no effect: {decides}max_steps {steps} decides"


def _leave_open(training: Fields) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Give the keys that say `auto` what they are until they are decided: those left to proofs their defaults, those left to
    memory what takes the least. Return the names of both."""
    by_proof, by_memory = (tuple(key for key in keys if training.get(key) == "auto") for keys in (BY_PROOF, BY_MEMORY))
    for key in by_proof:
        del training[key]
    training.update({key: BY_MEMORY[key] for key in by_memory})
    return by_proof, by_memory


def underscores(word: str) -> str:
    """`--max-steps=3` as `--max_steps=3`: both spellings are in use."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _value(key: str, text: str) -> Any:
    """A flag's value, read as YAML; but names stay as they are: a commit that has only digits is no number."""
    try:
        value = parse_yaml(text) if text.strip() else text
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    wanted = SECTIONS[SECTION_OF[key]].model_fields[key].annotation
    types = (wanted,) if typing.get_origin(wanted) in (list, dict) else typing.get_args(wanted) or (wanted,)
    is_name = str in types and value is not None and not (isinstance(value, dict) and len(types) > 2)
    return text if is_name else value


def _same(ours: Any, theirs: Any) -> bool:
    """Whether two values of a key are the same, also where one is a text: YAML reads 1e-5 as one."""
    try:
        return ours == theirs or float(ours) == float(theirs)
    except (TypeError, ValueError, OverflowError):
        return False


def names_of(parser: argparse.ArgumentParser) -> set[str]:
    """The names of a parser's flags, without the dashes before them."""
    return {option[2:] for action in parser._actions for option in action.option_strings if option.startswith("--")}
