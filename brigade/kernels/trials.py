"""Prove and time the paths of one job, in the process that worker.py starts.

A job: config, shapes, device ("cuda:0"), rows {path: row}, prove [paths], time [paths that agreed before], rounds
attention: the fastest, for sets of paths and to time others with; "eager" until it is known
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..errors import first_line
from . import compare, models, paths, steps
from .paths import ATTENTION, DTYPE, LAYERS, LIGER, OPTIMIZER, PROMPTS, SET, WITH_ATTENTION, Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Trials:
    """Proves and times the paths of one job, and tells each event."""

    def __init__(self, job: Row, tell: Callable[[Row], None]) -> None:
        self.job, self.tell, self.rows = job, tell, job["rows"]
        self.config, self.shapes, self.device = job["config"], job["shapes"], job["device"]
        self.agreed: list[str] = list(job["time"])
        self.attention: str = job.get("attention", "eager")

    def run(self) -> None:
        register = self.rows.get(self.attention, {}).get("register")
        if register:
            paths.called(register)
        for stage, work in (("prove", self.prove), ("time", self.time)):
            try:
                if not work():
                    return
            except Exception as error:  # whatever a kernel raises
                why = f"{type(error).__name__}: {first_line(error)}"
                self.tell({"path": self.current, "stage": stage, "status": paths.FAILED, "why": why})
                return
        self.tell({"end": True})

    def begin(self, path: str, stage: str) -> Row:
        self.current = path
        self.tell({"begin": path, "stage": stage})
        return self.rows[path]

    # ---- does it compute the same? ---------------------------------------------------------------------------------
    def prove(self) -> bool:
        """Prove the job's paths in order. Returns whether all agreed and none has changed this process."""
        for path in self.job["prove"]:
            row = self.begin(path, "prove")
            if row.get("register"):
                paths.called(row["register"])
            result = {OPTIMIZER: self._optimizer, DTYPE: self._dtype}.get(row["kind"], self._model)(path, row)
            result = {"status": paths.WRONG if result["why"] else paths.PROVEN} | result
            self.tell({"path": path, "stage": "prove", **result})
            if result["status"] == paths.WRONG or row.get("patches"):
                return False
            if result["status"] == paths.PROVEN and row["kind"] != DTYPE and not result.get("forward_only"):
                self.agreed.append(path)
        return True

    @functools.cached_property
    def proof(self) -> compare.Proof:
        return compare.Proof(models.for_proof(self.config), self.shapes["dtype"], self.device)

    def _model(self, path: str, row: Row) -> Row:
        how = path if row["kind"] == ATTENTION else self.attention if row["kind"] in WITH_ATTENTION else "eager"
        forward_only = self.device == "cpu" and bool(row.get("no_backward_on_cpu"))
        told, why = models.way_to_tell(self.config, how, row["kind"] == PROMPTS)
        if why:
            return {"status": paths.ABSENT, "why": why}
        result = compare.worst(self.proof.compare(self._change(path), told, not forward_only))
        return result | {"forward_only": True} if forward_only else result

    def _optimizer(self, path: str, row: Row) -> Row:
        off = steps.error(steps.optimizer, path, self.device)
        beyond = f"three steps are off by {off:.1e} of their change, {row['limit']:.0e} is allowed"
        why = "" if off <= row["limit"] else beyond
        return {"errors": {"step": off}, "allowed": {"step": row["limit"]}, "why": why}

    def _dtype(self, path: str, row: Row) -> Row:
        """Compare eager in a dtype with eager in the next wider one: fp32 with fp64 on a CPU, half precision with fp32 here."""
        config, on = models.for_proof(self.config), self.device
        some = models.samples(config["vocab_size"])
        scale = compare.SCALE if path == "fp16" else 1.0
        wider, where = ("fp64", "cpu") if path == "fp32" else ("fp32", on)
        halves = []
        for dtype, device, factor in ((path, on, scale), (wider, where, 1.0)):
            model = models.build(config, "eager", compare.dtype_of(dtype), device)
            logits, gradients = compare.alone(model, some, device, contextlib.nullcontext(), factor)
            halves.append(([each.cpu() for each in logits], {key: value.cpu() for key, value in gradients.items()}))
        differences = compare.errors(*halves)
        allowed = row["roundoffs"] * compare.ROUNDOFF[path]
        off = {key: differences[key] for key in ("logits", "gradients")}
        result = {"errors": off, "allowed": dict.fromkeys(off, allowed)}
        return result | {"why": compare.in_words(result)}

    def _change(self, path: str) -> Callable[[PreTrainedModel], PreTrainedModel]:
        """A function that turns a model into the path's, in place."""
        row = self.rows[path]

        def change(model: PreTrainedModel) -> PreTrainedModel:
            for part in [row, *(self.rows[name] for name in row.get("uses", ()))]:
                if "change" in part:
                    paths.called(part["change"], model)
            return model

        return change

    # ---- how fast is it? -------------------------------------------------------------------------------------------
    def time(self) -> bool:
        """Time what agreed. Attention comes first: the other kinds are timed with the fastest. Liger comes late: what it patches
        stays patched."""
        fastest = self.attention
        for kind in (ATTENTION, LAYERS, OPTIMIZER, LIGER, SET):
            names = [name for name in self.rows if name in self.agreed and self.rows[name]["kind"] == kind]
            names = [name for name in names if not self.rows[name].get("last")] or names
            if len(names) < 2:
                fastest = names[0] if names and kind == ATTENTION else fastest
                continue
            apart = any(self.rows[name].get("patches") for name in names)
            if apart:
                names.sort(key=lambda name: bool(self.rows[name].get("patches")))
            rounds = [[name] for name in names] if apart else [names]
            times: dict[str, float] = {}
            for some in rounds:
                times |= self._time(some, self._calls(kind, some, fastest))
            for name, milliseconds in times.items():
                self.tell({"path": name, "stage": "time", "ms": milliseconds})
            if kind == ATTENTION:
                fastest = min(times, key=lambda name: times[name])
        return True

    def _calls(self, kind: str, names: list[str], fastest: str) -> dict[str, Callable[[], None]]:
        """{path: a call to time}: a forward and backward pass, or a step of an optimizer."""
        config, dtype = models.for_timing(self.config), compare.dtype_of(self.shapes["dtype"])
        calls: dict[str, Callable[[], None]] = {}
        model = None
        for name in names:
            self.begin(name, "time")
            if self.rows[name].get("register"):
                paths.called(self.rows[name]["register"])
            how = name if kind == ATTENTION else fastest
            if model is None or kind in (LIGER, LAYERS, SET):
                model = self._change(name)(models.build(config, how, dtype, self.device, exact=False))
            if kind == OPTIMIZER:
                sizes = [tuple(value.shape) for value in model.parameters()]
                calls[name] = steps.timed(name, sizes, self.device)
            else:
                calls[name] = self._pass(model, how, kind == ATTENTION)
        return calls

    def _pass(self, model: PreTrainedModel, how: str, switch: bool) -> Callable[[], None]:
        """A call that makes a forward and a backward pass of `model`. switch: first give the model this attention again"""
        some, rows = models.timed_samples(self.shapes, model.config.vocab_size)
        told, _ = models.way_to_tell(self.config, how)
        inputs = models.batch(some, rows, told, self.device, as_a_run=True)

        def call() -> None:
            if switch:
                model.set_attn_implementation(how)
            models.forward(model, inputs, told, labels=True).loss.backward()
            model.zero_grad(set_to_none=True)

        return call

    def _time(self, names: list[str], calls: dict[str, Callable[[], None]]) -> dict[str, float]:
        """{path: milliseconds}: medians over rounds in which all take turns. A first round warms up."""
        times: dict[str, list[float]] = {name: [] for name in names}
        for number in range(self.job["rounds"] + 1):
            for name in names:
                self.begin(name, "time")
                self._wait()
                began = time.perf_counter()
                calls[name]()
                self._wait()
                if number:
                    times[name].append(1000 * (time.perf_counter() - began))
        return {name: statistics.median(values) for name, values in times.items()}

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)
