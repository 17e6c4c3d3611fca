"""Label smoothing, z-loss and NEFTune by the formulas of their papers, written out again."""

import pytest
import torch

from brigade.errors import UserError
from brigade.train.data.store import IGNORED
from brigade.train.loop.neftune import sample_lengths
from brigade.train.model import supervised_loss
from brigade.train.model.supervised_loss import PLAIN, Terms, of_tokens
from brigade.train.recipe import flags


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


def test_a_model_whose_forward_pass_has_a_loss_of_its_own_is_refused(monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    def forward(self, input_ids, labels=None, **_):
        found = self.whole(input_ids=input_ids, use_cache=False)
        found.loss = torch.nn.functional.cross_entropy(found.logits[0, :-1], labels[0, 1:])
        return found

    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    settings = flags.load(["--recipe", "recipes/tiny/full.yaml", "--z_loss_coef", "0.001"])
    supervised_loss.check(settings, config)
    monkeypatch.setattr(LlamaForCausalLM, "whole", LlamaForCausalLM.forward, raising=False)
    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    with pytest.raises(UserError) as caught:
        supervised_loss.check(settings, config)
    assert "z_loss_coef" in caught.value.place and "a loss of its own" in caught.value.problem


def test_noise_goes_by_the_length_of_each_sample_packed_or_padded():
    ids = torch.zeros(1, 7, dtype=torch.long)
    packed = sample_lengths({"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]])})
    assert packed.tolist() == [[3, 3, 3, 4, 4, 4, 4]]
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    padded = sample_lengths({"input_ids": torch.zeros(2, 3, dtype=torch.long), "attention_mask": mask})
    assert padded.tolist() == [[2, 2, 2], [3, 3, 3]]
    rows = {"input_ids": torch.zeros(2, 3, dtype=torch.long), "position_ids": torch.tensor([[0, 1, 2], [0, 1, 0]])}
    assert sample_lengths(rows).tolist() == [[3, 3, 3], [2, 2, 1]]
