"""benchmarks/peers.py without its runs: the dialogues, how tokens are counted, and what the page computes."""

import json
import re
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import peers, peers_data, peers_smollm2, peers_tables, peers_without
from testing.chats import chat
from testing.command_line import as_flags

torch = pytest.importorskip("torch")


def pairs(count=40):
    return [chat(f"q{i}", f"a{i}") for i in range(count)]


# ---- data --------------------------------------------------------------------------------------------------------
def test_dialogues_are_the_same_each_time_and_alternate():
    chats = peers_data.dialogues(pairs(), 50, seed=3)
    assert chats == peers_data.dialogues(pairs(), 50, seed=3) != peers_data.dialogues(pairs(), 50, seed=4)
    for messages in (made["messages"] for made in chats):
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        for question, answer in zip(messages[::2], messages[1::2], strict=True):
            assert question["content"][1:] == answer["content"][1:]  # an answer stays with its question


def test_their_lengths_spread_like_a_lognormal():
    turns = sorted(len(made["messages"]) // 2 for made in peers_data.dialogues(pairs(), 4000, seed=1))
    assert 3 <= statistics.median(turns) <= 4
    assert turns[0] == 1 and 20 < turns[-1] <= peers_data.MOST_PAIRS
    assert statistics.mean(turns) > 1.2 * statistics.median(turns)  # a tail
    assert 11 <= peers_data.percentile(turns, 95) <= 15  # exp(1.645 x 0.8) medians


def test_every_pair_is_used_before_any_comes_again():
    chats = peers_data.dialogues(pairs(40), 200, seed=1)
    first = [message["content"] for made in chats for message in made["messages"][::2]][:40]
    assert len(set(first)) == 40


def test_nearest_rank_percentiles():
    assert [peers_data.percentile(range(1, 101), p) for p in (0, 5, 50, 95, 100)] == [1, 5, 50, 95, 100]
    assert peers_data.percentile([7], 50) == 7


def test_the_data_is_described_within_the_limit():
    said = peers_data.describe([10, 20, 90], [5, 10, 25], max_length=50)
    assert (said["p50"], said["longer_than_max_length"], said["tokens"], said["supervised_share"]) == (20, 1, 80, 0.5)


# ---- counting ----------------------------------------------------------------------------------------------------
def batch(labels, mask=None):
    labels = torch.tensor(labels)
    found = {"input_ids": torch.zeros_like(labels), "labels": labels}
    return found | ({"attention_mask": torch.tensor(mask)} if mask else {})


def test_a_row_s_first_label_is_predicted_from_nothing():
    from benchmarks.peers_count import supervised

    assert supervised(batch([[5, -100, 5, 5], [-100, 5, -100, -100]])["labels"]) == 3


def test_all_steps_count_but_the_first(monkeypatch):
    from benchmarks import peers_count

    clock = iter([10.0, 12.0, 15.0])
    monkeypatch.setattr(peers_count.time, "perf_counter", lambda: next(clock))
    counter = peers_count.Counter()
    for micro_batches in (
        [batch([[1, 1, 1]])],
        [batch([[-100, 1, 1]]), batch([[-100, 1, -100, -100]], [[1, 1, 0, 0]])],  # two micro-batches, two are padding
        [batch([[-100, 1, 1]])],
    ):
        counter.fetch(micro_batches)
        counter.on_step_end(None, None, None)
    found = counter.result()
    assert (found["steps"], found["seconds"], found["positions"], found["tokens"]) == (2, 5.0, 10, 8)
    assert (found["supervised_tokens"], found["supervised_tokens_per_second"]) == (5, 1.0)


def test_our_log_counts_the_same_way():
    keys = ("loss", "step_time", "tokens_per_second", "supervised_tokens_per_second", "peak_memory_gib")
    steps = [(9.0, 99.0, 1.0, 1.0, 1), (8.0, 2.0, 4.0, 3.0, 2), (7.0, 3.0, 1.0, 0.0, 2)]
    first, *others = (dict(zip(keys, step, strict=True)) for step in steps)
    history = [first, {"eval_loss": 9.0}, *others, {"train_runtime": 1.0}]
    found = peers.from_log(history, steps=2)
    assert (found["seconds"], found["tokens"], found["supervised_tokens"]) == (5.0, 11, 6)
    assert found["supervised_tokens_per_second"] == 1.2
    with pytest.raises(RuntimeError, match="3 steps instead of 4"):
        peers.from_log(history, steps=3)
    with pytest.raises(RuntimeError, match="no supervised tokens"):
        peers.from_log([{"loss": 1.0, "step_time": 1.0, "tokens_per_second": 1.0}] * 2, steps=1)


# ---- the page ----------------------------------------------------------------------------------------------------
def test_a_partial_measurement_does_not_replace_a_whole_one():
    """What the tables make of rows is compared with the page by test_pages.py."""
    whole = [{"kind": "peers", "only": False, "measurement": "2026-01-02", "name": name} for name in ("ours", "padded")]
    rows = [*whole, whole[0] | {"only": True, "measurement": "2026-01-03"}]  # of `--only ours`
    assert peers_tables.newest(rows, "peers") == whole
    assert peers_tables.newest(rows, "ablation") == []


def test_losses_of_a_real_model_are_compared_in_each_step_of_each_round():
    lines = {
        "smollm2": [(2.5, 2.001), (2.5, 2.002)], "trl_smollm2": [(2.5, 2.001), (2.5, 2.001)],
        "smollm2_bf16": [(2.6, 2.1)], "trl_smollm2_bf16": [(2.4, 2.1)],
    }  # fmt: skip
    rows = [{"name": name, "losses": losses} for name, rounds in lines.items() for losses in rounds]
    shown = peers_tables.losses(rows).splitlines()
    assert shown[2] == "| Brigade, fp32 | 2.5000 | 2.0010 | 1.0e-03 |"  # of its own rounds
    assert shown[3] == "| TRL SFTTrainer, fp32 | 2.5000 | 2.0010 | 1.0e-03 |"  # to the second round of ours
    assert shown[5].endswith("| 2.4000 | 2.1000 | 2.0e-01 |")


# ---- the same for all --------------------------------------------------------------------------------------------
def test_the_peers_have_our_versions():
    def pins(path):
        return dict(re.findall(r"^([\w-]+)==(\S+)", path.read_text(), re.MULTILINE))

    ours, theirs = pins(peers.REPOSITORY / "requirements.txt"), pins(peers.REQUIREMENTS)
    assert pins(peers.REQUIREMENTS.with_name("torchft-requirements.txt"))["torch"] == ours["torch"]
    shared = theirs.keys() - {"trl"}
    assert {"torch", "transformers", "accelerate", "datasets"} <= shared
    assert {name: theirs[name] for name in shared} == {name: ours[name] for name in shared}


def test_our_flags_are_keys_of_a_recipe_and_every_choice_changes_one():
    from brigade.train.recipe.schema import SECTION_OF

    for name, flags in {"ours": peers.OURS, **peers.ABLATION}.items():
        assert flags.keys() - {"without"} <= SECTION_OF.keys(), name
        assert flags.get("without", "blocks") in peers_without.CHOICES, name
        shared = {key: str(value).lower() for key, value in peers.SHARED.items()}
        assert name == "ours" or any((shared | peers.OURS).get(key) != value for key, value in flags.items()), name


def test_trl_gets_a_real_models_recipe_and_both_precisions_are_compared_with_ours():
    from brigade.train.recipe import flags

    changed = as_flags(recipe=str(peers_smollm2.RECIPE), lora_r=4, adam_beta2=0.9, seed=7, **peers_smollm2.FLAGS)
    recipe = flags.load(changed).recipe
    job = peers_smollm2.settings_of(recipe.training, recipe.model, recipe.data)
    assert (job["lora"]["r"], job["lora"]["lora_alpha"], job["lora"]["target_modules"]) == (4, 32, "all-linear")
    assert (job["micro_batch"] * job["accumulation"], job["learning_rate"], job["seed"]) == (16, 1e-3, 7)
    more = job["arguments"]
    assert (more["adam_beta2"], more["lr_scheduler_type"], more["warmup_steps"]) == (0.9, "cosine", 2)
    for name in peers_smollm2.TRL:
        assert (peers_smollm2.OURS[peers_tables.ours_beside(name)]["bf16"] == "true") == peers_smollm2.TRL[name]["bf16"]


def test_a_choice_without_a_flag_is_taken_back(monkeypatch):
    from brigade.train.data.collate import Collate, Layout
    from brigade.train.model import cpu_attention

    monkeypatch.setattr(cpu_attention, "LONGEST", cpu_attention.LONGEST)
    monkeypatch.setattr(Collate, "_flat", Collate._flat)
    for choice in peers_without.CHOICES.values():
        choice()
    assert not cpu_attention.takes(*torch.zeros(2, 1, 1, 4, 8, dtype=torch.bfloat16), 0.0, None)
    row = {"input_ids": np.arange(4, dtype=np.int32), "labels": np.array([-100, -100, 2, 3]), "lengths": np.array([4])}
    batch = Collate(0, Layout(True, True, True))(([row], 2))
    assert {"logits_to_keep", "shift_labels"}.isdisjoint(batch) and "labels" in batch


def test_steps_are_comparable():
    dialogues = {name: run["micro_batch"] * run["accumulation"] for name, run in peers.PEER_RUNS.items()}
    assert dialogues["trl_padding_free"] == dialogues["padded"] == 12
    assert dialogues["trl_packed"] == int(peers.OURS["global_batch_size"]) == 2
    assert abs(12 * 343 / (2 * peers.MAX_LENGTH) - 1) < 0.02  # 343: the dialogues' mean length


# ---- a run and its neighbours ------------------------------------------------------------------------------------
def test_a_run_says_what_others_had_and_why_it_failed(tmp_path):
    share = peers._run([sys.executable, "-c", "print('done')"], tmp_path / "log")
    assert 0 <= share <= 1 and (tmp_path / "log").read_text() == "done\n"
    with pytest.raises(RuntimeError, match="ended with 3:\nno such thing"):
        peers._run([sys.executable, "-c", "print('no such thing'); raise SystemExit(3)"], tmp_path / "log")


def test_a_peer_gets_where_things_lie_and_its_row_does_not_say_it(tmp_path, monkeypatch):
    def run(command, log):
        job = json.loads(Path(command[-1]).read_text())
        assert (job["chat_template"], job["bf16"], job["lora"]) == ("/here/t.jinja", True, {"r": 4})
        Path(job["result"]).write_text("{}")
        return 0.0

    monkeypatch.setattr(peers, "WORK", tmp_path)
    monkeypatch.setattr(peers, "_run", run)
    places = dict.fromkeys(("train", "model", "tokenizer"), "/here") | {"chat_template": "/here/t.jinja"}
    row = peers.run_peer("trl_smollm2_bf16", places | {"settings": {"lora": {"r": 4}}}, 1)
    assert row["settings"]["lora"] == {"r": 4} and "/here" not in json.dumps(row)


def test_a_disturbed_run_is_made_again_and_the_least_disturbed_counts(monkeypatch, capsys):
    monkeypatch.setattr(peers, "wait_until_quiet", lambda: None)

    def runs(*shares):
        left = iter(shares)
        monkeypatch.setattr(peers, "run_peer", lambda name, data, steps: {"others": next(left)})
        return peers.undisturbed("padded", {}, 1)["others"], len(list(left))

    assert runs(0.5, 0.01, 0.9) == (0.01, 1)
    assert runs(0.5, 0.2, 0.4, 0.3, 0.0) == (0.2, 1)  # four attempts are enough
