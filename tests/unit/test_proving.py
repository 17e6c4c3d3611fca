"""Kernels that prove themselves: what is wrong, slow or broken is found and not taken; a proof is for what it was made with."""

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from brigade.cluster import World
from brigade.kernels import __main__ as command
from brigade.kernels import auto, judging, models, paths, proofs, prove, steps, worker
from brigade.model import attention, packed_samples
from brigade.recipe.files import REPOSITORY
from testing import faulty_kernels

SHAPES = {"dtype": "bf16", "max_length": 256, "micro_batch": 1, "packing": True}
LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "intermediate_size": 1024}
CPU = {"type": "cpu", "name": "a CPU", "capability": None, "driver": "6.1", "cuda": None}


def gpu(name, capability, driver="570.86.10"):
    return {"type": "cuda", "name": name, "capability": capability, "driver": driver, "cuda": "12.8"}


A100, H100, RTX_4090 = (
    gpu("NVIDIA A100-SXM4-80GB", 8.0),
    gpu("NVIDIA H100 80GB HBM3", 9.0),
    gpu("NVIDIA GeForce RTX 4090", 8.9),
)


def config(family="llama", **values):
    return models.as_json(transformers.AutoConfig.for_model(family, **(LLAMA if family == "llama" else {}) | values))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BRIGADE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def tried(rows, family="llama", dtype="fp32", **values):
    """The last event of each path, of a worker in this process."""
    events = []
    job = {"config": config(family, **values), "shapes": SHAPES | {"dtype": dtype}, "device": "cpu", "rows": rows}
    worker.Worker(job | {"prove": list(rows), "time": [], "rounds": 1}, events.append).run()
    return {event["path"]: event for event in events if "path" in event and event["stage"] == "prove"}


def own(*names):
    return {name: paths.table()[name] for name in names}


# ---- what agrees, and what does not --------------------------------------------------------------------------------
@pytest.mark.parametrize("family, dtype", [("llama", "fp32"), ("llama", "bf16"), ("mistral", "bf16"), ("gpt2", "bf16"),
    *(pytest.param(family, dtype, marks=pytest.mark.slow) for family in ("qwen3_moe", "gemma3_text", "deepseek_v3")
      for dtype in ("fp32", "bf16"))])  # fmt: skip
def test_what_cpus_have_agrees_with_eager(family, dtype):
    found = tried(own("varlen", "sdpa", "eager"), family, dtype)
    assert {name: event["why"] for name, event in found.items()} == {"varlen": "", "sdpa": "", "eager": ""}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("name, said", [
    ("ignores_borders", "a sample moves another"), ("leaks_one_token", "a sample moves another"),
    ("gradient_one_percent_off", "bias is off by"),
])  # fmt: skip
def test_what_is_wrong_on_purpose_is_found(name, said, family, dtype):
    found = tried({name: faulty_kernels.row(name)}, family, dtype)[name]
    assert found["status"] == "wrong" and said in found["why"]


def test_what_varlen_lacks_is_found_though_a_tiny_model_could_hide_it():
    """Softcapping and sinks: each is made large enough to be seen."""
    for family in ("gemma2", "gpt_oss"):
        assert tried(own("varlen"), family)["varlen"]["status"] == "wrong"
        assert tried(own("eager"), family)["eager"]["status"] == "proven"


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "llama"])
def test_what_auto_may_take_is_told_where_samples_begin(family):
    """Else a proven path would turn a recipe that packs into one that is refused."""
    known = transformers.AutoConfig.for_model(family)
    for name, row in paths.table().items():
        if row.get("auto") and name in attention.NEEDS_CUMULATIVE_LENGTHS:
            assert packed_samples.method_of(known, name)[0] == packed_samples.LENGTHS


@pytest.mark.slow
def test_flex_attention_is_compared_by_its_logits_on_a_cpu():
    found = tried(own("flex_attention"))["flex_attention"]
    assert found["status"] == "proven" and found["forward_only"] and set(found["errors"]) == {"logits", "moved"}
    assert judging.judge(own("flex_attention"), {"flex_attention": {"kind": "attention", **found}}) == {}


def test_a_model_whose_samples_see_each_other_proves_nothing():
    limits = {"seconds": 0.0, "path": 1.0, "rounds": 1}  # no process is started for what nobody can compare
    for written, said in ((config("bloom", n_head=4, hidden_size=64), "see each other"),
                          (config() | {models.OWN_CODE: "Own"}, "Own has code of its own"),
                          (config() | {"model_type": "unheard_of"}, "unheard_of")):  # fmt: skip
        found = prove.on_this_host(written, SHAPES, rows=own("sdpa"), limits=limits)["paths"]["sdpa"]
        assert found["status"] == "absent" and said in found["why"]


@pytest.mark.parametrize("path", ["fp32", "bf16", "fp16"])
def test_dtypes(path):
    assert tried(own(path))[path]["status"] == "proven"


@pytest.mark.parametrize("name", ["adamw_torch_fused", "adamw_torch_foreach", "adamw_torch", "adamw_8bit"])
def test_optimizers_step_as_the_formula_says(name):
    assert steps.error(steps.optimizer, name, "cpu") <= paths.table()[name]["limit"]


@pytest.mark.parametrize("change", [{"weight_decay": 0.0}, {"betas": (0.9, 0.999)}, {"eps": 0.1}, {"lr": 1.01e-3}])
def test_an_optimizer_that_steps_otherwise_is_found(change):
    def other(name, parameters):
        options = {"lr": steps.RATE, "betas": steps.BETAS, "eps": steps.EPSILON, "weight_decay": steps.DECAY}
        return torch.optim.AdamW(parameters, **options | change)

    assert steps.error(other, "adamw_torch", "cpu") > paths.table()["adamw_torch"]["limit"]


def test_the_tiny_model_keeps_what_kernels_depend_on():
    recipes = sorted(path for path in (REPOSITORY / "recipes").glob("*/config.json"))
    assert len(recipes) > 3
    for path in recipes:
        whole = models.as_json(transformers.AutoConfig.from_pretrained(path.parent))
        tiny, layer = models.for_proof(whole), models.for_timing(whole)
        assert models.head_size(tiny) == models.head_size(layer) == models.head_size(whole), path
        models.described(tiny), models.described(layer)
        if whole.get("num_key_value_heads"):
            ratios = [each["num_attention_heads"] // each["num_key_value_heads"] for each in (whole, tiny, layer)]
            assert len(set(ratios)) == 1, path
        if whole.get("layer_types"):
            assert set(tiny["layer_types"]) == set(layer["layer_types"]) == set(whole["layer_types"]), path


@pytest.mark.parametrize("name, device, dtype, said", [
    ("flash_attention_2", CPU, "bf16", "needs a GPU"), ("flash_attention_2", A100, "fp32", "bf16 and fp16 only"),
    ("flash_attention_2", gpu("Tesla T4", 7.5), "fp16", "needs compute capability 8.0, and Tesla T4 has 7.5"),
    ("flash_attention_3", RTX_4090, "bf16", "needs compute capability 9.0"), ("liger", A100, "bf16", "not installed"),
    ("bf16", gpu("Tesla T4", 7.5), "fp32", "compute capability 8.0"), ("varlen", CPU, "bf16", ""), ("varlen", H100, "bf16", ""),
    ("varlen", gpu("Tesla T4", 7.5), "fp32", ""),
])  # fmt: skip
def test_what_a_device_lacks(name, device, dtype, said):
    why = paths.lacking(paths.table()[name], device, dtype)
    assert said in why if said else not why


@pytest.mark.parametrize("family, name, said", [
    ("gpt_oss", "sdpa", "no sdpa"), ("gemma2", "varlen", "no sdpa"), ("llama4_text", "varlen", "attention_chunk_size"),
    ("gpt_oss", "flash_attention_2", ""), ("llama", "varlen", ""), ("llama", "flex_attention", ""), ("gemma2", "eager", ""),
])  # fmt: skip
def test_what_a_model_does_not_take_is_not_tried(family, name, said):
    chunks = {"attention_chunk_size": 64} if family == "llama4_text" else {}
    why = models.unsupported(config(family, **chunks), name, paths.table()[name])
    assert said in why if said else not why


# ---- which is taken ------------------------------------------------------------------------------------------------
def judged(**milliseconds):
    rows = own("varlen", "flash_attention_2", "sdpa", "eager")
    found = {name: {"kind": "attention", "status": "wrong" if name not in milliseconds else "proven"} for name in rows}
    for name, time in milliseconds.items():
        found[name]["ms"] = time
    return judging.judge(rows, found), {name: row["status"] for name, row in found.items()}


def test_the_fastest_that_agrees_is_taken():
    fastest, status = judged(varlen=10.0, flash_attention_2=8.0, sdpa=30.0, eager=None)
    assert fastest == {"attention": "flash_attention_2"}
    assert status == {"varlen": "slower", "flash_attention_2": "proven", "sdpa": "slower", "eager": "slower"}
    fastest, status = judged(varlen=10.0, flash_attention_2=9.9, sdpa=30.0)  # no difference that another run would show
    assert fastest == {"attention": "varlen"} and status["flash_attention_2"] == "proven" and status["eager"] == "wrong"
    assert judged(sdpa=30.0)[0] == {"attention": "sdpa"}  # what is faster, but wrong, is out
    assert judged(eager=None)[0] == {"attention": "eager"}
    assert judged()[0] == {}


def proof_of(device, shapes=SHAPES, written=None, **milliseconds):
    """A made-up proof: no GPU has made one."""
    rows = {name: row for name, row in paths.table().items() if row["kind"] == "attention"}
    found = {}
    for name in rows:
        status = "proven" if name in milliseconds else "absent"
        found[name] = {"kind": "attention", "status": status, "why": "", "ms": milliseconds.get(name)}
    fastest = judging.judge(rows, found)
    key = proofs.key(written or config(), shapes, device)
    return {"key": key, "quick": True, "seconds": 9.0, "made": 0, "fastest": fastest, "paths": found}


@pytest.fixture
def on(monkeypatch):
    """on(device): this host has one of it."""

    def have(device):
        monkeypatch.setattr(proofs, "device", lambda index=0: device)
        for name, value in (("is_available", True), ("device_count", 8), ("get_device_name", device["name"])):
            monkeypatch.setattr(f"torch.cuda.{name}", lambda *_, value=value: value)
        monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: False)

    return have


@pytest.fixture
def made(monkeypatch):
    """made(proof or error): what the short proof of a first run comes to. Returns the calls."""
    calls = []

    def answer(what):
        def on_this_host(*args, **named):
            calls.append((args, named))
            if isinstance(what, Exception):
                raise what
            return what

        monkeypatch.setattr(prove, "on_this_host", on_this_host)
        return calls

    return answer


WORLD = World(0, 0, 1, 1, "host-1", "python")
RUN = ("--bf16", "--max_length", "256", "--packing")


@pytest.mark.parametrize("device, milliseconds, expected", [
    (A100, {"varlen": 11.0, "flash_attention_2": 9.0, "sdpa": 40.0, "eager": None}, "flash_attention_2"),
    (H100, {"varlen": 6.0, "flash_attention_2": 5.8, "flash_attention_3": 3.9, "sdpa": 21.0}, "flash_attention_3"),
    (RTX_4090, {"varlen": 15.0, "sdpa": 60.0}, "varlen"),
    (RTX_4090, {"sdpa": 60.0, "eager": None}, "sdpa"),
    (H100, {"flex_attention": 2.0, "sdpa": 21.0}, "sdpa"),  # flex: only where the recipe names it
])  # fmt: skip
def test_auto_takes_the_fastest_of_this_devices_proof(load, on, made, device, milliseconds, expected):
    on(device)
    proofs.write(proof_of(device, SHAPES | {"micro_batch": 1}, **milliseconds))
    calls, settings = made(RuntimeError("there is a proof already")), load(*RUN)
    auto.settle(settings, transformers.AutoConfig.for_model("llama", **LLAMA), WORLD)
    assert attention.choose(settings, transformers.LlamaConfig()) == (expected, "the fastest that is proven here")
    assert not calls


def test_rows_in_parts_want_one_without_a_mask(load):
    settings = load("--bf16")
    settings.proven = {"sdpa": 1.0, "varlen": 2.0}
    assert attention.choose(settings, transformers.LlamaConfig())[0] == "sdpa"
    settings.rows_in_parts = True
    assert attention.choose(settings, transformers.LlamaConfig())[0] == "varlen"
    settings.proven = {"varlen": 1.0, "eager": 2.0}  # nor what the model's own attention goes beyond
    settings.rows_in_parts = False
    assert attention.choose(settings, transformers.Gemma2Config())[0] == "eager"


def test_a_proof_of_another_driver_is_not_used(load, on, made, capsys):
    proofs.write(proof_of(gpu(A100["name"], 8.0, "550.54.14"), flash_attention_2=1.0, varlen=9.0))
    on(A100)
    calls, settings = made(proof_of(A100, varlen=5.0, sdpa=20.0)), load(*RUN)
    auto.settle(settings, transformers.AutoConfig.for_model("llama", **LLAMA), WORLD)
    assert len(calls) == 1 and calls[0][1]["quick"] and settings.proven == {"varlen": 5.0, "sdpa": 20.0}
    said = capsys.readouterr().err
    assert "driver 550.54.14, now 570.86.10" in said and "is not used" in said and "varlen: proven, 5.0 ms" in said
    auto.settle(settings, transformers.AutoConfig.for_model("llama", **LLAMA), WORLD)
    assert len(calls) == 1  # the next run finds it


def test_other_versions_shapes_and_models_have_proofs_of_their_own(monkeypatch):
    proof = proof_of(A100, varlen=1.0)
    proofs.write(proof)
    assert proofs.read(proof["key"]) == (proof, "")
    for other in (proofs.key(config(), SHAPES | {"max_length": 4096}, A100), proofs.key(config(head_dim=128), SHAPES, A100),
                  proofs.key(config("qwen3"), SHAPES, A100), proofs.key(config(), SHAPES, H100)):  # fmt: skip
        assert proofs.read(other)[0] is None
    monkeypatch.setattr(proofs, "versions", lambda: {**proof["key"]["versions"], "torch": "2.14.0"})
    found, note = proofs.read(proofs.key(config(), SHAPES, A100))
    assert found is None and "torch 2.13.0" in note and "now 2.14.0" in note


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), OSError("no")])
def test_a_proof_that_cannot_be_made_ends_no_run(load, on, made, capsys, error):
    on(A100)
    made(error)
    settings = load(*RUN)
    auto.settle(settings, transformers.AutoConfig.for_model("llama", **LLAMA), WORLD)
    assert settings.proven == {} and str(error) in capsys.readouterr().err
    assert attention.choose(settings, transformers.LlamaConfig())[0] == "sdpa"  # today's rule


def test_where_nothing_agrees_auto_goes_by_what_is_installed(load, on, made, capsys, cache):
    on(A100)
    made(proof_of(A100))
    settings = load(*RUN)
    auto.settle(settings, transformers.AutoConfig.for_model("llama", **LLAMA), WORLD)
    assert settings.proven == {} and "no attention is proven here" in capsys.readouterr().err
    assert not list(cache.glob("*"))  # it may have been a busy GPU: the next run tries again


def test_what_the_user_names_is_taken_and_a_proof_against_it_is_told(load, on, made, capsys):
    on(A100)
    proof = proof_of(A100, varlen=1.0)
    proof["paths"]["flash_attention_2"] = {"kind": "attention", "status": "wrong", "why": "logits are off by 3.0e-01"}
    proof["paths"]["liger"] = {"kind": "liger", "status": "wrong", "why": "gradients are off by 4.0e-01"}
    proofs.write(proof)
    named = {"model": {"attn_implementation": "flash_attention_2"}, "training": {"use_liger_kernel": True}}
    calls, settings = made(proof), load(*RUN, **named)
    auto.settle(settings, transformers.AutoConfig.for_model("llama", **LLAMA), WORLD)
    said = capsys.readouterr().err
    assert "warning: flash_attention_2 does not compute" in said and "3.0e-01" in said
    assert "warning: liger does not compute" in said and "4.0e-01" in said
    assert not calls and settings.proven == {}


def test_all_ranks_take_what_every_device_has_proven():
    a, b = {"flash_attention_2": 5.0, "varlen": 6.0, "sdpa": 20.0}, {"varlen": 9.0, "sdpa": 30.0}
    assert list(auto.common([a, b]).items()) == [("varlen", 9.0), ("sdpa", 30.0)]
    assert (
        auto.common([a, None]) == {} and auto.common([]) == {} and auto.common([{"varlen": 1.0}, {"sdpa": 1.0}]) == {}
    )
    # On the slowest device: it is the one that all wait for.
    assert next(iter(auto.common([{"varlen": 1.0, "sdpa": 2.0}, {"varlen": 9.0, "sdpa": 3.0}]))) == "sdpa"


@pytest.mark.parametrize("second, expected", [
    (("host-2", A100["name"]), ["varlen"]), (("host-2", None), []), (("host-1", A100["name"]), ["flash_attention_2", "varlen"]),
])  # fmt: skip
def test_ranks_settle_together(load, on, made, monkeypatch, second, expected):
    """Rank 0 as it meets another: of another host, of one without a GPU, of its own host."""
    on(A100)
    made(proof_of(A100, flash_attention_2=5.0, varlen=6.0))
    answers = iter([second, {"attention": {"varlen": 7.0}} if second[0] == "host-2" and second[1] else None])
    monkeypatch.setattr(auto.ranks, "gather", lambda mine: [mine, next(answers)])
    settings = load(*RUN)
    auto.settle(settings, transformers.AutoConfig.for_model("llama", **LLAMA), World(0, 0, 2, 1, "host-1", "torchrun"))
    assert list(settings.proven) == expected


# ---- the cache -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"key": {}}',
        b'{"key": {}, "paths": {"sdpa": 1}, "fastest": {}}',
    ],
)
def test_a_corrupted_file_is_no_proof(content):
    key = proofs.key(config(), SHAPES, A100)
    proofs.path_of(key).parent.mkdir(parents=True)
    proofs.path_of(key).write_bytes(content)
    found, note = proofs.read(key)
    assert found is None and str(proofs.path_of(key)) in note and "not used" in note


def test_a_file_under_anothers_name_is_no_proof():
    proof, key = proof_of(A100, varlen=1.0), proofs.key(config(), SHAPES, H100)
    proofs.path_of(key).parent.mkdir(parents=True)
    proofs.path_of(key).write_text(json.dumps(proof))
    found, note = proofs.read(key)
    assert found is None and A100["name"] in note and "not used" in note


def test_a_cache_that_cannot_be_written_keeps_nothing(cache, load, on, made, capsys):
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    assert proofs.write(proof_of(A100, varlen=1.0)) is None
    on(A100)
    made(proof_of(A100, varlen=1.0))
    settings = load(*RUN)
    auto.settle(settings, transformers.AutoConfig.for_model("llama", **LLAMA), WORLD)
    assert settings.proven == {"varlen": 1.0} and "cannot be kept" in capsys.readouterr().err


def _write_often(proof, times):
    for _ in range(times):
        assert proofs.write(proof)


def test_several_writers_leave_a_whole_proof(cache):
    proof = proof_of(A100, varlen=1.0, sdpa=2.0)
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_write_often, args=(proof, 60)) for _ in range(3)]
    proofs.write(proof)
    for each in writers:
        each.start()
    while any(each.is_alive() for each in writers):
        assert proofs.read(proof["key"]) == (proof, "")
    assert [each.exitcode for each in writers] == [0, 0, 0]
    assert [path.name for path in cache.iterdir()] == [proofs.path_of(proof["key"]).name]


@pytest.mark.parametrize("text, version", [
    ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n", "550.54.14"),
    ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build  (root@host)\n", "570.86.10"),
])  # fmt: skip
def test_the_driver_is_read_from_its_kernel_module(tmp_path, monkeypatch, text, version):
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(proofs, "DRIVER", tmp_path / "version")
    assert proofs.driver.__wrapped__() == version


def test_a_driver_that_nothing_names_is_another_after_each_boot(tmp_path, monkeypatch):
    monkeypatch.setattr(proofs, "DRIVER", tmp_path / "version")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(proofs, "BOOT", tmp_path / "boot")
    (tmp_path / "boot").write_text("0b1c\n")
    assert proofs.driver.__wrapped__() == "unknown, since boot 0b1c"


def late(proof, name, timeouts=1):
    """The proof in which one path ran out of time."""
    row = {"kind": "attention", "status": "failed", "why": "no answer within 8 s", "ms": None, "timeouts": timeouts}
    rows = {key: dict(row) for key, row in proof["paths"].items()} | {name: row}
    fresh = {key: judging.unjudged(row) for key, row in rows.items()}
    return proof | {"paths": fresh, "fastest": judging.judge({key: {"kind": "attention"} for key in fresh}, fresh)}


def test_a_path_that_ran_out_of_time_is_tried_again_by_the_next_run(load, on, made, capsys):
    """A cold disk or a busy GPU: the fast path is not given up for good."""
    on(A100)
    good = proof_of(A100, SHAPES | {"micro_batch": 1}, flash_attention_2=5.0, sdpa=20.0)
    proofs.write(late(good, "flash_attention_2"))
    calls, settings = made(good), load(*RUN)
    auto.settle(settings, transformers.AutoConfig.for_model("llama", **LLAMA), WORLD)
    assert calls[0][1]["known"]["fastest"] == {"attention": "sdpa"}
    assert settings.proven == {"flash_attention_2": 5.0, "sdpa": 20.0}
    auto.settle(settings, transformers.AutoConfig.for_model("llama", **LLAMA), WORLD)
    assert len(calls) == 1, "it has its answer"
    assert "trying flash_attention_2" in capsys.readouterr().err


def test_a_path_that_never_answers_is_given_up_and_a_second_try_that_fails_costs_nothing(load, on, made):
    on(A100)
    good = proof_of(A100, SHAPES | {"micro_batch": 1}, flash_attention_2=5.0, sdpa=20.0)
    assert judging.to_try(late(good, "flash_attention_2", judging.TRIES)) == []
    proofs.write(late(good, "flash_attention_2"))
    calls, settings = made(RuntimeError("CUDA out of memory")), load(*RUN)
    auto.settle(settings, transformers.AutoConfig.for_model("llama", **LLAMA), WORLD)
    assert len(calls) == 1 and settings.proven == {"sdpa": 20.0}


def test_a_second_try_keeps_what_is_known_and_counts(monkeypatch):
    """No process: what a worker would do with a path that hangs once more."""
    proof = late(proof_of(CPU, sdpa=2.0, eager=9.0), "varlen")
    asked = []

    def work(job, found, patience, end):
        asked.append((job["prove"], job["time"]))
        prove._timed_out(found["varlen"], "no answer within 8 s")
        return False

    monkeypatch.setattr(prove, "_work", lambda job, found, *rest: bool(not job["prove"] or work(job, found, *rest)))
    monkeypatch.setattr(proofs, "device", lambda index=0: CPU)
    new = prove.on_this_host(config(), SHAPES, quick=True, rows=own("varlen", "sdpa", "eager"), known=proof)
    assert asked == [(["varlen"], ["sdpa", "eager"])]
    assert new["paths"]["varlen"]["timeouts"] == 2
    assert new["fastest"] == {"attention": "sdpa"}


def test_a_quick_proof_replaces_no_full_one():
    full = proof_of(A100, flash_attention_2=5.0, sdpa=20.0) | {"quick": False}
    full["paths"]["liger"] = {"kind": "liger", "status": "wrong", "why": "gradients are off by 4.0e-01"}
    quick = proof_of(A100, flash_attention_2=50.0, sdpa=20.0)
    proofs.write(full)
    proofs.write(quick)
    kept = proofs.read(full["key"])[0]
    assert not kept["quick"]
    assert kept["paths"] == full["paths"] and kept["fastest"] == full["fastest"]
    quick["paths"]["flash_attention_2"] = {"kind": "attention", "status": "wrong", "why": "logits are off by 3.0e-01"}
    proofs.write(quick)  # which nobody may forget
    kept = proofs.read(full["key"])[0]
    assert kept["paths"]["flash_attention_2"]["status"] == "wrong" and kept["fastest"]["attention"] == "sdpa"
    assert kept["paths"]["liger"]["status"] == "wrong"


def test_a_path_that_runs_out_of_time_keeps_its_earlier_answer():
    good = proof_of(A100, flash_attention_2=5.0, sdpa=20.0)
    proofs.write(good)
    proofs.write(late(good, "flash_attention_2"))
    kept = proofs.read(good["key"])[0]
    assert kept["paths"]["flash_attention_2"]["ms"] == 5.0 and kept["fastest"] == {"attention": "flash_attention_2"}
    assert kept["paths"]["sdpa"]["status"] == "slower"


# ---- processes -----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_what_crashes_hangs_or_raises_loses_itself_alone():
    names = ("raises", "crashes", "hangs", "ignores_borders", "slow")
    rows = own("varlen") | {name: faulty_kernels.row(name, patches=name == "slow") for name in names}
    rows |= own("sdpa", "eager", "adamw_torch")
    proof = prove.on_this_host(config(), SHAPES, rows=rows, limits={"seconds": 500.0, "path": 30.0, "rounds": 5})
    found = proof["paths"]
    told = {name: row["status"] for name, row in found.items()}
    assert told.pop("varlen") in ("proven", "slower") and told.pop("sdpa") in ("proven", "slower")
    assert told == {"raises": "failed", "crashes": "failed", "hangs": "failed", "ignores_borders": "wrong", "slow": "slower",
                    "eager": "slower", "adamw_torch": "proven"}  # fmt: skip
    assert "illegal memory access" in found["raises"]["why"] and "signal 11" in found["crashes"]["why"]
    assert not any(row["why"].startswith("the process") for name, row in found.items() if name != "crashes"), found
    assert "no answer within 30 s" in found["hangs"]["why"]
    assert proof["fastest"]["attention"] in ("varlen", "sdpa") and proof["fastest"]["optimizer"] == "adamw_torch"
    assert found["slow"]["ms"] > found["sdpa"]["ms"] and json.loads(json.dumps(proof)) == proof
    assert proofs.write(proof) and proofs.read(proof["key"]) == (proof, "")


@pytest.mark.slow
def test_the_command_writes_the_proof_that_a_run_finds():
    words = [sys.executable, "-m", "brigade.kernels", "--quick", "--json", "--max_length", "256"]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    proof = json.loads(done.stdout)
    assert proofs.read(proof["key"]) == (proof, "")
    assert proof["paths"]["sdpa"]["status"] in ("proven", "slower") and proof["key"]["shapes"]["max_length"] == 256


def test_time_that_is_over_leaves_paths_unproven():
    proof = prove.on_this_host(config(), SHAPES, quick=True, limits={"seconds": 0.0, "path": 1.0, "rounds": 1})
    assert proof["fastest"] == {} and "not reached within 0 s" in proof["paths"]["varlen"]["why"]
    assert prove.of_kind(proof) == {}


def test_a_gpu_that_is_not_there_is_a_users_mistake(capsys):
    assert command.main(["--device", "7"]) == 2
    assert "flag --device" in capsys.readouterr().err
    assert command.main([str(Path("no") / "recipe.yaml")]) == 2
