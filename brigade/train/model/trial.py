"""What a run relies on is tried with a tiny random model of its architecture, on a CPU: what cannot be tried is not trusted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ...errors import first_line
from .. import upstream
from ..distributed.process import this_process
from .tiny import shrink

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


FAILS = "a tiny model to try it with fails"


@contextmanager
def alone() -> Iterator[None]:
    """Compute on the CPU, with the same random numbers each time; the process's own stay as they are."""
    with _models_as_they_were(), upstream.without_zero3(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        yield


@contextmanager
def _models_as_they_were() -> Iterator[None]:
    # A tiny model is computed on the CPU, and partly in fp64, where Liger's kernels are not.
    unfused = this_process.unfused
    now = {name: {key: vars(sys.modules[name])[key] for key in values} for name, values in unfused.items()}
    try:
        for name, values in unfused.items():
            vars(sys.modules[name]).update(values)
        yield
    finally:
        for name, others in now.items():
            vars(sys.modules[name]).update(others)


@dataclass(frozen=True)
class Architecture:
    """A config, for functions that remember what they have tried (functools.lru_cache): two are the same whose texts are."""

    text: str
    config: PreTrainedConfig = field(compare=False, repr=False)

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Architecture:
        return cls(config.to_json_string(use_diff=False), config)


def tiny_model(config: PreTrainedConfig, images: bool = False, divisor: int = 1, **options: object) -> PreTrainedModel:
    """Return a tiny random model of a config's architecture, in fp32 and without dropout.

    images: whether it is built with its vision tower; divisor: ranks that have to divide its heads; options: of from_config
    """
    tiny = type(config).from_dict(shrink(config.to_dict(), divisor))
    return upstream.auto_class_for(images).from_config(tiny, **{"dtype": torch.float32, **options}).eval()


def why_not(ask: Callable[[], str], fails: str = FAILS) -> str:
    """Return what is wrong, as ask() says, "" for nothing; or that it could not be asked. fails: in which words"""
    with alone():
        try:
            return ask()
        except Exception as error:
            return f"{fails} ({type(error).__name__}: {first_line(error)})"
