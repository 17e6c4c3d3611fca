"""An out-of-memory error in a user's terms: where, what was in the memory, what would fit; never hidden by what explains it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from brigade.errors import exit_code
from brigade.launch.policy import Fault, would_repeat
from brigade.train.distributed import heartbeat, read_once
from brigade.train.distributed.process import this_process
from brigade.train.recipe.files import REPOSITORY
from brigade.train.run.offers import Offers, Remedies
from brigade.train.watch import out_of_memory

GIB = 2**30
WORDS = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is free."
)
RECIPES = REPOSITORY / "recipes/qwen3-8b"
WAYS = ("--per_device_train_batch_size 2 (61.0 GiB)", "--activation_checkpointing (44.0 GiB)")


def no_snapshot(file):
    raise RuntimeError("an allocator that cannot tell")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 80 GiB, of which torch holds 76 and has allocated 70, in the backward pass of the third step."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 70 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 76 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, 79 * GIB))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(is_integrated=0))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", no_snapshot)
    for name in read_once.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    page = dict(enumerate(this_process.heartbeat.page)) | {heartbeat.PHASE: heartbeat.BACKWARD, heartbeat.STEP: 3.0}
    monkeypatch.setattr(this_process.heartbeat, "page", page)


def run_with(offers, evaluated="auto", home=Path("no such folder"), adapters=False, recipe=Path("recipes/mine.yaml")):
    training = SimpleNamespace(per_device_eval_batch_size=evaluated)
    sections = SimpleNamespace(training=training, model=SimpleNamespace(use_peft=adapters))
    settings = SimpleNamespace(recipe=sections, recipe_path=recipe)
    about = {"batch": SimpleNamespace(micro=8), "home": home, "world": SimpleNamespace(number=3)}
    return SimpleNamespace(offers=offers, settings=settings, **about)


def explained(error, remedies=None, asked=None, resumed=False, **about):
    def what_fits(run, config, needed):
        asked.append(needed)
        return remedies

    offers = Offers(what_fits=what_fits) if remedies else Offers()
    asked = [] if asked is None else asked
    try:
        raise error
    except BaseException as caught:
        return out_of_memory.explain(run_with(offers, **about), None, resumed, caught)


def test_it_says_where_what_was_there_and_what_would_fit(gpu):
    asked = []
    told = explained(torch.OutOfMemoryError(WORDS), Remedies("the planner counts 91.0 GiB", ways=WAYS), asked)
    assert asked == [78 * GIB + 2.5 * GIB]
    place, problem, cure = str(told).splitlines()
    assert place.startswith("error: memory of NVIDIA H100 80GB HBM3, in backward at step 3 (test_out_of_memory.py:")
    held = "torch holds 76.0 of 79.0 GiB, allocated 70.0 at most since"
    assert f"  out of memory while allocating 2.5 GiB: {held}" in problem
    assert problem.endswith("; the planner counts 91.0 GiB") and "other processes" not in problem
    assert cure == f"  cure: by its count the same command fits with {WAYS[0]}, or with {WAYS[1]}"


def test_a_recipe_for_less_memory_beside_the_one_that_ran_is_named(gpu):
    for name, careful in (("full", "full-low-memory"), ("lora", "")):
        told = explained(torch.OutOfMemoryError(WORDS), Remedies("much", ways=WAYS), recipe=RECIPES / f"{name}.yaml")
        assert told.cure.startswith(f"by its count the same command fits with {WAYS[0]}, or with {WAYS[1]}")
        assert told.cure.endswith(f"; {RECIPES / careful}.yaml is the recipe for less memory" if careful else WAYS[1])


@pytest.mark.parametrize("step, resumed, whose, code", [
    (0, False, "user", 2), (1, False, "user", 2), (2, False, "run", 1), (0, True, "run", 1), (501, True, "run", 1),
])  # fmt: skip
def test_in_the_first_step_of_a_new_run_it_is_the_users_else_launch_may_try_again(gpu, step, resumed, whose, code):
    this_process.heartbeat.page[heartbeat.STEP] = step
    told = explained(torch.OutOfMemoryError(WORDS), resumed=resumed)
    assert (told.whose, exit_code(told)) == (whose, code)


def test_what_other_processes_hold_is_their_hosts_and_may_be_tried_again(gpu, monkeypatch):
    """A process that an attempt left behind: the next one lacks its memory while it loads, and another host would not."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 40 * GIB)
    this_process.heartbeat.page[heartbeat.STEP], asked = 0, []
    told = explained(torch.OutOfMemoryError(WORDS), Remedies("much", ways=WAYS), asked)
    assert told.problem.endswith(", and other processes use 38.0 GiB")
    assert told.cure.startswith("free this GPU: `nvidia-smi`")
    assert not asked, "what the run needs is not what is in use"
    assert told.whose == "host"
    fault = Fault("reported", told.problem, ("node1",), code=exit_code(told), whose=told.whose, told=True)
    assert would_repeat([fault], replaceable=False) is None


@pytest.mark.parametrize("setting, said", [
    ({}, "; or with PYTORCH_ALLOC_CONF=expandable_segments:True, against fragmentation"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "; expandable segments are on already, against fragmentation"),
])  # fmt: skip
def test_where_it_fits_by_the_plan_fragments_are_named(gpu, monkeypatch, setting, said):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    told = explained(torch.OutOfMemoryError(WORDS), Remedies("it fits", fits=True, ways=WAYS[:1]))
    assert told.cure.startswith(f"by its count the same command fits with {WAYS[0]}") and said in told.cure


def test_segments_that_grow_are_not_advised_where_they_are_not_set_either(gpu, monkeypatch, tmp_path):
    """In WSL2 the first allocation fails with them (pytorch#192330)."""
    (tmp_path / "osrelease").write_text("5.15.167.4-microsoft-standard-WSL2")
    monkeypatch.setattr(read_once, "KERNEL", tmp_path / "osrelease")
    assert "expandable" not in explained(torch.OutOfMemoryError(WORDS), Remedies("it fits", fits=True, ways=WAYS)).cure


@pytest.mark.parametrize("phase, evaluated, cure", [
    ("evaluation", "auto", "--per_device_eval_batch_size 4 (it is 8), or a strategy that shards more"),
    ("evaluation", 3, "--per_device_eval_batch_size 1 (it is 3), or a strategy that shards more"),
    ("evaluation", 1, "a strategy that shards more or offloads: docs/troubleshooting.md"),
    ("checkpoint", 4, "a strategy that shards more or offloads: docs/troubleshooting.md"),
])  # fmt: skip
def test_an_evaluation_and_a_save_get_no_counts_of_training(gpu, phase, evaluated, cure):
    """No gradients and no activations of training are there: neither checkpointing nor its micro-batch would help."""
    this_process.heartbeat.page[heartbeat.PHASE], asked = getattr(heartbeat, phase.upper()), []
    told = explained(torch.OutOfMemoryError(WORDS), Remedies("the planner", ways=WAYS), asked, evaluated=evaluated)
    assert f", in {phase} at step 3 (" in told.place and told.cure == cure and not asked
    assert "planner" not in told.problem


def test_an_error_that_left_an_evaluation_has_ended_its_phase(gpu):
    def evaluate():
        raise torch.OutOfMemoryError(WORDS)

    try:
        evaluate()
    except torch.OutOfMemoryError as error:
        told = out_of_memory.explain(run_with(Offers()), None, False, error)
    assert ", in evaluation at step 3 (" in told.place and "eval_batch_size 4" in told.cure


def test_without_a_way_without_a_planner_and_without_a_gpu_it_is_told_too(gpu, monkeypatch):
    told = explained(torch.OutOfMemoryError(WORDS), Remedies("much", ways=()))
    assert "no file of ds_configs/ or accelerate_configs/ fits by its count: " in told.cure
    assert "take more GPUs, adapters (use_peft) or" in told.cure
    told = explained(torch.OutOfMemoryError(WORDS), Remedies("much", ways=()), adapters=True)
    assert told.cure.endswith(": take more GPUs or a shorter max_length")
    told = explained(torch.OutOfMemoryError(WORDS))
    assert told.problem.endswith("; no planner is here") and told.cure == out_of_memory.CURE
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: 1 / 0)
    told = explained(torch.OutOfMemoryError("no words"))
    assert told.place.startswith("memory of cpu, ") and told.problem == "out of memory; no planner is here"


def test_a_planner_that_fails_does_not_hide_it(gpu):
    def fail(*_):
        raise ZeroDivisionError("division by\nzero")

    told = out_of_memory.explain(run_with(Offers(what_fits=fail)), None, False, torch.OutOfMemoryError(WORDS))
    assert told.problem.endswith("; the planner cannot say what would fit: ZeroDivisionError: division by zero")
    assert told.problem.startswith("out of memory while allocating 2.5 GiB:") and told.cure == out_of_memory.CURE


@pytest.mark.parametrize("words", [
    "CUDA error: out of memory", "NCCL Error 1: unhandled cuda error\nCuda failure 2 'out of memory'",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
])  # fmt: skip
def test_other_libraries_say_it_in_words(gpu, words):
    assert explained(RuntimeError(words)).problem.startswith("out of memory: torch holds 76.0 of 79.0")


def test_page_locked_memory_of_the_host_lacks_in_the_same_words(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60 * GIB, 79 * GIB))
    assert explained(RuntimeError("CUDA error: out of memory")) is None
    assert explained(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB."))


def test_a_gpu_whose_memory_is_the_hosts_is_not_told_to_be_freed_of_the_host(gpu, monkeypatch):
    """GB10: what the host and its files have counts as others' by CUDA's figures."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, 119 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(is_integrated=1))
    monkeypatch.setattr(out_of_memory.control_groups, "memory_left", lambda: {"available": 2 * GIB})
    told = explained(torch.OutOfMemoryError(WORDS))
    assert "torch holds 76.0 of 78.0 GiB" in told.problem and "other processes" not in told.problem
    assert told.cure != out_of_memory.OTHERS


def test_who_caught_one_and_failed_by_something_else_has_another_error(gpu):
    def try_again():
        try:
            raise torch.OutOfMemoryError(WORDS)
        except torch.OutOfMemoryError:
            raise ValueError("the smaller batch is empty")  # noqa: B904

    with pytest.raises(ValueError) as caught:
        try_again()
    assert out_of_memory.explain(run_with(Offers()), None, False, caught.value) is None


def test_the_place_is_the_innermost_line_outside_of_torch_and_the_whole_traceback_is_kept(gpu, tmp_path):
    def layer(_):
        raise torch.OutOfMemoryError(WORDS)

    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(layer)
    try:
        weight.sum().backward()  # fails below torch/autograd/graph.py
    except torch.OutOfMemoryError as error:
        inside = out_of_memory.explain(run_with(Offers(), home=tmp_path), None, False, error)
    line = layer.__code__.co_firstlineno + 1
    kept = tmp_path / "heartbeats" / "rank-3.traceback"
    assert inside.place.endswith(f"in backward at step 3 (test_out_of_memory.py:{line}, traceback: {kept})")
    assert "graph.py" in kept.read_text() and kept.read_text().rstrip().endswith(WORDS)

    def linear():
        torch.nn.functional.layer_norm(torch.ones(2), [3])

    try:
        linear()
    except RuntimeError as error:
        lacking = torch.OutOfMemoryError(WORDS).with_traceback(error.__traceback__)
        outside = out_of_memory.explain(run_with(Offers()), None, False, lacking)
    assert outside.place.endswith(f" (test_out_of_memory.py:{linear.__code__.co_firstlineno + 1})")


def test_what_the_memory_held_lies_beside_the_traceback(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda file: Path(file).write_text("segments"))
    file = tmp_path / "heartbeats" / "rank-3.memory.pickle"
    told = explained(torch.OutOfMemoryError(WORDS), home=tmp_path)
    assert f"its memory, for pytorch.org/memory_viz: {file}" in told.place
    assert file.read_text() == "segments"


def test_what_raises_from_one_is_one_and_other_errors_are_none(gpu):
    outer = RuntimeError("[Stage 0] failed to run forward")
    outer.__cause__ = torch.OutOfMemoryError(WORDS)
    assert explained(outer)
    assert explained(RuntimeError("CUDA error: an illegal memory access")) is None
    assert explained(ValueError("CUDA out of memory")) is None
