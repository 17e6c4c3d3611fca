"""What users rely on of objectives: which keys they read, losses of their own, and log-probabilities in every layout."""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from brigade.errors import UserError
from brigade.train.data.answers import ANSWERS, MISMATCHED, REFERENCE, RUNS, WHICH
from brigade.train.data.collate import ABOUT, Collate, Layout, on_device
from brigade.train.data.store import IGNORED
from brigade.train.engines.parallel.sequence import DividedSequences
from brigade.train.loss import own_loss, tiled
from brigade.train.loss.objective import load
from brigade.train.loss.objective.contract import Options, Pairs, Result, compare, means_of, sums
from brigade.train.loss.objective.load import loss_of, options_of
from brigade.train.loss.reference import Reference
from brigade.train.model import scores
from brigade.train.recipe import flags, objectives
from brigade.train.recipe.objectives import ADAPTERS_OFF, JUDGED, MODEL, OBJECTIVES, PAIRS, ObjectiveKeys, beta_of
from testing.ranks import REPOSITORY

CONFIG = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=97)
PAD = 96


# ---- keys --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("words, problem", [
    (["--beta", "0.2"], "objective sft does not read it"),
    (["--objective", "orpo", "--reference", "model"], "objective orpo does not read it"),
    (["--objective", "dpo", "--loss_type", "kto"], "kto is no form of dpo\n  cure: choose from sigmoid, hinge"),
    (["--objective", "dpo", "--loss_type", "robust"], "there are none\n  cure: set label_smoothing (0.1)"),
    (["--objective", "dpo", "--loss_type", "hinge", "--label_smoothing", "0.1"], "loss_type hinge does not read it"),
    (["--objective", "dpo", "--reference", "adapters_off"], "the recipe trains no adapters"),
    (["--objective", "dpo", "--use_peft", "--load_in_4bit", "--reference", "model", "--precompute_ref_log_probs", "false"],
     "a second model is not in 4 bits"),
    (["--objective", "kto", "--metric_for_best_model", "eval_rewards/accuracies"], "objective kto has no eval_rewards"),
    (["--metric_for_best_model", "eval_divergence"], "objective sft has no eval_divergence"),
    (["--teacher", "other"], "objective sft does not read it"),
    (["--objective", "distill"], "objective distill names no teacher"),
    (["--objective", "distill", "--teacher", "other", "--beta", "0.3"], "loss_type forward_kl does not read it"),
    (["--objective", "distill", "--teacher", "other", "--loss_type", "jsd", "--beta", "1"], "the teacher has a share below 1"),
    (["--objective", "distill", "--teacher", "other", "--label_smoothing_factor", "0.1"], "objective distill does not read it"),
    (["--objective", "dpo", "--loss_type", "ipo"], "'ipo' is an objective of its own"),
    (["--objective", "grpo"], "reward, distill, or a function of your own: path/to/file.py:function"),
    *((["--objective", "own.py:loss", f"--{key}", value], "objective own.py:loss does not read it") for key, value in {
        "z_loss_coef": "1e-4", "label_smoothing_factor": "0.1", "token_loss": "own.py:other", "neftune_noise_alpha": "5",
        "teacher": "other", "kd_ratio": "0.2", "answer_score": "text", "precompute_ref_log_probs": "true",
    }.items()),
    (["--objective", "own.py:loss", "--metric_for_best_model", "eval_divergence"], "has no eval_divergence"),
])  # fmt: skip
def test_a_key_that_would_not_be_read_is_refused(words, problem):
    with pytest.raises(UserError, match=re.escape(problem)):
        flags.load(words)


def test_a_loss_of_ones_own_reads_each_key_of_comparisons():
    options = (
        "--simpo_gamma 1 --desirable_weight 2 --undesirable_weight 2 --loss_type hinge --label_smoothing 0.1 --beta 0.3"
    )
    assert options_of(flags.load(["--objective", "own.py:loss", *options.split()]).recipe.training) == Options(
        0.3, "hinge", 0.1, 1.0, 2.0, 2.0
    )


def test_the_documentation_has_each_objective_with_its_keys_and_defaults():
    pages = [(REPOSITORY / "docs" / name).read_text() for name in ("preferences.md", "distillation.md")]
    rows = [line for page in pages for line in page.splitlines() if line.startswith("| `")]
    for name, objective in OBJECTIVES.items():
        if name == "sft":
            continue
        row = next((row for row in rows if row.startswith(f"| `{name}` |")), "")
        assert row, f"docs/preferences.md or distillation.md: a row of {name}"
        for key in objective.keys:
            assert key in ("reference", "precompute_ref_log_probs", "share_prompts") or f"`{key}`" in row
        assert all(kind in row for kind in objective.loss_types)
        if objective.beta:
            assert f"`beta` {objective.beta}" in row
            assert beta_of(ObjectiveKeys(objective=name)) == objective.beta
    assert f"`simpo_gamma` {ObjectiveKeys.model_fields['simpo_gamma'].default}" in "\n".join(rows)


@pytest.mark.parametrize("given, said", [
    ([], None),
    (["--objective", "dpo"], "DPO, loss_type sigmoid, beta 0.1; reference: model, computed before training"),
    (["--objective", "ipo", "--use_peft"], "IPO, beta 0.1; reference: adapters_off, computed in each step"),
    (["--objective", "dpo", "--reference", "other", "--precompute_ref_log_probs", "false", "--loss_type", "hinge"],
     "DPO, loss_type hinge, beta 0.1; reference: other, computed in each step"),
    (["--objective", "distill", "--teacher", "other"],
     "distillation of other, loss_type forward_kl, temperature 1, weight 0.5 beside the cross-entropy"),
    (["--objective", "distill", "--teacher", "other", "--loss_type", "jsd", "--kd_temperature", "2", "--kd_ratio", "1"],
     "distillation of other, loss_type jsd, beta 0.5, temperature 2, weight 1 beside the cross-entropy"),
    (["--objective", "simpo"], "SimPO, beta 2"), (["--objective", "reward"], "a reward model"),
], ids=str)  # fmt: skip
def test_the_opening_table_says_what_is_compared_with_what(given, said):
    assert objectives.describe(flags.load(given).recipe).get("objective") == said


# ---- a loss of one's own -----------------------------------------------------------------------------------------
def test_the_documented_loss_of_ones_own_works():
    own = REPOSITORY / "docs/examples/cal_dpo.py"
    settings = flags.load(["--objective", f"{own}:loss", "--reference", "model"])
    function, training = loss_of(settings), settings.recipe.training
    one = torch.tensor([1.0])
    result = function(Pairs(-2 * one, -3 * one, one, one, -2.5 * one, -2 * one), options_of(training))
    assert float(result.losses) == pytest.approx(float(torch.log1p(torch.exp(torch.tensor(-1.5)))) + 4.5**2 + 4.0**2)
    assert float(result.figures["rewards/margins"]) == pytest.approx(0.15)


def test_a_loss_of_ones_own_may_return_a_pair():
    one = torch.tensor([1.0, 2.0])
    result = compare(lambda pairs, options: (pairs.chosen, {"a": pairs.chosen}), None, one, one, None)
    assert result.losses.tolist() == [1.0] and means_of(result) == {"loss": 1.0, "a": 1.0}


HEADER = """import torch
from torch.nn.functional import logsigmoid
from brigade.train.loss.objective.contract import Result
calls, seen = [], {}
class Margins:
    mean = 0.0
    def update(self, margins):
        self.mean = 0.999 * self.mean + 0.001 * float(margins.mean())
        return self.mean
running = Margins()
"""
BESIDE, AGAIN, FIRST = "depends on the pairs beside it", "something else the next time", "the pairs of its first call"


@pytest.mark.parametrize("code, problem", [
    (None, "there is no file"),
    ("x = (", "cannot be imported: SyntaxError"),
    ("def other(pairs, options): ...", "has no function 'loss'\n  cure: name one that it has: .*other"),
    ("loss = 3", "has no function 'loss'"),
    *((f"def loss(pairs, options): x = pairs.chosen - pairs.rejected; {body}", problem) for body, problem in {
        "return pairs.chosen": "tried with 1000 pairs, it raises TypeError",
        "return pairs.chosen.sum(), {}": r"of 1000 pairs, losses has the shape \(\)",
        "return pairs.chosen.squeeze(), {}": r"of 1 pair, losses has the shape \(\)",
        "return x.detach(), {}": "no gradient",
        "return pairs.log_ratios[0], {}": "names none\n  cure: name one: reference: model",
        "return pairs.chosen, {'a': pairs.chosen.mean()}": r"a has the shape \(\)",
        "return pairs.chosen, {'a': (pairs.chosen, pairs.chosen.mean() > 0)}": r"which of a count has the shape \(\)",
        "return -logsigmoid(0.01 * (x - x.mean())), {}": BESIDE,
        "return -logsigmoid(x / x.std().detach()), {}": "of 1 pair, losses .* nan|" + BESIDE,
        "return (x if len(x) < 300 else x - x.mean()), {}": BESIDE,
        "return x * torch.linspace(1, 2, len(x)), {}": BESIDE,
        "return x * (pairs.chosen_tokens / pairs.chosen_tokens.max()), {}": BESIDE,
        "return x.softmax(0), {}": BESIDE,
        "return x.clamp(max=0.9 * float(x.max())), {}": BESIDE,
        "return -logsigmoid(x) + torch.rand(len(x)), {}": AGAIN,
        "return -torch.nn.functional.dropout(x, 0.1), {}": AGAIN,
        "return -logsigmoid(x - running.update(x)), {}": AGAIN,
        "return -logsigmoid(x - seen.setdefault('mean', x.mean().detach())), {}": FIRST,
        "return x / seen.setdefault('largest', float(x.detach().abs().max())), {}": FIRST,
        "return x * x.argsort().argsort(), {}": BESIDE, "return x.cumsum(0), {}": BESIDE,
        "return x - x.flip(0).detach(), {}": BESIDE,
        "return x.sort().values, {}": BESIDE, "return x * (x > x.median()), {}": BESIDE,
        "return x[:, None].sub(pairs.rejected).logsumexp(1), {}": BESIDE,
        "calls.append(0); return x / (1 + len(calls) // 100), {}": AGAIN,
        "pairs.chosen_tokens.div_(2); return x, {}": "it changes chosen_tokens in place",
        "x = pairs.chosen.sub_(pairs.rejected); return x, {}": "it changes chosen in place",
        "return x.sqrt(), {}": "of chosen -.+ it makes nan",
    }.items()),
])  # fmt: skip
def test_a_loss_that_breaks_the_contract_is_refused_before_the_model_is_built(tmp_path, code, problem, mistake):
    if code is not None:
        (tmp_path / "own.py").write_text(HEADER + code)
    settings = flags.load(["--objective", f"{tmp_path}/own.py:loss"])
    assert re.search(problem, mistake(loss_of, settings))


@pytest.mark.parametrize("name, loss_type", [
    (name, each) for name, known in OBJECTIVES.items() if known.rows == PAIRS for each in known.loss_types or (None,)
])  # fmt: skip
def test_losses_like_ours_keep_the_contract(name, loss_type):
    argv = ["--objective", name, *(["--loss_type", loss_type] if loss_type else [])]
    argv += ["--label_smoothing", "0.1"] * (loss_type == "robust")
    settings = flags.load(argv)
    function = loss_of(settings)
    assert not load._breaks_contract(lambda: function, settings.recipe.training)


@pytest.mark.parametrize("chosen, rejected", [(20.0, 1.0), (1.0, 20.0), (20.0, 20.0)])
def test_orpo_has_a_gradient_where_an_answer_is_certain(chosen, rejected):
    """From a gap of 17 on, an fp32 cross-entropy of one token is 0, whose odds are infinite."""
    logits = torch.tensor([[chosen, 0.0], [rejected, 0.0]], requires_grad=True)
    settings = flags.load(["--objective", "orpo"])
    function, options, one = loss_of(settings), options_of(settings.recipe.training), torch.ones(1)
    found = -torch.nn.functional.cross_entropy(logits, torch.zeros(2, dtype=torch.long), reduction="none").double()
    result = function(Pairs(found[:1], found[1:], one, one), options)
    result.losses.sum().backward()
    assert all(bool(figure.isfinite().all()) for figure in (result.losses, *result.figures.values()))
    # The gap of the two logits is the log odds itself: the gradient is that of beta x softplus(rejected - chosen).
    share = options.beta * torch.sigmoid(torch.tensor(rejected - chosen))
    wanted = [-float(share) - 1 / (1 + math.exp(chosen)), float(share)]
    assert bool(logits.grad.isfinite().all())
    for own, each, gap in zip((-logits.grad[:, 1]).tolist(), wanted, (chosen, rejected), strict=True):
        assert own * each > 0 and abs(own) <= abs(each) + 1e-7 and (gap > 17 or own == pytest.approx(each, 1e-4, 1e-7))


def test_a_margin_over_labelled_answers_is_the_difference_of_their_means():
    good, values = torch.tensor([True, True, False]), torch.tensor([1.0, 3.0, -1.0])
    figures = {"rewards/chosen": (values, good), "rewards/rejected": (values, ~good)}
    found = means_of(Result(values, figures))
    assert found == {"loss": 1.0, "rewards/chosen": 2.0, "rewards/rejected": -1.0, "rewards/margins": 3.0}
    one_kind = {"rewards/chosen": (values, good), "rewards/rejected": (values, good & ~good)}
    assert means_of(Result(values, one_kind)) == {"loss": 1.0, "rewards/chosen": 2.0}


# ---- what is kept of a reference ---------------------------------------------------------------------------------
def test_what_a_reference_says_is_kept_apart_for_each_form_of_its_weights(tmp_path):
    (tmp_path / "adapter_model.safetensors").touch()
    begun = {"use_peft": True, "adapter_name_or_path": str(tmp_path)}

    def made_of(reference, **model):
        run = SimpleNamespace(
            settings=flags.load(["--objective", "dpo"]).with_model(**model), base={"weights": "digest"}
        )
        trainer = SimpleNamespace(run=run, model=SimpleNamespace(config=CONFIG))
        return json.dumps(Reference(trainer, reference, True)._made_of())

    forms = [{}, {"load_in_4bit": True}, *({"load_in_4bit": True, key: value} for key, value in
             (("bnb_4bit_quant_type", "fp4"), ("use_bnb_nested_quant", False)))]  # fmt: skip
    assert len({made_of(ADAPTERS_OFF, **form) for form in forms}) == len(forms)
    alphas = {made_of(MODEL, **begun, lora_alpha=alpha) for alpha in (16, 32)}
    assert len(alphas) == 2
    assert made_of(MODEL) == json.dumps([{"weights": "digest"}, False, None]), "files of earlier versions are found"


# ---- log-probabilities -------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


def sequences():
    """Three sequences of pairs of uneven lengths, and filler."""
    random = np.random.default_rng(0)
    made = []
    for lengths in ((5, 9), (12, 3), (4, 4, 7, 6)):
        ids = [random.integers(0, 90, length) for length in lengths]
        labels = [np.where(np.arange(len(each)) < len(each) // 2 + 1, IGNORED, each) for each in ids]
        made.append({
            "input_ids": np.concatenate(ids).astype(np.int32),
            "labels": np.concatenate(labels).astype(np.int64),
            "lengths": np.array(lengths),
        })  # fmt: skip
    filler = {"input_ids": np.full(2, PAD, np.int32), "labels": np.full(2, IGNORED), "lengths": np.array([2])}
    return [made[0], filler, *made[1:]]


@torch.no_grad()
def alone(model, given):
    """The log-probability of each answer, each sample by itself."""
    found = []
    for sequence in given:
        ends = np.cumsum(sequence["lengths"])[:-1]
        for ids, labels in zip(np.split(sequence["input_ids"], ends), np.split(sequence["labels"], ends), strict=True):
            if (own := labels[1:] != IGNORED).any():
                logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1].log_softmax(-1)
                targets = torch.from_numpy(ids[1:].astype(np.int64))
                found.append(float(logits[torch.arange(len(ids) - 1), targets][own].sum()))
    return torch.tensor(found)


def inputs_of(batch):
    return {key: value for key, value in batch.items() if key not in (ABOUT, ANSWERS, "in_parts")}


@pytest.mark.parametrize("tiles", [None, 3])
@pytest.mark.parametrize("padding_free", [True, False])
def test_log_probabilities_are_those_of_each_answer_by_itself(model, padding_free, tiles):
    twin = LlamaForCausalLM(CONFIG).eval()
    twin.load_state_dict(model.state_dict())
    own_loss.return_token_losses(twin)
    if tiles:
        tiled.apply(twin, tiles, None, by_token=True)
    given = sequences()
    batch = Collate(PAD, Layout(padding_free, False, False, multiple=8, rows=PAIRS))((given, 4))
    with torch.no_grad():
        found = sums(twin(**inputs_of(batch), use_cache=False, num_items_in_batch=4).loss, batch[ANSWERS])
    torch.testing.assert_close(found, alone(model, given).double(), rtol=1e-5, atol=1e-5)


def test_parts_of_divided_sequences_add_up(model):
    given = sequences()
    losses = -torch.arange(1.0, 200.0)
    whole = Collate(PAD, Layout(True, True, True, multiple=4, rows=PAIRS))((given, 4))
    layout = Layout(True, True, True, 2, False, False, PAIRS)
    parts = [DividedSequences(PAD, layout, number=n, of=2)((given, 4)) for n in (0, 1)]
    # Each target's loss is made of its place among all targets.
    found, begin = 0, 0
    for part in parts:
        real = int((part["shift_labels"] != IGNORED).sum())
        own = torch.zeros(part["shift_labels"].numel())
        own[:real] = losses[begin : begin + real]
        found, begin = found + sums(own, part[ANSWERS]), begin + real
    everything = torch.zeros(whole["shift_labels"].numel())
    everything[:begin] = losses[:begin]
    torch.testing.assert_close(found, sums(everything, whole[ANSWERS]))


def test_a_log_ratio_of_131072_tokens_is_not_rounded():
    tokens = 2**17
    losses = 4 + torch.rand(tokens, generator=torch.Generator().manual_seed(0))
    others = losses + 2.0**-20  # which fp32 holds
    given = {RUNS: torch.tensor([tokens]), WHICH: torch.tensor([0])}
    assert float(sums(losses, given) - sums(others, given)) == pytest.approx(tokens * 2.0**-20, rel=1e-6)
    halves = [sums(half, {RUNS: torch.tensor([tokens // 2]), WHICH: torch.tensor([0])}) for half in losses.chunk(2)]
    assert float(halves[0] + halves[1] - sums(losses, given)) == pytest.approx(0, abs=1e-6)


def test_a_micro_batch_of_filler_has_no_answer_and_keeps_its_place_in_the_graph():
    filler = sequences()[1]
    batch = Collate(PAD, Layout(True, False, False, rows=JUDGED))(([filler, filler], 4))
    answers = batch[ANSWERS]
    assert len(answers[WHICH]) == 0 and int(answers[RUNS].sum()) == 1
    assert len(answers[REFERENCE]) == 0 and len(answers[MISMATCHED][ANSWERS][WHICH]) == 0
    assert sums(torch.zeros(1), answers).shape == (0,)


def test_judged_answers_come_with_those_to_other_prompts():
    given = sequences()[0]
    single = {key: value[:5] for key, value in given.items() if key != "lengths"} | {"lengths": np.array([5])}
    other = {key: value[5:] for key, value in given.items() if key != "lengths"} | {"lengths": np.array([9])}
    judged = single | {"desirable": np.array([True]), MISMATCHED: other | {REFERENCE: np.array([-7.0], np.float32)}}
    batch = on_device(
        Collate(PAD, Layout(True, False, False, rows=JUDGED))(([judged, sequences()[1]], 2)), torch.device("cpu")
    )
    answers = batch[ANSWERS]
    assert answers["desirable"].tolist() == [True] and answers[MISMATCHED][ANSWERS][REFERENCE].tolist() == [-7.0]
    assert answers[MISMATCHED]["input_ids"][0, :9].tolist() == other["input_ids"].tolist()


def test_a_model_that_makes_something_else_of_token_losses_is_found():
    from transformers import AutoConfig

    assert not own_loss.why_no_token_losses(CONFIG)
    assert own_loss.why_no_token_losses(AutoConfig.for_model("cpmant"))


# ---- reward models -----------------------------------------------------------------------------------------------
def test_a_score_is_read_where_transformers_reads_it(model, tmp_path):
    model.save_pretrained(tmp_path / "base")
    config = LlamaConfig.from_pretrained(tmp_path / "base")
    reward = scores.class_of(config).from_pretrained(**scores_options(tmp_path / "base", config)).eval()
    assert not reward.score.weight.any()
    torch.nn.init.normal_(reward.score.weight)
    reward.config.pad_token_id = PAD
    given = sequences()
    given[0]["input_ids"][8:14] = [3, 4, PAD, 5, PAD, PAD]  # an answer that ends with the padding token
    batch = Collate(PAD, Layout(True, False, False, rows=PAIRS, scores=True))((given, 4))
    reward.save_pretrained(tmp_path / "reward")
    plain = scores.auto_class(tmp_path / "reward").from_pretrained(tmp_path / "reward").eval()
    wanted = []
    for sequence in (given[0], *given[2:]):
        for ids in np.split(sequence["input_ids"], np.cumsum(sequence["lengths"])[:-1]):
            wanted.append(plain(torch.from_numpy(ids.astype(np.int64))[None]).logits.detach()[0, 0])
    with torch.no_grad():
        found = sums(reward(**inputs_of(batch), use_cache=False).loss, batch[ANSWERS])
    torch.testing.assert_close(found, torch.stack(wanted).double(), rtol=1e-5, atol=1e-5)


def scores_options(folder, config):
    options = scores.loading(str(folder), config, "here")
    return {"pretrained_model_name_or_path": folder, "config": options["config"]}


def test_weights_that_lack_more_than_the_head_are_refused(model, tmp_path, mistake):
    from safetensors.torch import save_file

    model.save_pretrained(tmp_path)
    state = {name: value for name, value in model.state_dict().items() if "embed_tokens" not in name}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = LlamaConfig.from_pretrained(tmp_path)
    assert "embed_tokens" in mistake(lambda: scores.loading(str(tmp_path), config, "here"))
