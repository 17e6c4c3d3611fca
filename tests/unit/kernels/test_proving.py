"""Kernels that prove themselves: what is wrong or broken is found."""

import io
import json
import queue
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from brigade.__main__ import main
from brigade.kernels import judging, models, paths, proofs, prove, steps, trials
from brigade.train.model import attention, packed_samples
from brigade.train.recipe.files import REPOSITORY
from testing import faulty_kernels, marks
from testing.made_up_kernels import A100, CPU, H100, NARROW, RTX_4090, SHAPES, config, gpu, own
from testing.shipped import shipped


def tried(rows, family="llama", dtype="fp32", attention="eager", **values):
    """The last event of each path, of a worker in this process. attention: of paths that are tried with one"""
    events, values = [], ({} if dtype == "fp32" else NARROW.get(family, {})) | values
    job = {"config": config(family, **values), "shapes": SHAPES | {"dtype": dtype}, "device": "cpu", "rows": rows}
    trials.Trials(job | {"prove": list(rows), "time": [], "rounds": 1, "attention": attention}, events.append).run()
    return {event["path"]: event for event in events if "path" in event and event["stage"] == "prove"}


# ---- what agrees, and what does not --------------------------------------------------------------------------------
@pytest.mark.parametrize("family, dtype", marks.cases(
    *(("llama", "fp32"), ("llama", "bf16"), ("gpt2", "bf16")),
    slow=[("mistral", "bf16"), ("qwen3_moe", "fp32"), ("deepseek_v3", "bf16")],
    matrix=[
        (family, dtype)
        for family in ("mistral", "qwen3_moe", "gemma3_text", "deepseek_v3", "qwen3_5_text")
        for dtype in ("fp32", "bf16")
        if (family, dtype) != ("qwen3_5_text", "bf16")
    ],
))  # fmt: skip
def test_what_cpus_have_agrees_with_eager(family, dtype):
    found = tried(own("varlen", "sdpa", "eager"), family, dtype)
    assert {name: event["why"] for name, event in found.items()} == {"varlen": "", "sdpa": "", "eager": ""}


@pytest.mark.parametrize("family, dtype", marks.cases(
    ("llama", "fp32"), slow=[("mistral", "bf16")], matrix=[("llama", "bf16"), ("mistral", "fp32")],
))  # fmt: skip
@pytest.mark.parametrize("name, said", [
    ("ignores_borders", "a sample moves another"), ("leaks_one_token", "a sample moves another"),
    ("gradient_one_percent_off", "bias is off by"),
])  # fmt: skip
def test_what_is_wrong_on_purpose_is_found(name, said, family, dtype):
    found = tried({name: faulty_kernels.row(name)}, family, dtype)[name]
    assert found["status"] == "wrong" and said in found["why"]


# ---- prompts that two answers share ----------------------------------------------------------------------------------
@pytest.mark.parametrize("family, how, dtype", marks.cases(
    *(("llama", "varlen", "fp32"), ("llama", "varlen", "bf16"), ("llama", "sdpa", "fp32")),
    slow=[("mistral", "varlen", "bf16"), ("mistral", "sdpa", "fp32"), ("llama", "eager", "fp32")],
    matrix=[("qwen3_moe", "varlen", "fp32"), ("deepseek_v3", "varlen", "bf16"), ("gemma3_text", "sdpa", "bf16")],
))  # fmt: skip
def test_a_prompt_that_two_answers_share_gives_what_each_gives_by_itself(family, how, dtype):
    found = tried(own("prompts_once"), family, dtype, how)["prompts_once"]
    assert (found["status"], found["why"]) == ("proven", ""), found


def test_where_layers_carry_a_state_nothing_is_tried():
    found = tried(own("prompts_once"), "qwen3_5_text", attention="sdpa")["prompts_once"]
    assert found["status"] == "absent" and "errors" not in found


def aligned_top_left(module, query, key, value, mask, key_places=None, cu_seq_lens_k=None, **named):
    """As FlashAttention before 2.1 did where there are more keys than queries: the first query sees the first key."""
    if key_places is None:
        return SOUND(module, query, key, value, mask, **named)
    ends, of_keys = named["cu_seq_lens_q"].tolist(), cu_seq_lens_k.tolist()
    kept = [place for end, begin, after in zip(of_keys, ends, ends[1:]) for place in range(end, end + after - begin)]  # noqa: B905
    return SOUND(module, query, *(tensor[:, :, key_places[kept]] for tensor in (key, value)), mask, **named)


def one_key_further(module, query, key, value, mask, key_places=None, **named):
    """The last key of a prompt is the first of the other answer."""
    if key_places is not None:
        key_places = key_places + (key_places.diff(append=key_places[-1:]) > 1)
    return SOUND(module, query, key, value, mask, key_places=key_places, **named)


SOUND = attention.varlen


@pytest.mark.parametrize("spoilt", [aligned_top_left, one_key_further])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_keys_that_an_answer_should_not_see_are_found(spoilt, dtype, monkeypatch):
    """The device's kernel alone is wrong: on the CPU, where the way to tell it is tried, all is well."""
    monkeypatch.setattr(packed_samples, "way_of_sharing", lambda *_: (packed_samples.LENGTHS, ""))
    monkeypatch.setattr(attention, "varlen", spoilt)
    found = tried(own("varlen", "prompts_once"), dtype=dtype, attention="varlen")
    assert [found[name]["status"] for name in ("varlen", "prompts_once")] == ["proven", "wrong"]
    assert "off by" in found["prompts_once"]["why"]


@pytest.mark.slow
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
    assert tried(own(path), **NARROW["llama"])[path]["status"] == "proven"


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
    recipes = shipped("recipes/*/config.json")
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
def test_what_a_device_lacks(name, device, dtype, said, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)  # Liger is there with torch's build for CUDA
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
    words = [sys.executable, "-m", "brigade", "kernels", "--quick", "--json", "--max_length", "256"]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0 and "trying kernels for at most 15 s" in done.stderr, done.stderr
    proof = json.loads(done.stdout)
    assert proofs.read(proof["key"]) == (proof, "")
    assert proof["paths"]["sdpa"]["status"] in ("proven", "slower") and proof["key"]["shapes"]["max_length"] == 256


def test_time_that_is_over_leaves_paths_unproven():
    proof = prove.on_this_host(config(), SHAPES, quick=True, limits={"seconds": 0.0, "path": 1.0, "rounds": 1})
    assert proof["fastest"] == {} and "not reached within 0 s" in proof["paths"]["varlen"]["why"]
    assert prove.proven_times(proof) == {}


def test_a_recipe_that_is_not_there_is_a_users_mistake():
    assert main(["kernels", str(Path("no") / "recipe.yaml")]) == 2


@pytest.mark.parametrize("words, limits", [
    ((), prove.FULL), (("--quick",), prove.QUICK), (("--seconds", "90"), prove.FULL | {"seconds": 90.0}),
])  # fmt: skip
def test_the_command_takes_the_seconds_that_it_is_given(made, words, limits):
    row = {"kind": "attention", "status": "absent", "why": ""}
    device = {"name": "CPU", "driver": ""}
    key = {"device": device, "attention": "varlen", "shapes": SHAPES}
    calls = made({"key": key, "paths": {"sdpa": row}, "fastest": {}, "seconds": 1.0})
    assert main(["kernels", *words]) == 0
    assert calls[0][1]["limits"] == limits


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_no_time_for_a_proof_is_a_users_mistake(prints, seconds):
    assert "flag --seconds" in prints(2, "kernels", "--seconds", seconds)


def test_a_workers_imports_are_no_part_of_a_proofs_seconds(monkeypatch):
    """On a shared file system torch alone may take the 15 seconds of a first run's proof."""
    now, told = [100.0], queue.Queue()

    class Worker:
        def __init__(self, *_, **__):
            self.stdin, self.stdout, self.stderr, self.returncode = io.StringIO(), (), (), 0

        def kill(self):
            pass

        wait = kill

    class Events:
        """Each event comes so many seconds after the one before; a wait that is shorter is in vain."""

        def __init__(self):
            self.coming = list(script)

        def get(self, timeout):
            after, event = self.coming.pop(0)
            now[0] += min(after, timeout)
            if after > timeout:
                raise queue.Empty
            return event

        def put(self, event):
            told.put(event)

    proven = {"path": "varlen", "stage": "prove", "status": "proven", "why": "", "errors": {}}
    monkeypatch.setattr(prove.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(prove.subprocess, "Popen", Worker)
    monkeypatch.setattr(prove.queue, "Queue", Events)
    for imports, path, status in ((60, 10, "proven"), (60, 20, "failed"), (200, 1, "failed")):
        script = [(imports, {"ready": True}), (0, {"begin": "varlen"}), (path, proven), (0, {"end": True})]
        results, clock, began = {"varlen": {"kind": "attention"}}, prove.Clock(15.0), now[0]
        prove._drive({}, results, {"seconds": 15.0, "path": 30.0, "rounds": 1}, clock)
        assert results["varlen"]["status"] == status, (imports, path)
        assert clock.seconds == (5.0 if status == "proven" else 0.0 if imports == 60 else 15.0)
        if (imports, path) == (60, 20):
            assert results["varlen"]["why"] == "no answer within 15 s", "that is what was left, and not a path's 30"
        assert now[0] - began <= 180, "one that does not get ready is not started again"
    assert "not ready within 180 s" in results["varlen"]["why"]


def test_no_worker_is_started_where_nothing_is_to_be_tried_or_timed(monkeypatch):
    monkeypatch.setattr(prove.subprocess, "Popen", None)
    results = {"varlen": {"kind": "attention", "status": "absent"}, "sdpa": {"kind": "attention", "status": "wrong"}}
    prove._drive({}, results, {"seconds": 15.0, "path": 30.0, "rounds": 1}, prove.Clock(15.0))
    assert [row["status"] for row in results.values()] == ["absent", "wrong"]
