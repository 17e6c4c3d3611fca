"""Label smoothing, z-loss and NEFTune by the formulas of their papers, written out again; and sums of losses."""

import random
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import LlamaConfig

from brigade.errors import UserError
from brigade.train.data.store import IGNORED
from brigade.train.loss import supervised_loss
from brigade.train.loss.own_loss import changes_loss, is_doubtful, why_no_token_losses, why_not_divided
from brigade.train.loss.supervised_loss import PLAIN, Terms, of_tokens
from brigade.train.model.tiny import shrink
from brigade.train.recipe import flags
from brigade.train.recipe.program import own_function
from brigade.train.step.neftune import sample_lengths
from testing.ranks import REPOSITORY


@pytest.fixture
def batch():
    torch.manual_seed(1)
    targets = torch.randint(0, 11, (6,))
    targets[2] = IGNORED
    return torch.randn(6, 11) * 3, targets


def test_each_term_is_its_formula(batch):
    logits, targets = batch
    kept = targets != IGNORED
    log_p = logits.log_softmax(-1)[kept]
    nll, uniform = -log_p.gather(1, targets[kept, None])[:, 0], -log_p.mean(-1)
    log_z = logits[kept].exp().sum(-1).log()
    own = (0.9 * nll + 0.1 * uniform + 0.01 * log_z**2).sum()
    assert torch.isclose(of_tokens(logits, targets, Terms(0.1, 0.01)), own)
    assert torch.isclose(of_tokens(logits, targets, Terms(0.1, 0.01), "none").sum(), own)
    assert torch.isclose(of_tokens(logits, targets, PLAIN), nll.sum())


def test_ignored_targets_give_no_gradient(batch):
    logits, targets = batch
    logits.requires_grad_()
    of_tokens(logits, targets, Terms(0.1, 0.01)).backward()
    assert logits.grad[2].abs().max() == 0 < logits.grad[0].abs().max()


def test_a_model_whose_forward_pass_has_a_loss_of_its_own_is_refused(monkeypatch, user_error):
    from transformers import LlamaForCausalLM

    def forward(self, input_ids, labels=None, **_):
        found = self.whole(input_ids=input_ids, use_cache=False)
        found.loss = torch.nn.functional.cross_entropy(found.logits[0, :-1], labels[0, 1:])
        return found

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=64)
    settings = flags.load(["--recipe", "recipes/tiny/full.yaml", "--z_loss_coef", "0.001"])
    supervised_loss.check(settings, config)
    monkeypatch.setattr(LlamaForCausalLM, "whole", LlamaForCausalLM.forward, raising=False)
    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    caught = user_error(supervised_loss.check, settings, config)
    assert "z_loss_coef" in caught.place and "a loss of its own" in caught.problem


def test_noise_goes_by_the_length_of_each_sample_packed_or_padded():
    ids = torch.zeros(1, 7, dtype=torch.long)
    packed = sample_lengths({"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]])})
    assert packed.tolist() == [[3, 3, 3, 4, 4, 4, 4]]
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    padded = sample_lengths({"input_ids": torch.zeros(2, 3, dtype=torch.long), "attention_mask": mask})
    assert padded.tolist() == [[2, 2, 2], [3, 3, 3]]
    rows = {"input_ids": torch.zeros(2, 3, dtype=torch.long), "position_ids": torch.tensor([[0, 1, 2], [0, 1, 0]])}
    assert sample_lengths(rows).tolist() == [[3, 3, 3], [2, 2, 1]]


# ---- a function of one's own ---------------------------------------------------------------------------------------
def test_a_function_of_tokens_is_summed_over_those_that_are_supervised(batch):
    logits, targets = batch
    kept = targets != IGNORED
    own = own_function(flags.load(["--token_loss", f"{REPOSITORY}/docs/examples/dft.py:loss"]), "token_loss")
    nll = torch.nn.functional.cross_entropy(logits[kept], targets[kept], reduction="none")
    expected = (nll * (-nll).exp()).sum()
    assert torch.isclose(of_tokens(logits, targets, Terms(own=own)), expected)
    z = (logits[kept].logsumexp(-1) ** 2).sum()
    assert torch.isclose(of_tokens(logits, targets, Terms(z=0.01, own=own), "none").sum(), expected + 0.01 * z)


def test_what_a_function_makes_of_ignored_targets_reaches_no_gradient(batch):
    logits, targets = batch
    logits.requires_grad_()
    root = of_tokens(logits, targets, Terms(own=lambda losses, targets: losses.sqrt()))
    root.backward()
    assert torch.isfinite(logits.grad).all() and logits.grad[2].abs().max() == 0


HEADER = """import random
import numpy, torch
calls = []
ids = {}
"""
BESIDE, AGAIN = "depends on the tokens beside it", "something else the next time"


@pytest.mark.parametrize("code, problem", [
    (None, "there is no file"), ("def other(losses, targets): ...", "has no function 'loss'"),
    *((f"def loss(losses, targets): {body}", problem) for body, problem in {
        "return losses.sum()": r"of 4096 tokens, its result has the shape \(\)",
        "return losses.squeeze(0)": r"of 1 token, its result has the shape \(\)",
        "return losses.detach()": "no gradient",
        "return losses / losses.mean()": BESIDE,
        "return losses * (losses > losses.mean()).float()": BESIDE,
        "return losses.clamp(max=0.9 * float(losses.max()))": BESIDE,
        "return torch.where(losses >= losses.topk(min(100, len(losses))).values[-1], losses, 0 * losses)": BESIDE,
        "return losses - losses.mean() if len(losses) > 1000 else losses": BESIDE,
        "return losses - losses.mean() if 1 < len(losses) < 5 else losses": BESIDE,
        "return losses * torch.linspace(0, 1, len(losses))": BESIDE,
        "return losses + losses.roll(1).detach()": BESIDE,
        "return losses / torch.bincount(targets)[targets]": BESIDE,
        "return losses * (1 + losses.mean() - losses.mean().detach())": BESIDE,  # by its gradient alone
        "return losses.topk(5).values.mean() * losses": "tried with (2|3|4) tokens, it raises RuntimeError",
        "return torch.nn.functional.dropout(losses)": AGAIN,
        "return losses + numpy.random.rand()": AGAIN,
        "return losses * random.random()": AGAIN,
        "return (torch.manual_seed(3), losses)[1]": "it draws random numbers, or seeds them",
        "return calls.append(0) or losses * len(calls)": AGAIN,
        "return calls.append(0) or losses * (1 + len(calls) // 100)": AGAIN,
        "return losses / ids.setdefault('n', 1 + torch.bincount(targets, minlength=32000))[targets]": "tokens of its first call",
        "return losses / ids.setdefault('largest', float(losses.max()))": "tokens of its first call",
        "return losses * losses.argsort().argsort()": BESIDE, "return losses.cumsum(0)": BESIDE,
        "return torch.nn.functional.batch_norm(losses[:, None], None, None, training=True)[:, 0]": "with 1 token, it raises",
        "return losses.mul_(2)": "it changes losses in place",
        "return losses * targets.clamp_(max=9)": "it changes targets in place",
        "return (1 - losses).log()": r"of losses \d.+, targets \d+ it makes nan",
        "return losses.detach().requires_grad_() * torch.autograd.grad(losses.sum(), losses)[0]": "it raises RuntimeError",
    }.items()),
    ("def loss(losses): return losses", "tried with 4096 tokens, it raises TypeError"),
])  # fmt: skip
def test_a_function_that_is_none_of_tokens_is_refused(tmp_path, code, problem):
    if code is not None:
        (tmp_path / "own.py").write_text(HEADER + code)
    settings = flags.load(["--token_loss", f"{tmp_path}/own.py:loss"])
    before = random.getstate(), torch.get_rng_state().tolist()
    with pytest.raises(UserError, match=problem) as caught:
        supervised_loss.check(settings, LlamaConfig())
    assert caught.value.place == "flag --token_loss"
    assert (random.getstate(), torch.get_rng_state().tolist()) == before


@pytest.mark.parametrize("body", [
    "return losses", "return losses * (-losses.detach()).exp()", "return (1 - (-losses).exp()) ** 2 * losses",
    "return losses * torch.where(targets == 2, 5.0, 1.0)", "return losses.bfloat16().float() ** 1.5",
    "return losses * torch.linspace(1, 2, 32000)[targets]", "return -(1 - (-losses).exp()).log()",
    "return torch.stack([loss.exp() for loss in losses]) if len(losses) == 1 else losses.exp()",
    "return calls.append(0) or losses.clamp(max=5)", "return ids.setdefault('weights', torch.ones(32000))[targets] * losses",
])  # fmt: skip
def test_a_function_of_single_tokens_is_taken(tmp_path, body):
    (tmp_path / "own.py").write_text(f"{HEADER}def loss(losses, targets): {body}")
    settings = flags.load(["--token_loss", f"{tmp_path}/own.py:loss"])
    assert not supervised_loss._breaks_contract(lambda: own_function(settings, "token_loss"), 32000)


# ---- sums ------------------------------------------------------------------------------------------------------------
def test_a_loss_that_does_not_is_named(monkeypatch):
    output = SimpleNamespace(loss=torch.tensor(2.0), logits=torch.zeros(1, 16, 50))
    model = SimpleNamespace(eval=lambda: lambda **_: output)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", lambda *_, **__: model)
    assert why_not_divided(transformers.AutoConfig.for_model("qwen3")) == "it takes no num_items_in_batch"
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", lambda *_, **__: 1 / 0)
    assert "ZeroDivisionError" in why_not_divided(transformers.AutoConfig.for_model("qwen3"))


@pytest.mark.parametrize(
    "name, doubtful", [("qwen3", False), ("gemma3_text", False), ("gemma4", False), ("cpmant", True), ("trocr", True)]
)
def test_a_forward_pass_with_a_loss_of_its_own_is_tried_whatever_its_signature_says(name, doubtful):
    """Theirs takes any keyword, and is a mean: accumulation changed the loss of CPM-Ant by a factor of 4."""
    config = transformers.CONFIG_MAPPING[name].from_dict(shrink(transformers.CONFIG_MAPPING[name]().to_dict()))
    assert is_doubtful(on_meta(config), says=True) == doubtful
    assert bool(why_not_divided(config)) == doubtful


def on_meta(config):
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("coefficient", [0.0, 1e-6, 1e-2])
def test_a_term_that_a_forward_pass_adds_to_a_divided_loss_is_found(coefficient):
    """Bamba adds the mean of a micro-batch, whatever the step has."""
    config = transformers.BambaConfig.from_dict(shrink(transformers.BambaConfig().to_dict()))
    config.z_loss_coefficient = coefficient
    assert is_doubtful(on_meta(config), says=True)
    assert why_not_divided(config) == (coefficient > 0) * "it is not a sum over tokens, divided by num_items_in_batch"


def test_the_loss_of_routers_is_not_doubtful():
    """A model is told to leave it out: it is computed of the whole step (router_loss.py)."""
    asks = transformers.Qwen3MoeConfig(output_router_logits=True, router_aux_loss_coef=0.1)
    assert not why_not_divided(asks) and not why_no_token_losses(asks)
    for name in ("mixtral", "qwen3_moe", "jetmoe", "granitemoe"):
        config = transformers.CONFIG_MAPPING[name].from_dict(shrink(transformers.CONFIG_MAPPING[name]().to_dict()))
        assert not is_doubtful(on_meta(config), says=True)


@pytest.mark.parametrize("body, doubtful", [
    ("loss = self.loss_function(x)\n    return Output(loss=loss)", False),
    ("loss = self.loss_function(x)\n    return (loss,) + x if loss is not None else x", False),
    ("return self.loss_function(x)", False),
    ("loss = self.loss_function(x)\n    aux_loss = f(x)\n    loss += 0.1 * aux_loss\n    return loss", False),
    ("loss = self.loss_function(x)\n    total = x.mean() + loss\n    return total", True),
    ("loss = None\n    if x:\n        loss = self.loss_function(x)\n        loss *= 2\n    return loss", True),
    ("return self.loss_function(x) + x.mean()", True), ("return cross_entropy(x)", True),
])  # fmt: skip
def test_what_a_forward_pass_makes_of_its_loss(body, doubtful):
    assert changes_loss(f"def forward(self, x):\n    {body}\n") == doubtful
    method = body.replace("\n", "\n    ")
    assert changes_loss(f"    def forward(self, x):\n        r'''\nOf x.\n'''\n        {method}\n") == doubtful
