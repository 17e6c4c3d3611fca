"""The loss of a mixture's routers is Transformers' own over all tokens of a step, however these are divided."""

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from brigade.train.data.collate import REAL, Collate, Layout, WithFiller
from brigade.train.engines.parallel.sequence import DividedSequences
from brigade.train.loss.router_loss import RouterLoss
from brigade.train.model import experts
from brigade.train.model.tiny import shrink
from brigade.train.recipe import flags
from brigade.train.step import preflight
from brigade.train.strategy import Strategy
from testing.routers import passed, rows, trainer_of

COEFFICIENT = 0.5


def of(name, **changed):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**(shrink(CONFIG_MAPPING[name]().to_dict()) | changed))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def attached(model):
    return RouterLoss(trainer_of(model), COEFFICIENT, copies=1)


def gradients(model):
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def step(model, *batches):
    """The routers' loss of a step, and its gradients."""
    loss, total = attached(model), 0.0
    loss.before_micro_batches([*batches])
    loss.on_step_begin(None, None, None)
    for inputs in batches:
        loss.before_micro_batch(inputs)
        passed(model, inputs)
        term = loss.term()
        term.backward()
        total += float(term.detach())
    logs = {}
    loss.add_figures(logs, 1)
    assert logs["aux_loss"] == pytest.approx(total / COEFFICIENT)
    return total, gradients(model)


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral", "gpt_oss", "minimax_m2", "granitemoe", "jamba"])
def theirs(request):
    """(type of config, Transformers' own loss for the whole batch, its gradients)"""
    model = of(request.param)
    inputs = {key: value for key, value in rows().items() if key != REAL}
    found = model(**inputs, use_cache=False, output_router_logits=True).aux_loss
    assert found > 1
    (COEFFICIENT * found).backward()
    return request.param, COEFFICIENT * float(found.detach()), gradients(model)


@pytest.mark.parametrize("batches", [[(0, 4)], [(0, 1), (1, 4)], [(2, 4), (1, 2), (0, 1)]])
def test_it_is_that_of_transformers_over_the_whole_step(theirs, batches):
    name, loss, expected = theirs
    ours, found = step(of(name), *[rows(*each) for each in batches])
    assert ours == pytest.approx(loss, rel=1e-6)
    assert found.keys() == expected.keys() and len(found) > 2
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-5, atol=1e-7)


def test_a_mean_of_micro_batches_own_losses_is_another_loss():
    """What trainers compute that let the model add it: the reason why this one exists."""
    whole, _ = step(of("qwen3_moe"), rows())
    parts = [step(of("qwen3_moe"), rows(number, number + 1))[0] for number in range(4)]
    assert abs(sum(parts) / 4 - whole) > 1e-3 * whole


def test_counting_ahead_draws_the_same_dropout_and_leaves_no_trace():
    model, batches = of("qwen3_moe", attention_dropout=0.5), [rows(0, 2), rows(2, 4)]
    loss = attached(model)
    loss.before_micro_batches(batches)
    torch.manual_seed(5)  # as a run that goes on loads its checkpoint's: between the two
    loss.on_step_begin(None, None, None)
    ahead, counts = loss.weights, []
    assert not loss.logits and not gradients(model)
    for inputs in batches:
        loss.before_micro_batch(inputs)
        passed(model, inputs)
        counts.append(loss._counts())
        loss.term()
    torch.testing.assert_close(ahead, loss._weights(sum(counts)), rtol=0, atol=0)
    loss.before_micro_batches(batches)
    loss.on_step_begin(None, None, None)
    assert not torch.equal(ahead, loss.weights)  # other dropout, other experts: the test can fail


def test_layers_that_are_computed_again_count_once():
    model = of("qwen3_moe")
    expected = step(model, rows())
    again = of("qwen3_moe")
    again.activation_checkpointing_enable({"use_reentrant": False})
    loss, found = step(again, rows())
    assert loss == pytest.approx(expected[0])
    torch.testing.assert_close(found, expected[1])


def test_a_step_that_is_left_out_is_not_logged():
    """As one whose loss was NaN, which would stay in all that follow."""

    def one_step(loss):
        loss.before_micro_batches([rows()])
        loss.on_step_begin(None, None, None)
        loss.before_micro_batch(rows())
        passed(model, rows())
        loss.term()

    model, alone, logs = of("qwen3_moe"), {}, {}
    loss = attached(model)
    for bad in (False, True, False):
        one_step(loss)
        if bad:
            loss.sum += torch.nan
            loss.forget_step()
    loss.add_figures(logs, 3)
    first = attached(model)
    one_step(first)
    first.add_figures(alone, 1)
    assert logs["aux_loss"] == pytest.approx(alone["aux_loss"])


def test_evaluations_are_not_looked_at():
    model = of("qwen3_moe")
    loss = attached(model)
    model.eval()
    passed(model, rows())
    assert not loss.logits


# ---- which tokens count ----------------------------------------------------------------------------------------------
def sequence(length, begin=0):
    ids = np.arange(begin, begin + length, dtype=np.int32)
    return {"input_ids": ids, "labels": ids.astype(np.int64), "lengths": np.array([length])}


@pytest.mark.parametrize("padding_free", [True, False])
def test_filler_and_padding_do_not_count(padding_free):
    samples = WithFiller([sequence(5), sequence(3)], pad_token_id=0)
    layout = Layout(padding_free, False, False, multiple=4, marks=True)
    batch = Collate(0, layout)(([samples[0], samples[-1], samples[1]], 8))
    assert batch[REAL].shape == batch["input_ids"].shape and int(batch[REAL].sum()) == 8
    expected = [1] * 5 + [0] * 2 + [1] * 3 + [0] * 2 if padding_free else [1] * 5 + [0] * 11 + [1] * 3 + [0] * 5
    assert batch[REAL].flatten().int().tolist() == expected


def test_each_rank_of_a_sequence_group_marks_its_own_part():
    layout = Layout(True, False, True, 1, False, True)
    divided = [DividedSequences(0, layout, number=number, of=2) for number in range(2)]
    parts = [collate(([sequence(5), sequence(2)], 7)) for collate in divided]
    assert [part[REAL].tolist() for part in parts] == [[[True] * 4], [[True] * 3 + [False]]]


# ---- who gets it -----------------------------------------------------------------------------------------------------
def config_of(name, **changed):
    return CONFIG_MAPPING[name](**changed)


@pytest.mark.parametrize("words, changed, coefficient", [
    ([], {}, 0),
    ([], {"output_router_logits": True}, 0.001),
    ([], {"output_router_logits": True, "router_aux_loss_coef": 0.02}, 0.02),
    (["--router_aux_loss_coef", "0.1"], {}, 0.1),
    (["--router_aux_loss_coef", "0"], {"output_router_logits": True}, 0),
])  # fmt: skip
def test_the_recipe_decides_and_else_the_models_config(words, changed, coefficient):
    assert experts.router_loss_coef(flags.load(words), config_of("qwen3_moe", **changed)) == coefficient


ASKED = ["--router_aux_loss_coef", "0.1"]


def test_a_config_that_asks_by_another_name_is_not_passed_over(mistake):
    """JetMoE calls its weight aux_loss_coef."""
    config = config_of("jetmoe", output_router_logits=True)
    assert experts.router_loss_coef(flags.load([]), config)
    assert "no loss for the routers of jetmoe" in mistake(lambda: experts.check_router_loss(flags.load([]), config, 1))


@pytest.mark.parametrize("model, words, stages, said", [
    ("deepseek_v3", ASKED, 1, "no loss for the routers of deepseek_v3"),
    ("qwen3", ASKED, 1, "no loss for the routers of qwen3"),
    ("doge", ASKED, 1, "no loss for the routers of doge"),
    ("qwen3_moe", ASKED, 2, "each stage of a pipeline has some"),
    ("qwen3_moe", [*ASKED, "--torch_compile", "true"], 1, "torch_compile hides"),
    ("qwen3_moe", [*ASKED, "--sync_every", "5"], 1, "sync_every"),
    ("qwen3_moe", [*ASKED, "--tiled_mlp", "auto"], 1, "tiled_mlp divides"),
])  # fmt: skip
def test_what_cannot_have_it_is_refused_by_name(model, words, stages, said, mistake):
    message = mistake(lambda: experts.check_router_loss(flags.load(words), config_of(model), stages))
    assert said in message
    assert "router_aux_loss_coef" in message
    experts.check_router_loss(flags.load(ASKED), config_of("qwen3_moe"), 1)


@pytest.mark.parametrize(
    "words, said", [(["--neftune_noise_alpha", "5"], "with other noise"), (["--images"], "have images")]
)
def test_what_a_recipe_refuses_beside_it_is_refused_where_the_config_asks_for_it(words, said, mistake):
    strategy, config = Strategy("single", "single", "here"), config_of("qwen3_moe", output_router_logits=True)
    assert said in mistake(preflight.check_routers, flags.load(words), strategy, config)
    assert "router_aux_loss_coef" in mistake(preflight.check_routers, flags.load(words), strategy, config)
    preflight.check_routers(flags.load([*words, "--router_aux_loss_coef", "0"]), strategy, config)
