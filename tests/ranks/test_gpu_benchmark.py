"""benchmarks/gpu.py without a GPU: its tiny runs through the same code, its arithmetic by hand, and what its page says."""

import json
import math
from importlib.metadata import version

import pytest

from benchmarks import gpu, gpu_attention, gpu_models, gpu_plan, gpu_tables
from brigade.train.data import collate
from brigade.train.data.collate import About
from brigade.train.recipe.schema import SECTION_OF
from brigade.train.watch.throughput import Meter

pytestmark = pytest.mark.slow
ONLY = [
    ("qwen3-0.6b", "full", "base"),
    ("qwen3-0.6b", "lora", "checkpointing"),
    ("qwen3-0.6b", "full", "flash2"),  # this host has none: refused
    ("qwen3", "attention", "varlen"),
]


# ---- tiny runs ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(command, results file, work directory) of one tiny measurement."""
    folder = tmp_path_factory.mktemp("gpu")
    command = ["--tiny", "--results", str(folder / "new" / "gpu.jsonl"), "--work", str(folder / "work")]
    command += [word for job in ONLY for word in ("--only", *job)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(gpu, "code", lambda: "a hash")
        assert gpu.main(command) == 0
    return command, folder / "new" / "gpu.jsonl", folder / "work" / "tiny"


@pytest.fixture(scope="module")
def rows(measured):
    found = {tuple(row[key] for key in gpu_plan.Job._fields): row for row in gpu.read_rows(measured[1])}
    assert found.keys() == set(ONLY)
    return found


@pytest.mark.parametrize("job", ONLY[:2], ids=" ".join)
def test_a_run_has_all_figures(job, rows):
    row = rows[job]
    assert row["status"] == "ok", row["reason"]
    for key in ("tokens_per_second", "supervised_tokens_per_second", "step_time", "tflops", "peak_memory_gib"):
        assert math.isfinite(row[key]) and row[key] > 0, key
    assert row["supervised_tokens_per_second"] < row["tokens_per_second"]
    assert row["mfu"] is None and row["reserved_memory_gib"] is None  # neither is known of a CPU
    assert (
        row["steps"] == 2 and 128 < row["tokens"] <= 2 * 2 * 128 and 10 < row["attended_length"] < 100
    )  # several to a pack
    assert row["device"] and row["versions"]["torch"] == version("torch")
    assert row["settings"] == gpu_plan.flags_of(gpu_plan.Job(*job), tiny=True)
    assert abs(row["first_loss"] - math.log(4096)) < 1  # random weights


def test_adapters_are_counted_as_peft_does(rows, measured):
    full, lora = rows[ONLY[0]], rows[ONLY[1]]
    assert full["trained_parameters"] == full["parameters"] == lora["parameters"]
    # Two layers; by the hand of test_widths_by_hand.
    assert lora["trained_parameters"] == 16 * 2048
    log = (measured[2] / f"{'-'.join(ONLY[1])}.log").read_text()
    assert f"of {lora['parameters'] + 16 * 2048:,} parameters are trained" in " ".join(log.split())


def test_what_the_host_lacks_is_a_row_with_its_reason(rows):
    row = rows[ONLY[2]]
    assert row["status"] == "refused" and "needs a GPU" in row["reason"] and "tokens_per_second" not in row


def test_attention_in_a_process_of_its_own(rows):
    row = rows[ONLY[3]]
    assert row["status"] == "ok" and set(row["differences"]) == {"bf16", "autocast"}


def test_measured_rows_are_not_measured_again(measured, capsys, monkeypatch):
    command, results, _ = measured
    monkeypatch.setattr(gpu, "code", lambda: "a hash")
    before = results.read_text()
    assert gpu.main(command) == 0
    assert "0 of 4 rows to measure" in capsys.readouterr().out and results.read_text() == before


@pytest.mark.parametrize("key", ["code", "versions", "device", "steps_asked", "option", "tiny"])
def test_what_differs_is_measured_again(key, rows):
    row = rows[ONLY[0]]
    assert gpu.identity(row) == gpu.identity(row | {"measured": "later", "mfu": 1.0})
    assert gpu.identity(row) != gpu.identity(row | {key: "other"})


# ---- attention ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["eager", "sdpa", "varlen"])
@pytest.mark.parametrize("family", gpu_attention.FAMILIES)
def test_packed_samples_are_equal_to_each_alone(family, how):
    row = gpu_attention.compare(family, how)
    assert row["status"] == "ok", row["reason"]
    for off in row["differences"].values():
        assert off["moved"] == 0 and 0 < off["logits"] <= off["logits_allowed"] < 0.2


@pytest.mark.parametrize("how", ["eager", "varlen"])
def test_samples_that_see_each_other_are_caught(how, monkeypatch):
    positions, cumulative = collate.positions, collate.cumulative
    monkeypatch.setattr(collate, "positions", lambda lengths, _: positions(lengths.sum(keepdims=True)))
    monkeypatch.setattr(collate, "cumulative", lambda lengths, _: cumulative(lengths.sum(keepdims=True)))
    row = gpu_attention.compare("qwen3", how)
    assert row["status"] == "failed" and "bf16: logits" in row["reason"] and "; autocast: logits" in row["reason"]
    assert "gradients are off" in row["reason"] and "a sample moves another" in row["reason"]


# ---- FLOPs, by hand ----------------------------------------------------------------------------------------------
SHAPE = {"parameters": 100, "layers": 2, "hidden_size": 4, "linear_widths": 30}


def test_flops_by_hand():
    attention = 12 * 2 * 4 * 8
    assert gpu_models.flops_per_token(SHAPE, None, 8) == (600 + attention, 600 + attention)
    assert gpu_models.flops_per_token(SHAPE, 5, 8) == (600 + attention, 400 + 30 + attention)


def test_rates_by_hand():
    entries = [
        {"tokens_per_second": 1000.0, "step_time": 1.0, "attended_length": 10.0},
        {"tokens_per_second": 500.0, "step_time": 6.0, "attended_length": 6.0, "reserved_memory_gib": 7.5},
    ]  # 4,000 tokens in 7 s; attended (1000 x 10 + 3000 x 6) / 4000 = 7
    found = gpu_models.rates(entries, SHAPE | {"parameters": 10**9}, 10**6, "NVIDIA H200")
    attention = 12 * 2 * 4 * 7
    rate = 4000 / 7
    assert found["attended_length"] == 7 and found["step_time"] == 3.5 and found["reserved_memory_gib"] == 7.5
    assert found["mfu"] == pytest.approx(100 * rate * (6e9 + attention) / 989e12)
    assert found["mfu_of_work_done"] == pytest.approx(100 * rate * (4e9 + 6e6 + attention) / 989e12)
    assert found["tflops"] == pytest.approx(rate * (6e9 + attention) / 1e12)
    assert gpu_models.rates(entries, SHAPE, None, "a CPU")["mfu"] is None


@pytest.mark.parametrize("name, parameters", [
    ("qwen3-0.6b", 596_049_920), ("qwen3-1.7b", 1_720_574_976), ("qwen3-8b", 8_190_735_360),
])  # fmt: skip
def test_the_models_have_their_published_sizes(name, parameters):
    from transformers import AutoConfig

    shape = gpu_models.shape_of(AutoConfig.from_pretrained(gpu_models.CONFIGS[name].parent))
    assert shape["parameters"] == parameters


def test_widths_by_hand():
    from transformers import AutoConfig

    config = gpu_models.config_of("qwen3-0.6b", tiny=True)
    shape = gpu_models.shape_of(AutoConfig.for_model(**config))
    # Hidden size 64, 4 heads and 2 key-value heads of 16, MLP of 128. q and o: 64 + 64; k and v: 64 + 32; three of 64 + 128.
    assert shape["linear_widths"] == 2 * (2 * 128 + 2 * 96 + 3 * 192) == 2048
    assert gpu_models.adapter_parameters(shape, 16) == 32_768


def test_the_meter_says_the_mean_length_that_a_token_sees():
    meter = Meter(100, 2, 4)
    meter.start()
    meter.count([About(tokens=30, squared_lengths=500, supervised=3, slots=30, step_supervised=3)], 0.0)
    assert meter.report()["attended_length"] == pytest.approx(500 / 30)  # samples of 10 and 20 tokens
    assert "attended_length" not in meter.report()  # nothing since


# ---- the plan, and what goes wrong -------------------------------------------------------------------------------
def test_the_plan():
    jobs = gpu_plan.plan([], tiny=False)
    assert len(jobs) == len(set(jobs))
    for model in gpu_models.CONFIGS:
        for method in ("full", "lora"):
            its = [gpu_plan.flags_of(job, False) for job in jobs if (job.model, job.method) == (model, method)]
            assert its[0] == gpu_plan.flags_of(gpu_plan.Job(model, method, "base"), False)
            assert len({json.dumps(flags, sort_keys=True) for flags in its}) == len(its)
            assert {flags["attn_implementation"] for flags in its} >= {"varlen", "sdpa", "flash_attention_2"}
            for key in ("use_liger_kernel", "torch_compile", "activation_checkpointing"):
                assert {flags[key] for flags in its} == {"true", "false"}, key
            assert {flags["optim"] for flags in its} == {"adamw_torch", "adamw_torch_fused", "adamw_8bit"}
    assert {
        key for job in jobs if job.method != "attention" for key in gpu_plan.flags_of(job, False)
    } <= SECTION_OF.keys()
    twice = gpu_plan.flags_of(gpu_plan.Job("qwen3-0.6b", "lora", "liger-twice"), False)
    assert twice["per_device_train_batch_size"] == "8" and twice["use_peft"] == "true"
    assert [job.option for job in sorted(jobs, key=gpu_plan.urgency)][12:19] == ["base"] * 6 + ["liger"]


@pytest.mark.parametrize("words, said", [
    (["--only", "qwen3-9b", "full", "base"], "no model 'qwen3-9b'"), (["--only", "all", "qlora", "base"], "no method"),
    (["--only", "qwen3-8b", "full", "lieger"], "no option 'lieger'"), (["--only", "qwen3-8b", "attention", "all"], "--list"),
    (["--steps", "0"], "above 0"), (["--minutes", "-1"], "above 0"), (["--results", "."], "is a directory"),
    ([], "no NVIDIA GPU"),
])  # fmt: skip
def test_bad_arguments(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        gpu.main(words)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_broken_results_file_is_named(tmp_path, capsys):
    (tmp_path / "gpu.jsonl").write_text('{"tiny": true}\nhalf a row')
    with pytest.raises(SystemExit):
        gpu.main(["--draw", "--results", str(tmp_path / "gpu.jsonl")])
    assert "gpu.jsonl:2 is no row" in capsys.readouterr().err


@pytest.mark.parametrize("code, text, status, reason", [
    (2, "Loading\nerror: flag --optim\n  no such thing\n  cure: pip install it\n", "refused", "no such thing (pip install it)"),
    (1, "a\ntorch.OutOfMemoryError: CUDA out of memory. Tried\nto allocate", "out of memory",
     "torch.OutOfMemoryError: CUDA out of memory. Tried"),
    (1, "Traceback\nRuntimeError: no kernel\n\nat the end\n", "failed", "exit code 1: RuntimeError: no kernel"),
    (-9, "step 1\n", "failed", "exit code -9: step 1"), (1, "", "failed", "exit code 1: no word"),
])  # fmt: skip
def test_why_a_run_came_to_nothing(code, text, status, reason):
    assert gpu.why(code, text) == (status, reason)


def test_a_run_that_hangs_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "LIMIT", 0.2)
    assert gpu.run_process(["sleep", "5"], tmp_path / "log") == ("failed", "stopped after 0.2 seconds")


def test_the_list_needs_no_gpu(capsys):
    assert gpu.main(["--list", "--only", "qwen3-8b", "lora", "liger"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "qwen3-8b lora liger --per_device_train_batch_size 1 --use_liger_kernel true --use_peft true --lora_r 16",
        "1 rows",
    ]


# ---- the page ----------------------------------------------------------------------------------------------------
def row(method, option, status="ok", device="NVIDIA H200", **more):
    job = gpu_plan.Job("qwen3-8b", method, option)
    found = {
        "tiny": False,
        "device": device,
        "device_memory_gib": 139.8,
        "versions": {"torch": "2"},
        "commit": "abc",
        "code": "0",
        "measured": "2026-01-02T00:00:00",
        "steps_asked": 10,
        "status": status,
        "reason": "a|b",
        "settings": gpu_plan.flags_of(job, False),
        **job._asdict(),
    }
    if status == "ok":
        found |= {
            "tokens_per_second": 9000.0,
            "supervised_tokens_per_second": 6000.0,
            "step_time": 3.6,
            "mfu": 45.0,
            "mfu_of_work_done": 30.0,
            "peak_memory_gib": 60.0,
            "reserved_memory_gib": 64.0,
            "last_loss": 8.5,
        }
    return found | more


ATTENTION = row("lora", "base") | {
    "model": "qwen3",
    "method": "attention",
    "option": "varlen",
    "differences": {
        "bf16": {"logits": 0.011, "logits_allowed": 0.02, "gradients": 0.03, "gradients_allowed": 0.04, "moved": 0.0}
    },
}
ROWS = [
    row("lora", "liger", mfu=51.0, tokens_per_second=10800.0, measured="2026-01-03T00:00:00"),
    row("lora", "liger", mfu=1.0, tokens_per_second=1.0),
    row("lora", "base"),
    row("full", "base", "out of memory"),
    row("lora", "base", device="NVIDIA H100 80GB HBM3"),
    row("lora", "base", tiny=True, device="a CPU"),
    ATTENTION,
]


def test_the_page_has_the_newest_row_of_each():
    """What it says without any: test_pages.py in tests/unit."""
    text = "\n\n".join(gpu_tables.tables(ROWS).values())
    assert "- NVIDIA H200, LoRA: 51.0 % MFU (qwen3-8b, liger); the aim of 50 % is met." in text
    assert "- NVIDIA H200, full fine-tuning: no run with an MFU yet; the aim is 50 %." in text
    assert "- NVIDIA H100 80GB HBM3, LoRA: 45.0 % MFU (qwen3-8b, base)." in text
    assert (
        "| liger | `--use_liger_kernel true` | 10,800 | 6,000 | 3.600 | 1.20 | 51.0 % | 30.0 % | 60.0 GiB | 64.0 GiB | 8.500 |"
        in text
    )
    assert "out of memory: a/b" in text and "a CPU" not in text and "not been measured" not in text
    assert "| qwen3 | varlen | bf16 | 1.1e-02 (2.0e-02) | 3.0e-02 (4.0e-02) | 0e+00 | equal |" in text
    tables = [[line.count("|") for line in part.splitlines() if line.startswith("|")] for part in text.split("\n\n")]
    assert all(len(set(counts)) == 1 for counts in tables if counts)
    assert "45.0 % MFU (qwen3-8b, base); the aim of 50 % is missed." in gpu_tables.verdict([row("lora", "base")])
