"""The steps of a run that need torch, by their names in train.py, which imports them once it knows that there is something to
train: a user's mistake and a finished run are told without those seconds."""

from typing import Any

from ...errors import UserError
from ..checkpoint.resume import agree as agree_on_checkpoint
from ..checkpoint.resume import how_to_continue
from ..data.places import name_row
from ..data.prepare import prepare as prepare_data
from ..distributed.consistency import of_model as digest_model
from ..distributed.devices import check as check_gpus_are_seen
from ..images.features import load_checked as load_processor
from ..model.adapter_weights import find as find_adapters
from ..model.load import weights as find_weights
from ..model.location import load_config
from ..model.tokenizer import load_tokenizer
from ..run.directory import Run
from ..run.replicas import divide as divide_into_replicas
from .build import build_trainer
from .environment import prepare_environment
from .kernels import choose_kernels, prove_kernels
from .lengthening import how_lengthened
from .micro_batch import settle_batch
from .out_of_memory import explain as explain_out_of_memory
from .preflight import check_callbacks, check_gpus_differ, check_host, check_run, check_steps
from .summary import summary as print_summary
from .task_loading import prepare as prepare_tasks
from .watch_thread import watched


def explain(run: Run, config: Any, data: Any, resumed: bool, error: BaseException) -> UserError | None:
    """Return an error of a run in a user's terms, where there are better ones; else None. The arguments are those of train.py."""
    return name_row(error, data, run.settings) or explain_out_of_memory(run, config, resumed, error)


__all__ = [
    "agree_on_checkpoint",
    "build_trainer",
    "check_callbacks",
    "check_gpus_are_seen",
    "check_gpus_differ",
    "check_host",
    "check_run",
    "check_steps",
    "choose_kernels",
    "digest_model",
    "divide_into_replicas",
    "explain",
    "find_adapters",
    "find_weights",
    "how_lengthened",
    "how_to_continue",
    "load_config",
    "load_processor",
    "load_tokenizer",
    "prepare_data",
    "prepare_environment",
    "prepare_tasks",
    "print_summary",
    "prove_kernels",
    "settle_batch",
    "watched",
]
