"""Answers: many questions at once are answered as one by one."""

import random
from types import SimpleNamespace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from brigade.train.step import answer_scores, sample_answers
from brigade.train.step.sample_answers import Question

WORDS = 40
TOKENIZER = SimpleNamespace(
    eos_token_id=1,
    pad_token_id=1,
    added_tokens_decoder={},
    batch_decode=lambda rows, **_: ["".join(chr(97 + token) for token in row if token > 1) for row in rows],
)


def tiny_llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=128, **sizes)).eval()


def asked(count):
    random_numbers = random.Random(0)
    lengths = [random_numbers.randint(1, 90) for _ in range(count)]  # the longest leave no room for LONGEST more
    return [Question("", [random_numbers.randrange(2, WORDS) for _ in range(length)], [5, 6, 1]) for length in lengths]


def test_together_and_one_by_one():
    model, questions = tiny_llama(), asked(10)
    one_by_one = sample_answers.generate(model, TOKENIZER, questions, 0, 1, "cpu")
    for together, longest in ((4, 0), (1, 90), (7, 90)):
        given = sample_answers.generate(model, TOKENIZER, questions, 0, 1, "cpu", None, together, longest)
        assert (given == one_by_one) if not longest else all(len(answer) <= 90 for answer in given)
    assert any(answer[-1] == 1 for answer in one_by_one) and any(len(answer) == 64 for answer in one_by_one)


def test_an_exact_answer_is_the_reference_word_by_word():
    questions = asked(4)
    given = [[5, 6, 1], [5, 6], [5, 7, 1], [5, 6, 6, 1]]  # with its end or without, another word, a word too many
    assert answer_scores.mean(answer_scores.text, TOKENIZER, [each.reference for each in questions], given) == 0.5
