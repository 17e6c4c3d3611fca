"""A router's bias follows the tokens of a step by DeepSeek-V3's rule, however the step is divided."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from brigade.train.checkpoint import states
from brigade.train.data.collate import REAL
from brigade.train.loss.router_loss import RouterLoss
from brigade.train.model import experts, load
from brigade.train.model.tiny import shrink
from brigade.train.recipe import flags
from brigade.train.step.router_bias import RouterBias
from brigade.train.upstream.experts import routing_biases
from testing.routers import passed, rows, trainer_of

RATE = 0.25
# Models with a bias of their own kind: of a buffer of the router, of its block, of a parameter, of one in a row, of the 2nd name.
KINDS = ("deepseek_v3", "glm4_moe", "minimax_m2", "laguna", "ernie4_5_moe", "afmoe")
NOT_BUILT = {"dots1", "dots3_note", "dots3_note_text"}  # in tiny sizes; Transformers cannot build dots1 in any
OTHERS = {"lfm2_moe": {"layer_types": ["full_attention"] * 2, "num_dense_layers": 0}}


def config_of(name, **changed):
    sizes = (
        shrink(CONFIG_MAPPING[name]().to_dict()) | {"moe_num_experts": 4, "moe_k": 2} | OTHERS.get(name, {}) | changed
    )
    return CONFIG_MAPPING[name](**sizes)


def of(name, **changed):
    """A tiny model with biases that differ in each layer, as those of a trained one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name, **changed), dtype=torch.float32).train()
    generator = torch.Generator().manual_seed(3)
    for bias in routing_biases(model):
        bias.tensor.data.copy_(0.05 * torch.rand(bias.tensor.shape, generator=generator))
    return model


def attached(model, rate=RATE, **how):
    return RouterBias(trainer_of(model), rate, **how)


def biases(model):
    ends = ("correction_bias", "expert_bias")
    return {name: tensor for name, tensor in model.state_dict().items() if name.endswith(ends)}


def step(update, *batches):
    """One step of these micro-batches; returns the biases after it."""
    model = update.trainer.model
    update.before_step()
    for inputs in batches:
        update.before_micro_batch(inputs)
        passed(model, inputs).loss.backward()
    update.on_optimizer_step(None, None, None)
    return {name: bias.clone() for name, bias in biases(model).items()}


def chosen(model, batches):
    """Name of a bias -> how many tokens chose each expert, by single sequences without padding, from the routers' own outputs."""
    counts = {}
    for inputs in batches:
        for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
            seen = []
            keep = partial(_keep_chosen, seen)
            hooks = [bias.experts.register_forward_pre_hook(keep) for bias in routing_biases(model)]
            with torch.no_grad():
                model(ids[mask.bool()][None], use_cache=False)
            for hook in hooks:
                hook.remove()
            for name, indices in zip(biases(model), seen, strict=True):
                own = counts.setdefault(name, [0] * biases(model)[name].numel())
                for index in indices.flatten().tolist():
                    own[index] += 1
    return counts


def _keep_chosen(seen, module, given):
    seen.append(given[1])


def followed(before, counts, rate=RATE):
    """The biases that DeepSeek-V3's rule makes of these."""
    after = {}
    for name, bias in before.items():
        mean = sum(counts[name]) / len(counts[name])
        signs = [(count < mean) - (count > mean) for count in counts[name]]
        after[name] = bias + rate * torch.tensor(signs, dtype=torch.float32).view(bias.shape)
    return after


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


# ---- the rule --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", KINDS)
def test_it_is_the_rule_of_deepseek_v3(name):
    model = of(name)
    before = {key: bias.clone() for key, bias in biases(model).items()}
    expected = followed(before, chosen(model, [rows()]))
    assert before and same(step(attached(model), rows()), expected)
    assert not same(before, expected)
    assert not same(followed(before, chosen(of(name), [rows()]), -RATE), expected)  # the wrong sign would show


@pytest.mark.parametrize("batches", [[(0, 1), (1, 4)], [(2, 4), (1, 2), (0, 1)]])
def test_accumulation_is_one_batch(batches):
    whole = step(attached(of("deepseek_v3")), rows())
    parts = [rows(*each) for each in batches]
    assert same(step(attached(of("deepseek_v3")), *parts), whole)
    assert not same(
        step(attached(of("deepseek_v3")), parts[-1]), whole
    )  # the last micro-batch by itself is another step


def test_several_steps_follow_one_another():
    model = of("deepseek_v3")
    update = attached(model)
    for inputs in (rows(0, 2), rows(2, 4)):
        before = {key: bias.clone() for key, bias in biases(model).items()}
        expected = followed(before, chosen(model, [inputs]))
        model.zero_grad()
        assert same(step(update, inputs), expected)


def test_layers_that_are_computed_again_count_once():
    expected = step(attached(of("deepseek_v3")), rows(0, 2), rows(2, 4))
    again = of("deepseek_v3")
    again.activation_checkpointing_enable({"use_reentrant": False})
    update = attached(again)
    update.before_step()
    total, losses = 0, []
    for inputs in (rows(0, 2), rows(2, 4)):
        update.before_micro_batch(inputs)
        losses.append(passed(again, inputs).loss)
        total += int(inputs[REAL].sum())
    update.before_micro_batch(inputs)  # as for another stage of this rank
    torch.stack(losses).sum().backward()
    assert update.tokens.sum() == total * again.config.num_experts_per_tok * len(update.biases)
    update.on_optimizer_step(None, None, None)
    assert same(biases(again), expected)


def test_evaluations_and_passes_that_count_ahead_do_not_count():
    model = of("minimax_m2")
    update = attached(model)
    loss = RouterLoss(update.trainer, 0.5, copies=1)
    expected = step(attached(of("minimax_m2")), rows(0, 2), rows(2, 4))
    model.eval()
    update.before_step()
    passed(model, rows())
    model.train()
    loss.before_micro_batches([rows(0, 2), rows(2, 4)])
    loss.on_step_begin(None, None, None)
    assert not update.tokens.any()
    for inputs in (rows(0, 2), rows(2, 4)):
        loss.before_micro_batch(inputs)
        update.before_micro_batch(inputs)
        (passed(model, inputs).loss + loss.term()).backward()
    passed(model.eval(), rows())
    update.on_optimizer_step(None, None, None)
    assert same(biases(model), expected)


def test_a_rank_with_anothers_tokens_counts_none():
    update = attached(of("deepseek_v3"), counts=False)
    step(update, rows())
    assert not update.tokens.any()


@pytest.mark.parametrize("what", ["dropped", "skipped"])
def test_a_step_that_is_left_out_changes_no_bias(what):
    model = of("deepseek_v3")
    before, update = {key: bias.clone() for key, bias in biases(model).items()}, attached(model)
    update.trainer.nonfinite.dropped = what == "dropped"
    update.trainer.accelerator.optimizer_step_was_skipped = what == "skipped"
    assert same(step(update, rows()), before)
    update.trainer.nonfinite.dropped = update.trainer.accelerator.optimizer_step_was_skipped = False
    model.zero_grad()
    once = step(update, rows(0, 2))
    assert same(once, step(attached(of("deepseek_v3")), rows(0, 2)))  # its tokens are forgotten


# ---- which models ----------------------------------------------------------------------------------------------------
def with_words(*words):
    """Types of causal language models whose code has one of these words."""
    models = Path(transformers.__file__).parent / "models"
    return [
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        for file in (models / model_type_to_module_name(name)).glob("modeling_*.py")
        if any(word in file.read_text() for word in words)
    ]


WITH_BIAS = sorted({*with_words("e_score_correction_bias", "expert_bias")} - NOT_BUILT)


@pytest.mark.parametrize("name", WITH_BIAS)
def test_a_larger_bias_makes_more_tokens_choose_an_expert(name):
    model = of(name)
    found = routing_biases(model)
    assert found and len(found) == len(biases(model))
    if name == "longcat_flash":  # experts that compute nothing
        assert all(bias.experts is None for bias in found)
        return
    update = attached(model)
    ids = rows()["input_ids"]
    inputs = {"input_ids": ids, "labels": ids, REAL: torch.ones_like(ids, dtype=torch.bool)}
    before = [layer.clone() for layer in counted(update, inputs)]
    assert all(int(layer.sum()) == before[0].sum() >= ids.numel() for layer in before)
    for bias in update.biases:
        bias.tensor.view(-1)[1] += 5  # no score is that large
    for layer in counted(update, inputs):
        assert layer[1] == ids.numel()
    for bias in update.biases:
        bias.tensor.view(-1)[1] -= 10
    for layer in counted(update, inputs):
        assert layer[1] == 0


def counted(update, inputs):
    update.before_step()
    update.before_micro_batch(inputs)
    passed(update.trainer.model, {key: value for key, value in inputs.items() if key != "labels"})
    return [*update.of_layers.values()]


# ---- what holds it ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", KINDS)
def test_it_is_a_buffer_in_fp32_under_its_name(name):
    model = of(name).bfloat16()
    before = biases(model)
    attached(model)
    assert list(biases(model)) == list(before) and {*biases(model)} <= {key for key, _ in model.named_buffers()}
    for key, bias in biases(model).items():
        assert bias.dtype == torch.float32 and torch.equal(bias, before[key].float())


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("rate", ["0.001", "0"])
def test_a_model_in_half_precision_gets_it_as_its_files_have_it(name, rate, tmp_path):
    whole = of(name)
    whole.save_pretrained(tmp_path)
    words = ["--model_name_or_path", str(tmp_path), "--from_scratch", "false", "--router_bias_update_rate", rate]
    model = load.load_base(flags.load(words), str(tmp_path), torch.bfloat16)
    assert {parameter.dtype for key, parameter in model.named_parameters() if "proj" in key} == {torch.bfloat16}
    if rate != "0":
        assert same(biases(model), biases(whole))


def test_a_wrapper_that_casts_it_is_refused(mistake):
    model = of("deepseek_v3")
    update = attached(model)
    update.trainer.run = SimpleNamespace(strategy=SimpleNamespace(source="ds.json"))
    update.begin(None)
    model.bfloat16()
    assert "buffer_dtype" in mistake(update.begin, None)


@pytest.mark.parametrize("name", ["minimax_m2", "qwen3_moe", "ernie4_5_moe", "llama"])
def test_what_ddps_checkpoint_calls_otherwise_is_loaded_too(name, tmp_path):
    """Transformers loads a checkpoint's files by the model's names, and passes over the rest."""
    trained, model = of(name), of(name)
    for parameter in trained.parameters():
        parameter.data.normal_()
    for bias in routing_biases(trained):
        bias.tensor.data.normal_()
    trained.save_pretrained(tmp_path)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    before = model.state_dict()
    passed_over = [key for key, value in trained.state_dict().items() if not torch.equal(value, before[key])]
    assert bool(passed_over) == (name != "llama")
    states.complete(model, tmp_path)
    assert same(model.state_dict(), trained.state_dict())


# ---- who gets it -----------------------------------------------------------------------------------------------------
ASKED = ["--router_bias_update_rate", "0.001"]


@pytest.mark.parametrize("model, words, kind, said", [
    ("qwen3_moe", [], "ddp", "routers of qwen3_moe have no bias"),
    ("llama", [], "ddp", "routers of llama have no bias"),
    ("longcat_flash", [], "ddp", "longcat_flash are not one number for each"),
    ("afmoe", [], "zero3", "biases of afmoe are parameters"),
    ("deepseek_v3", ["--use_peft"], "ddp", "adapters"),
    ("deepseek_v3", ["--torch_compile", "true"], "ddp", "torch_compile hides"),
    ("deepseek_v3", ["--tiled_mlp", "64"], "ddp", "tiled_mlp"),
    ("deepseek_v3", ["--sync_every", "5"], "ddp", "sync_every"),
    ("deepseek_v3", [], "pipeline", "each stage of a pipeline"),
])  # fmt: skip
def test_what_cannot_have_it_is_refused_by_name(model, words, kind, said, mistake):
    stages = 2 if kind == "pipeline" else 1
    message = mistake(lambda: experts.check_router_bias(flags.load([*ASKED, *words]), config_of(model), kind, stages))
    assert said in message
    assert "router_bias_update_rate" in message


@pytest.mark.parametrize("name, kind", [("deepseek_v3", "zero3"), ("afmoe", "fsdp2"), ("ernie4_5_moe", "zero2")])
def test_all_others_have_it(name, kind):
    experts.check_router_bias(flags.load(ASKED), config_of(name), kind, stages=1)
