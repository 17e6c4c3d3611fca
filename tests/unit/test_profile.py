"""What a trace says in short: the longest kernels, communication that nothing hides, waiting; and which ranks are traced."""

from types import SimpleNamespace

import pytest
import torch

from brigade.report import figures
from brigade.report.records import Record
from brigade.train.host.cluster import World
from brigade.train.recipe import flags
from brigade.train.recipe.training_section import TrainingSection
from brigade.train.strategy import Strategy
from brigade.train.upstream import memory_snapshots
from brigade.train.watch import profile
from brigade.train.watch.profile import profiled, summary


def event(name, begin, end, cat="kernel", tid=7):
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "tid": tid}


def test_communication_counts_where_no_kernel_runs_beside_it():
    trace = [
        event("gemm", 0, 4e6),
        event("ncclDevKernel_AllGather", 2e6, 6e6, tid=20),  # 2 of its 4 seconds beside the product
        event("gemm", 8e6, 10e6),  # nothing runs from 6 to 8
        event("aten::mm", 0, 1, cat="cpu_op"),
        {"ph": "M", "name": "process_name"},
    ]
    found = summary(trace)
    assert found["device"] and found["seconds"] == 10
    assert found["parts"] == {"computing": 6, "communication that nothing hides": 2, "waiting": 2}
    assert found["kernels"] == {"gemm": 6, "ncclDevKernel_AllGather": 4}


def test_without_a_gpu_an_operation_is_counted_without_those_that_it_calls():
    trace = [
        event("aten::linear", 0, 10e6, cat="cpu_op"),
        event("aten::mm", 1e6, 9e6, cat="cpu_op"),
        event("aten::copy_", 2e6, 3e6, cat="cpu_op"),
        event("aten::add", 12e6, 13e6, cat="cpu_op"),
        event("gloo:all_reduce", 9e6, 16e6, cat="user_annotation", tid=8),
    ]
    found = summary(trace)
    assert not found["device"]
    assert found["kernels"] == {"aten::mm": 7, "aten::linear": 2, "aten::copy_": 1, "aten::add": 1}
    assert found["parts"] == {"computing": 11, "communication that nothing hides": 5, "waiting": 0}


def test_a_trace_of_nothing_has_no_parts():
    assert summary([])["parts"] == {}


@pytest.mark.parametrize(
    "given", [{"start": 0}, {"steps": 0}, {"begin": 3}, {"ranks": []}, {"ranks": "all"}, {"start": 1.5}]
)
def test_what_is_no_choice_of_steps_is_refused(given):
    with pytest.raises(ValueError, match="start: STEP, steps: NUMBER"):
        TrainingSection.model_validate({"global_batch_size": 1, "profile": given})


def test_a_rank_that_is_not_there_is_told(monkeypatch):
    said = []
    monkeypatch.setattr(profile._log, "warning", lambda *words: said.append(words[0] % words[1:]))
    run = SimpleNamespace(settings=flags.load(["--profile", "{ranks: [0, 7]}"]), strategy=Strategy("ddp", "ddp", "here"),
                          world=World(0, 0, 2, 2, "host", "torchrun"))  # fmt: skip
    assert len(profiled(run)) == 1 and said == ["profile: there is no rank 7 among 2"]


def test_the_page_shows_a_bar_for_each_traced_rank_the_last_of_each():
    line = {"event": "profile", "rank": 1, "parts": {"computing": 1.0}, "kernels": {"gemm": 1.0}, "device": True}
    record = Record(None, "run", events=[line, line | {"parts": {"computing": 3.0}}, line | {"rank": 0}])
    doing, longest = figures._profile([record])
    assert [(bar.name, bar.parts["computing"]) for bar in doing.bars] == [("rank 1", 3.0), ("rank 0", 1.0)]
    assert longest.title == "Longest kernels" and figures._profile([Record(None, "run")]) == []


def test_a_torch_that_records_no_memory_trains_all_the_same(monkeypatch):
    monkeypatch.delattr(torch.cuda.memory, "_record_memory_history")
    assert memory_snapshots.record() is False
