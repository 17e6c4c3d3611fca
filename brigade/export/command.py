"""`python -m brigade export OUTPUT DEST`: one Hugging Face directory from any strategy's checkpoint, and a GGUF file of it."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from ..errors.console import console
from ..errors.flags import add_flags
from ..errors.tables import table
from ..train.data import tokenizer_trial
from ..train.model.location import load_config, location
from ..train.recipe import flags, remote_code
from ..train.recipe.objectives import objective_of
from ..train.recipe.settings import Settings
from . import card, gguf_tokenizer, hub

if TYPE_CHECKING:
    from ..train.recipe.model_section import ModelSection
    from . import hugging_face

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
GGUF = ("F16", "Q8_0")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add_flags(parser, table(Path(__file__).with_suffix(".yaml")), FORMATS=GGUF, DTYPES=DTYPES)
    parser.add_argument(remote_code.FLAG, action="store_true", help=remote_code.HELP)


def run(options: argparse.Namespace) -> int:
    """Write the model, and show its files and how to load it. Returns 0."""
    from ..train.checkpoint import saved_weights
    from . import hugging_face

    saved_weights.check_run(options.output)
    settings = flags.of_run(options.output, options.trust_remote_code)

    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    dtype = getattr(torch, DTYPES[options.dtype]) if options.dtype else None
    merge = options.merge or bool(options.gguf and settings.recipe.model.use_peft)
    if options.private and not options.push:
        raise UserError(
            "flag --private", "it is about --push, which is not given", "name the repository: --push OWNER/NAME"
        )
    if options.push and settings.recipe.model.use_peft and not merge:
        _check_base(settings)
    name = hub.check_push(options.push, options.private) if options.push else ""
    if options.gguf:
        _check_gguf(settings, options.output, options.destination)
    done = hugging_face.export(
        settings, options.output, options.destination, step=options.step, merge=merge, dtype=dtype
    )
    if options.gguf:
        _write_gguf(settings, done.directory, options.gguf)
    if name:
        final = done.source == options.output
        card.write(done.directory, name, settings, card.base_of(settings), options.output, done.base is None, final)
    _report(
        done,
        settings.recipe.model,
        card.auto_class(settings),
        "" if options.merge == merge else "--gguf writes a whole model",
    )
    if name:
        address, removed = hub.push(done.directory, name, options.private)
        print(f"On the Hub: {address}")
        if removed:
            print(f"Removed there, for an earlier model had them: {', '.join(removed)}")
    return 0


def _check_base(settings: Settings) -> None:
    """Raise UserError where nobody else could load the adapters of a run, for their base lies on this machine."""
    model = settings.recipe.model
    if model.from_scratch or Path(location(settings)).is_dir():
        problem = f"only adapters would be uploaded, and their base, {model.model_name_or_path}, is on this machine"
        raise UserError(hub.PLACE, problem, "--merge: upload a whole model")


def _check_gguf(settings: Settings, output: Path, destination: Path) -> None:
    """Raise UserError where --gguf cannot write a run's model, before anything is read."""
    from transformers import AutoTokenizer

    from ..train.model.load_trained import loading_from_run
    from . import gguf

    if objective_of(settings.recipe.training).scores:
        raise UserError(
            "flag --gguf", "a reward model is no language model, and has no such file", "leave the flag out"
        )
    cure = gguf.cure_by_converter(destination, exported=False)
    if settings.recipe.data.images:
        problem = (
            "a GGUF file holds a language model; llama.cpp keeps its tower in another one, which is not written here"
        )
        raise UserError("flag --gguf", problem, "leave the flag out, and convert the exported model with llama.cpp")
    config = load_config(settings)
    gguf.check_config(config, settings.place("model_name_or_path"), cure)
    if (output / "tokenizer.json").is_file():  # else it comes with the checkpoint, or with the base
        tokenizer_trial.check(output, str(output))
        with loading_from_run(output):
            gguf_tokenizer.vocabulary(
                AutoTokenizer.from_pretrained(output, trust_remote_code=False), config.vocab_size, str(output), cure
            )


def _write_gguf(settings: Settings, folder: Path, kind: str) -> None:
    from . import gguf

    name, base = folder.resolve().name, card.base_of(settings)
    gguf.write(folder, folder / f"{name}-{kind}.gguf", kind, gguf.About(name, base.name, base.licence))


def _report(done: "hugging_face.ExportResult", model: "ModelSection", auto: str, why_merged: str) -> None:
    from rich.table import Table

    table = Table("file", "MB", title=f"{done.directory}, from {done.source}")
    for path in sorted(done.directory.iterdir()):
        table.add_row(path.name, f"{path.stat().st_size / 1e6:,.3f}")
    out = console(soft_wrap=True, highlight=False)
    out.print(table)
    if done.untrained:
        out.print(done.untrained)
    if why_merged:
        out.print(f"{why_merged}, so the adapters were merged into their base.")
    if done.base:
        out.print(f"Only adapters; from_pretrained takes their base from {done.base}.")
        if model.from_scratch:
            cure = "--merge gives a whole model"
            out.print(f"That base is random weights in this machine's cache: {cure}.")
        if model.rope_parameters:
            out.print("That base was stretched by YaRN (rope_parameters): --merge, or load it with the same.")
        if model.load_in_4bit:
            cure = "load it so, or --merge, to get the run's own losses"
            out.print(f"They were trained on that base in 4 bits: {cure}.")
    call = card.load_call(str(done.directory), auto, bool(done.base), model.use_dora, done.base or "")
    out.print(f"Load it: {call}")
    for file in sorted(done.directory.glob("*.gguf")):
        out.print(f"Chat with it: llama-cli -m {file}")
