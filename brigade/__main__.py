"""`python -m brigade VERB`: each verb's module stands in its room, and is imported only when it is asked for."""

import argparse
import importlib
import os
import sys
from typing import NoReturn

from . import gate
from .errors import UserError, did_you_mean
from .errors.console import guard_output
from .errors.disk import of_disk

# verb -> its module and what it does
VERBS = {
    "launch": ("launch.command", "train a recipe on all hosts of a hostfile, or write a job file for it"),
    "attach": ("launch.attach", "follow a launch that goes on in the background (launch --detach)"),
    "status": ("launch.status", "how far runs are, who runs them, and how they ended"),
    "top": (
        "top.command",
        "hosts and ranks while they train: step, phase, speed, processors, memory, network, and who is slow",
    ),
    "report": (
        "report.command",
        "a page for the browser: a run's curves, answers, checkpoints and recipe, or several runs side by side",
    ),
    "prepare": ("prepare", "tokenise and pack a recipe's data into the cache, so that no run waits for it"),
    "eval": ("eval", "load a trained model as anybody would, measure its held-out loss and let it answer"),
    "chat": ("chat.command", "talk in the terminal to the model that a run trained, also beside its base"),
    "export": (
        "export.command",
        "write one Hugging Face directory from any checkpoint of a run; also for llama.cpp, or onto the Hub",
    ),
    "plan": ("plan.command", "will it fit, how fast is it, and which strategy: before anything is queued"),
    "check": (
        "check.command",
        "are the hosts sound? reach, versions, devices, disks, network and kernels, before a run",
    ),
    "kernels": ("kernels.command", "prove on this host's device which kernels are right, and how fast"),
    "lint": ("lint.command", "check hostfiles, ds_configs, accelerate configs and recipes, alone and together"),
}
LOOKING = (
    "attach",
    "status",
    "top",
    "report",
    "check",
)  # they compute nothing; `check` says itself what is not supported
_TRAINS = "python train.py trains on this machine, and `python -m brigade launch` on all hosts of a hostfile"


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows what each flag means, its type and its default."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.nargs == 0:  # present or not
            return text
        kind = getattr(action.type, "__name__", "text").replace("Path", "path")
        if action.choices:
            kind = f"one of {', '.join(action.choices)}"
        if "(default: " in text:
            return text.replace("(default: ", f"({kind}, default: ")
        unset = action.default in (None, "", [], 0.0)  # what a flag's absence means stands in its sentence
        return f"{text} ({kind})" if unset else f"{text} ({kind}, default: {action.default})"


class _Parser(argparse.ArgumentParser):
    """Refuses a command line with a place and a cure, as everything in Brigade does."""

    def error(self, message: str) -> NoReturn:
        subject, _, problem = message.partition(": ")
        if subject.startswith("argument "):
            raise UserError(f"flag {subject.removeprefix('argument ')}", problem, f"see {self.prog} --help")
        if subject.endswith("are required"):
            named = [str(action.metavar or action.dest) for action in self._actions if not action.option_strings]
            cure = f"{self.prog} {' '.join(named).upper()}; --help says more"
            raise UserError("command line", f"no {problem.replace(', ', ' and no ')} is named", cure)
        raise UserError("command line", message, f"see {self.prog} --help")


def main(argv: list[str] | None = None) -> int:
    """Run the verb that a command line names. Returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    verb = words[0] if words and words[0] in VERBS else ""
    gate.enter(f"python -m brigade {verb}".strip(), "all", judged=verb not in LOOKING)
    parser = _Parser(prog="python -m brigade", description="Tools around train.py.")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    passes_on = False
    for verb, (module, about) in VERBS.items():
        description = f"{about[0].upper()}{about[1:]}."
        added = verbs.add_parser(verb, help=about, description=description, allow_abbrev=False, formatter_class=_Help)
        if words[:1] == [verb]:
            command = importlib.import_module(f"brigade.{module}")
            command.add_arguments(added)
            passes_on = getattr(command, "PASSES_ON", False)
            if passes_on:
                added.usage = f"{added.format_usage().removeprefix('usage: ').strip()} [flags of train.py ...]"
                added.epilog = _flags_of_train()
    try:
        if not words:
            print(_verbs(), flush=True)
            return 0
        if words[0] not in VERBS and words[0] not in ("-h", "--help"):
            cure = _TRAINS if words[0] == "train" else did_you_mean(words[0], VERBS)
            raise UserError("command line", f"{words[0]!r} is no verb of python -m brigade", cure)
        options, rest = parser.parse_known_args(words)
        options.rest = rest
        if rest and not passes_on:
            raise _unknown(rest, verbs.choices[options.verb])
        _check_flags(rest, verbs.choices[options.verb])
        return command.run(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before a command has its own way to end
        print("stopped by SIGINT", file=sys.stderr)
        return 128 + 2
    except BrokenPipeError:  # whoever reads has read enough: `python -m brigade plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter flushes, and fails, again
        return 1  # as rich does
    except MemoryError:
        problem = "this process may have no more memory (ulimit -v, a control group's limit, or what the host has)"
        print(UserError(f"python -m brigade {words[0]}", problem, "give it more, or do less at once"), file=sys.stderr)
        return 1
    except Exception as error:
        known = of_disk(error)
        if known is None:
            raise
        print(known, file=sys.stderr)
        return 2


def _verbs() -> str:
    """The text that is shown where no verb is named: all verbs, each with what it does."""
    lines = [f"    {verb:<8}  {about}" for verb, (_, about) in VERBS.items()]
    return "\n".join(
        [
            "usage: python -m brigade VERB ...",
            "",
            *lines,
            "",
            f"VERB --help says more; {_TRAINS}.",
        ]
    )


def _flags_of_train() -> str:
    """Where the flags stand that a verb hands on."""
    from .train.recipe.help_text import POINTER

    return f"This command hands on flags of train.py: {POINTER}"


def _check_flags(rest: list[str], parser: argparse.ArgumentParser) -> None:
    """Raise UserError for a flag among the words for train.py that neither it nor the verb has."""
    if not rest:
        return
    from .train.recipe import flags
    from .train.recipe.mistakes import unknown_flag

    theirs = flags.names_of(flags.parser())
    for word in rest:
        if word.startswith("--") and flags.underscores(word)[2:].partition("=")[0] not in theirs:
            raise unknown_flag(word, theirs | flags.names_of(parser))


def _unknown(rest: list[str], parser: argparse.ArgumentParser) -> UserError:
    """The error for words that the verb's parser did not take."""
    flag = next((word.partition("=")[0] for word in rest if word.startswith("-")), "")
    if not flag:
        problem = f"{' '.join(rest)!r}: there are more words than it takes"
        return UserError("command line", problem, f"see {parser.prog} --help")
    known = [name for action in parser._actions for name in action.option_strings]
    return UserError(f"flag {flag}", "there is no such flag", did_you_mean(flag, known))


if __name__ == "__main__":
    guard_output()
    raise SystemExit(main())
