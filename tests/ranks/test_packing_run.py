"""The same samples make the same step, packed or not: losses, gradient norms and held-out losses of whole runs.

All 24 chats make up every step, so each epoch is one step and packing cannot change which samples meet in it. Whatever
is left of a packed step's sequences is filler.
"""

import json

import pytest

import train
from brigade.train.data import builtin, collate
from testing import axes_pipeline, marks, parity, run_files, runs

CHATS = 24
SHARED = [
    "--max_train_samples",
    str(CHATS),
    *["--max_length", "128", "--max_steps", "4", "--eval_steps", "2", "--optim", "sgd", "--learning_rate", "0.6"],
]
PACKED = ["--packing", "true", "--global_batch_size", "12"]
ALONE = ["--global_batch_size", str(CHATS)]


def flags(extra, micro):
    return [*SHARED, *extra, "--per_device_train_batch_size", str(micro)]


RUNS = {
    "packed": flags(PACKED, 3),
    "packed, padded to the longest": flags([*PACKED, "--padding_free", "false"], 2),
    "packed, sdpa": flags([*PACKED, "--attn_implementation", "sdpa"], 6),
    "padded to the longest": flags([*ALONE, "--padding_free", "false"], 4),
}
SHARDED = ("zero3", "fsdp2")
# Layers with a state compute their samples in groups, of which no two ranks have equally many; in a pipeline the next micro-batch
# comes before a layer is computed again.
HYBRID = {"model": "qwen3_5_text"}
HYBRIDS = ("zero3", "fsdp2", "pipeline", "tensor")
# With an attention that computes products between samples, micro-batches of one step lie end to end, or are padded.
PARTLY_PADDED = "pipeline, some padded"
LESS = ["--learning_rate", "0.3"]
TEXTS = [
    *["--max_train_samples", "48", "--max_length", "32", "--max_steps", "4", "--eval_steps", "2"],
    *["--packing", "true", "--global_batch_size", "8", "--optim", "sgd", "--learning_rate", "0.6"],
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return runs.write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def run(inputs, tmp_path_factory):
    """run(flags): what a run of one process logs."""

    def call(flags):
        output = tmp_path_factory.mktemp("runs") / "run"
        trainer = train.main([*inputs, *flags, "--output_dir", str(output)])
        rows = trainer.train_dataset
        found = run_files.figures(trainer.state.log_history)
        runs.forget(trainer)
        return found, rows

    return call


@pytest.fixture(scope="module")
def reference(run):
    """One process, one chat a row, eager attention, which nobody told of anything."""
    found, rows = run(flags([*ALONE, "--padding_free", "false", "--attn_implementation", "eager"], 1))
    assert len(rows) == CHATS and len(found["loss"]) == 4 and found["loss"][-1] < 0.9 * found["loss"][0]
    return found


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Flags that name texts instead of chats, for continued pre-training: longer than max_length, short, and empty ones."""
    folder = tmp_path_factory.mktemp("texts")
    chats = [json.loads(line)["messages"] for line in builtin.TRAIN.read_text().splitlines()[:60]]
    for name, part in (("train_file", chats[:50]), ("validation_file", chats[50:])):
        rows = [{"text": "\n".join(turn["content"] for turn in chat) if i % 7 else " "} for i, chat in enumerate(part)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [word for name in ("train_file", "validation_file") for word in (f"--{name}", str(folder / f"{name}.jsonl"))]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, texts, asked_for):
    """What each of the cases that are asked for logs, all in one process group."""
    cases = [{"name": name, "flags": [*flags, *parity.STRATEGIES["ddp"]]} for name, flags in RUNS.items()]
    cases += [{"name": f"packed, {kind}", "flags": [*RUNS["packed"], *parity.STRATEGIES[kind]]} for kind in SHARDED]
    small = [*TEXTS, *texts, "--per_device_train_batch_size", "2"]
    cases += [{"name": f"texts, {kind}", "flags": [*small, *parity.STRATEGIES[kind]]} for kind in ("ddp", "zero3")]
    folder = tmp_path_factory.mktemp("ranks2")
    tensor = ["--ds_config", "ds_configs/zero1_tp2.json"]
    strategies = parity.STRATEGIES | {"pipeline": axes_pipeline.ddp(folder, 2), "tensor": tensor}
    for kind in HYBRIDS:
        micro = flags([*PACKED, *LESS, "--activation_checkpointing"], 2 if kind in SHARDED else 3)
        cases.append(HYBRID | {"name": f"hybrid, {kind}", "flags": [*micro, *strategies[kind]]})
    some = flags([*ALONE, *LESS, "--activation_checkpointing", "--attn_implementation", "sdpa"], 3)
    cases.append(HYBRID | {"name": f"hybrid, {PARTLY_PADDED}", "flags": [*some, *strategies["pipeline"]]})
    names = asked_for("case") | {f"hybrid, {kind}" for kind in asked_for("hybrid")}
    names |= {f"texts, {kind}" for kind in asked_for("kind")}
    return runs.run_cases(2, [case for case in cases if case["name"] in names], folder, timeout=300)


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory):
    """One process: a chat a row, and packed."""
    padded = HYBRID | {"name": "padded", "flags": flags([*ALONE, *LESS, "--padding_free", "false"], 4)}
    packed = HYBRID | {"name": "packed", "flags": flags([*PACKED, *LESS], 3)}
    return runs.run_cases(1, [padded, packed], tmp_path_factory.mktemp("hybrids"))


def differences(found, reference):
    return {key: f"{value:.1e}" for key, value in parity.worst(found, reference).items() if value > parity.TOLERANCE}


@pytest.mark.parametrize("name", RUNS)
def test_one_process(name, run, reference):
    found, rows = run(RUNS[name])
    assert len(rows) == CHATS if "--packing" not in RUNS[name] else 6 <= len(rows) <= 12
    assert not differences(found, reference)


@pytest.mark.parametrize("case", marks.cases("packed", "packed, zero3", slow=["packed, fsdp2"], matrix=RUNS))
def test_two_ranks(case, two_ranks, reference):
    assert not differences(two_ranks[case], reference)


@pytest.mark.parametrize("hybrid", marks.cases(slow=[*HYBRIDS, PARTLY_PADDED]))
def test_layers_with_a_state(hybrid, two_ranks, hybrids):
    assert hybrids["padded"]["loss"][-1] < 0.95 * hybrids["padded"]["loss"][0]
    assert not differences(hybrids["packed"], hybrids["padded"])
    assert not differences(two_ranks[f"hybrid, {hybrid}"], hybrids["padded"])


@pytest.fixture(scope="module")
def texts_alone(run, texts):
    found, rows = run([*TEXTS, *texts, "--per_device_train_batch_size", "8"])
    lengths = [part for row in rows for part in row["lengths"]]
    assert max(lengths) == 32 and len(lengths) == 48 and len(rows) > 8
    assert len(found["loss"]) == len(set(found["loss"])) == 4
    assert found["eval_loss"][-1] < 0.9 * found["eval_loss"][0]
    return found


@pytest.mark.parametrize("kind", marks.cases("zero3", matrix=["ddp"]))
def test_continued_pretraining_on_texts(kind, two_ranks, texts_alone):
    assert not differences(two_ranks[f"texts, {kind}"], texts_alone)


def test_chats_that_see_each_other_are_caught(run, reference, monkeypatch):
    def one_sample(lengths):
        return lengths.sum(keepdims=True)

    positions, cumulative = collate.positions, collate.cumulative
    monkeypatch.setattr(collate, "positions", lambda lengths, _: positions(one_sample(lengths)))
    monkeypatch.setattr(collate, "cumulative", lambda lengths, _: cumulative(one_sample(lengths)))
    found, _ = run(RUNS["packed"])
    worst = parity.worst(found, reference)
    assert worst["loss"] > 100 * parity.TOLERANCE and worst["grad_norm"] > 100 * parity.TOLERANCE
