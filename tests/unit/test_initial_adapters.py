"""PiSSA and OLoRA: the model that PEFT trains, on a base that stays as it is."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from brigade.errors import UserError
from brigade.plan.choice.job_of_recipe import job_of
from brigade.train.cluster import World
from brigade.train.model import adapter_weights, adapters, decomposed
from brigade.train.model.location import load_config
from brigade.train.recipe import flags
from brigade.train.strategy import choose
from testing.runs import write_model

BATCH = torch.tensor([[1, 300, 7, 4095, 300, 12], [9, 8, 2, 2, 40, 5]])
SIZE = [
    "--use_peft",
    "--lora_r",
    "4",
    "--lora_alpha",
    "6",
    "--lora_target_modules",
    "q_proj,down_proj",
    "--weight_decay",
    "0",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture
def settings_of(base, tmp_path, monkeypatch):
    monkeypatch.setenv("BRIGADE_CACHE", str(tmp_path / "cache"))
    return lambda *words: flags.load(["--model_name_or_path", str(base), "--from_scratch", "false", *SIZE, *words])


def ours_of(settings, base):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapters.check_targets(settings, load_config(settings))
    wrapped = adapters.wrap(model, settings, str(base))
    adapter_weights.load(wrapped, decomposed.make_adapters(settings, str(base)))
    return wrapped


def loss_of(model):
    return model(input_ids=BATCH, labels=BATCH).loss


PATTERNS = ["--use_rslora", "--rank_pattern", "{down_proj: 2}", "--alpha_pattern", "{q_proj: 3}"]


@pytest.mark.parametrize("how", ["pissa", "pissa_niter_16", "olora"])
@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ([], {}),
        pytest.param(
            PATTERNS,
            {"use_rslora": True, "rank_pattern": {"down_proj": 2}, "alpha_pattern": {"q_proj": 3}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plain", "patterns"],
)
def test_losses_and_updates_are_pefts(how, words, changes, base, settings_of, tmp_path):
    settings = settings_of("--init_lora_weights", how, *words)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wanted = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": how}
    torch.manual_seed(0)
    theirs = get_peft_model(copy.deepcopy(plain), LoraConfig(**wanted | changes))
    ours = ours_of(settings, base)
    before = {name: each.detach().clone() for name, each in ours.named_parameters()}
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2, weight_decay=0)
        for m in (ours, theirs)
    ]
    assert loss_of(ours).item() == pytest.approx(loss_of(plain).item(), rel=1e-6)
    tolerance = 1e-3 if "niter" in how else 1e-5  # PEFT draws the estimate's random numbers elsewhere
    for _ in range(4):
        losses = [loss_of(ours), loss_of(theirs)]
        torch.testing.assert_close(*losses, rtol=tolerance, atol=0)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert loss_of(ours).item() < loss_of(plain).item() - 0.05
    for name, each in ours.named_parameters():
        if each.requires_grad:
            trained, held = each.chunk(2, 0 if "lora_A" in name else 1)
            first, second = before[name].chunk(2, 0 if "lora_A" in name else 1)
            assert torch.equal(held, second) and not torch.equal(trained, first)
        else:
            assert torch.equal(each, before[name])
    ours.save_pretrained(tmp_path / "saved")
    again = PeftModel.from_pretrained(plain, tmp_path / "saved")
    assert loss_of(again).item() == pytest.approx(loss_of(ours).item(), rel=1e-6)
    assert loss_of(ours.merge_and_unload()).item() == pytest.approx(loss_of(again).item(), rel=1e-5)


def test_how_they_begin_is_made_once_and_asks_for_enough_singular_values(base, settings_of, tmp_path):
    settings = settings_of("--init_lora_weights", "pissa")
    first = decomposed.make_adapters(settings, str(base))
    assert decomposed.make_adapters(settings, str(base)) == first
    assert decomposed.make_adapters(settings_of("--init_lora_weights", "olora"), str(base)) != first
    assert decomposed.make_adapters(settings_of(), str(base)) is None
    with pytest.raises(UserError, match=r"a matrix of \(64, 64\) has no 65"):
        decomposed.make_adapters(settings_of("--init_lora_weights", "pissa", "--lora_r", "65"), str(base))


@pytest.mark.parametrize(
    "words",
    [["--weight_decay", "0.1"], ["--optim", "muon"], ["--lora_dropout", "0.1"], ["--use_dora"], ["--load_in_4bit"],
     ["--sync_every", "2"], ["--objective", "reward"]],
)  # fmt: skip
def test_what_would_change_how_they_began_is_refused(words, settings_of):
    world = World(0, 0, 2, 2, "here", "torchrun")
    choose(settings_of("--init_lora_weights", "pissa"), world, env={})
    with pytest.raises(UserError, match="init_lora_weights"):
        choose(settings_of("--init_lora_weights", "pissa", *words), world, env={})


@pytest.mark.parametrize("value", ["pizza", "pissa_niter_0", "false"])
def test_other_values_are_refused(value, settings_of):
    with pytest.raises(UserError, match="pissa_niter_NUMBER"):
        settings_of("--init_lora_weights", value)


def test_plan_counts_twice_the_rank():
    words = ["--recipe", "recipes/qwen3-8b/lora.yaml"]
    plain, pissa = (job_of(flags.load([*words, *more])).trained for more in ([], ["--init_lora_weights", "pissa"]))
    assert pissa == 2 * plain > 0
