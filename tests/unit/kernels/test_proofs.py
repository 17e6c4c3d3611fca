"""Which kernels are taken: a proof is for what it was made with, and what is slow is left."""

import multiprocessing
from pathlib import Path

import pytest
import transformers

from brigade.kernels import auto, judging, proofs, prove
from brigade.train.distributed import devices
from brigade.train.host.checksums import sealed
from brigade.train.host.cluster import World
from brigade.train.model import attention
from testing.made_up_kernels import A100, CPU, H100, LLAMA, RTX_4090, RUN, SHAPES, WORLD, config, gpu, own, proof_of


def found(settings, world=WORLD):
    """The attentions that such a run finds proven."""
    return auto.settle(settings, transformers.AutoConfig.for_model("llama", **LLAMA), world).attention


@pytest.fixture
def settled(load, on, made):
    """settled(device, answer): what a run there finds proven, its settings, and the calls that prove, which answer so."""

    def settle(device, answer, world=WORLD, **sections):
        on(device)
        calls, settings = made(answer), load(*RUN, **sections)
        return found(settings, world), settings, calls

    return settle


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


@pytest.mark.parametrize("device, milliseconds, expected", [
    (A100, {"varlen": 11.0, "flash_attention_2": 9.0, "sdpa": 40.0, "eager": None}, "flash_attention_2"),
    (H100, {"varlen": 6.0, "flash_attention_2": 5.8, "flash_attention_3": 3.9, "sdpa": 21.0}, "flash_attention_3"),
    (RTX_4090, {"varlen": 15.0, "sdpa": 60.0}, "varlen"),
    (RTX_4090, {"sdpa": 60.0, "eager": None}, "sdpa"),
    (H100, {"flex_attention": 2.0, "sdpa": 21.0}, "sdpa"),  # flex: only where the recipe names it
])  # fmt: skip
def test_auto_takes_the_fastest_of_this_devices_proof(settled, device, milliseconds, expected):
    proofs.write(proof_of(device, SHAPES | {"micro_batch": 1}, **milliseconds))
    proven, settings, calls = settled(device, RuntimeError("there is a proof already"))
    taken = attention.choose(settings, transformers.LlamaConfig(), proven=proven)
    assert taken == (expected, "the fastest that is proven here") and not calls


def test_divided_sequences_want_one_without_a_mask(load):
    settings = load("--bf16")
    for divides_sequences, expected in ((False, "sdpa"), (True, "varlen")):
        proven = {"sdpa": 1.0, "varlen": 2.0}
        assert attention.choose(settings, transformers.LlamaConfig(), divides_sequences, proven)[0] == expected
    proven = {"varlen": 1.0, "eager": 2.0}  # nor what the model's own attention goes beyond
    assert attention.choose(settings, transformers.Gemma2Config(), proven=proven)[0] == "eager"


def test_a_proof_of_another_driver_is_not_used(settled, capsys):
    proofs.write(proof_of(gpu(A100["name"], 8.0, "550.54.14"), flash_attention_2=1.0, varlen=9.0))
    proven, settings, calls = settled(A100, proof_of(A100, varlen=5.0, sdpa=20.0))
    assert len(calls) == 1 and calls[0][1]["quick"] and proven == {"varlen": 5.0, "sdpa": 20.0}
    said = capsys.readouterr().err
    assert "driver 550.54.14, now 570.86.10" in said and "is not used" in said and "varlen: proven, 5.0 ms" in said
    assert found(settings) == proven and len(calls) == 1, "the next run finds it"


def test_other_versions_shapes_and_models_have_proofs_of_their_own(monkeypatch):
    proof = proof_of(A100, varlen=1.0)
    proofs.write(proof)
    assert proofs.read(proof["key"]) == (proof, "")
    for other in (proofs.key(config(), SHAPES | {"max_length": 4096}, A100), proofs.key(config(head_dim=128), SHAPES, A100),
                  proofs.key(config("qwen3"), SHAPES, A100), proofs.key(config(), SHAPES, H100)):  # fmt: skip
        assert proofs.read(other)[0] is None
    before = proof["key"]["versions"]
    monkeypatch.setattr(proofs, "versions", lambda: {**before, "torch": "99.0"})
    found, note = proofs.read(proofs.key(config(), SHAPES, A100))
    assert found is None and f"torch {before['torch']}" in note and "now 99.0" in note


@pytest.mark.parametrize("file", [
    "kernels/compare.py", "train/data/collate.py", "train/model/packed_samples.py",
    "train/model/attention.py", "train/engines/kernels.py",  # which paths.yaml names
])  # fmt: skip
def test_a_proof_holds_for_the_code_that_it_was_made_with(file, monkeypatch):
    before, read = proofs.versions()["code"], Path.read_bytes
    changed = Path(proofs.__file__).parents[1] / file
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path == changed))
    assert proofs.versions.__wrapped__()["code"] != before


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), OSError("no")])
def test_a_proof_that_cannot_be_made_ends_no_run(settled, capsys, error):
    proven, settings, _ = settled(A100, error)
    assert proven == {} and str(error) in capsys.readouterr().err
    taken = attention.choose(settings, transformers.LlamaConfig(), proven=proven)
    assert taken[0] == "varlen", "the rule without a proof"


def test_where_nothing_agrees_auto_goes_by_what_is_installed(settled, capsys, cache):
    proven, *_ = settled(A100, proof_of(A100))
    assert proven == {} and "no attention is proven here" in capsys.readouterr().err
    assert not list(cache.glob("*"))  # it may have been a busy GPU: the next run tries again


def test_what_the_user_names_is_taken_and_a_proof_against_it_is_told(settled, capsys):
    proof = proof_of(A100, varlen=1.0)
    proof["paths"]["flash_attention_2"] = {"kind": "attention", "status": "wrong", "why": "logits are off by 3.0e-01"}
    proof["paths"]["liger"] = {"kind": "liger", "status": "wrong", "why": "gradients are off by 4.0e-01"}
    proofs.write(proof)
    named = {"model": {"attn_implementation": "flash_attention_2"}, "training": {"use_liger_kernel": True}}
    proven, _, calls = settled(A100, proof, **named)
    said = capsys.readouterr().err
    assert "warning: flash_attention_2 does not compute" in said and "3.0e-01" in said
    assert "warning: liger does not compute" in said and "4.0e-01" in said
    assert not calls and proven == {}


def test_all_ranks_take_what_every_device_has_proven():
    a, b = {"flash_attention_2": 5.0, "varlen": 6.0, "sdpa": 20.0}, {"varlen": 9.0, "sdpa": 30.0}
    assert list(auto.common([a, b]).items()) == [("varlen", 9.0), ("sdpa", 30.0)]
    assert auto.common([a, None]) == {} and auto.common([]) == {}
    assert auto.common([{"varlen": 1.0}, {"sdpa": 1.0}]) == {}
    # On the slowest device: it is the one that all wait for.
    assert next(iter(auto.common([{"varlen": 1.0, "sdpa": 2.0}, {"varlen": 9.0, "sdpa": 3.0}]))) == "sdpa"


@pytest.mark.parametrize("second, expected", [
    (("host-2", A100["name"]), ["varlen"]), (("host-2", None), []), (("host-1", A100["name"]), ["flash_attention_2", "varlen"]),
])  # fmt: skip
def test_ranks_settle_together(settled, monkeypatch, second, expected):
    """Rank 0 as it meets another: of another host, of one without a GPU, of its own host."""
    answers = iter([second, {"attention": {"varlen": 7.0}} if second[0] == "host-2" and second[1] else None])
    monkeypatch.setattr(auto.ranks, "gather", lambda mine: [mine, next(answers)])
    proof = proof_of(A100, flash_attention_2=5.0, varlen=6.0)
    proven, *_ = settled(A100, proof, World(0, 0, 2, 1, "host-1", "torchrun"))
    assert list(proven) == expected


# ---- the cache -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("content, said", [
    (b"", ""),
    (b"{", ""),
    (b"\xff\xfe", ""),
    (b"[]", ""),
    (b"null", ""),
    (b'{"key": {}}', ""),
    (b'{"key": {}, "paths": {"sdpa": 1}, "fastest": {}}', ""),
    (sealed(proof_of(A100, varlen=1.5)).replace("1.5", "1.6").encode(), "checksum is another"),
    (sealed(proof_of(H100, varlen=1.0)).encode(), H100["name"]),
], ids=lambda value: str(value)[:12])  # fmt: skip
def test_a_file_that_is_corrupted_or_anothers_is_no_proof(content, said):
    key = proofs.key(config(), SHAPES, A100)
    proofs.path_of(key).parent.mkdir(parents=True)
    proofs.path_of(key).write_bytes(content)
    found, note = proofs.read(key)
    assert found is None and str(proofs.path_of(key)) in note and "not used" in note and said in note


def test_a_cache_that_cannot_be_written_keeps_nothing(cache, settled, capsys):
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    assert proofs.write(proof_of(A100, varlen=1.0)) is None
    proven, *_ = settled(A100, proof_of(A100, varlen=1.0))
    assert proven == {"varlen": 1.0} and "cannot be kept" in capsys.readouterr().err


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
    monkeypatch.setattr(devices, "VERSION_FILES", (tmp_path / "version",))
    assert proofs.driver.__wrapped__() == version


def test_a_driver_that_nothing_names_is_another_after_each_boot(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "driver_version", lambda: None)
    monkeypatch.setattr(proofs, "BOOT", tmp_path / "boot")
    (tmp_path / "boot").write_text("0b1c\n")
    assert proofs.driver.__wrapped__() == "unknown, since boot 0b1c"


def late(proof, name, timeouts=1):
    """The proof in which one path ran out of time."""
    row = {"kind": "attention", "status": "failed", "why": "no answer within 8 s", "ms": None, "timeouts": timeouts}
    rows = {key: dict(row) for key, row in proof["paths"].items()} | {name: row}
    fresh = {key: judging.unjudged(row) for key, row in rows.items()}
    return proof | {"paths": fresh, "fastest": judging.judge({key: {"kind": "attention"} for key in fresh}, fresh)}


def test_a_path_that_ran_out_of_time_is_tried_again_by_the_next_run(settled, capsys):
    """A cold disk or a busy GPU: the fast path is not given up for good."""
    good = proof_of(A100, SHAPES | {"micro_batch": 1}, flash_attention_2=5.0, sdpa=20.0)
    proofs.write(late(good, "flash_attention_2"))
    proven, settings, calls = settled(A100, good)
    assert calls[0][1]["known"]["fastest"] == {"attention": "sdpa"}
    assert proven == {"flash_attention_2": 5.0, "sdpa": 20.0}
    found(settings)
    assert len(calls) == 1, "it has its answer"
    assert "trying flash_attention_2" in capsys.readouterr().err


def test_a_path_that_never_answers_is_given_up_and_a_second_try_that_fails_costs_nothing(settled):
    good = proof_of(A100, SHAPES | {"micro_batch": 1}, flash_attention_2=5.0, sdpa=20.0)
    assert judging.to_try(late(good, "flash_attention_2", judging.TRIES)) == []
    proofs.write(late(good, "flash_attention_2"))
    proven, _, calls = settled(A100, RuntimeError("CUDA out of memory"))
    assert len(calls) == 1 and proven == {"sdpa": 20.0}


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
