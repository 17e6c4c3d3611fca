"""Answers, many at once as one by one, and their scores: what counts as equal, what cannot be read, what a recipe may ask for."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from brigade.errors import UserError
from brigade.train.recipe import flags
from brigade.train.step import answer_scores, sample_answers
from brigade.train.step.answer_scores import calls, fields, text, tool_call
from brigade.train.step.sample_answers import Question
from testing.dialogues import FAMILIES

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1, "y": {"a": [1, 2], "b": true}}}\n</tool_call>'
SECOND = '{"name": "g", "arguments": {}}'


@pytest.mark.parametrize("answer, score", [
    ('{"arguments": {"y": {"b": true, "a": [1.0, 2]}, "x": 1.0}, "name": "f"}', 1),  # keys in any order, 1.0 and 1, other tags
    ('<think>{"name": "g", "arguments": {"x": </think>' + CALL, 1),  # thoughts are no calls, and may break off
    ('[{"name": "f", "parameters": {"x": 1, "y": {"a": [1, 2], "b": true}}}]', 1),  # Llama's name of arguments, Mistral's list
    ('{"function": {"name": "f", "arguments": "{\\"x\\": 1, \\"y\\": {\\"a\\": [1, 2], \\"b\\": true}}"}}', 1),  # OpenAI's
    (CALL.replace('"f"', '"h"'), 0), (CALL.replace('"x": 1', '"x": 2'), 0), (CALL.replace('"x": 1', '"x": "1"'), 0),
    (CALL.replace("[1, 2]", "[2, 1]"), 0), (CALL.replace("true", "1"), 0), (CALL.replace('"x": 1', '"x": 1, "z": 1'), 0),
    (CALL + CALL, 0), (CALL + SECOND, 0), (SECOND + CALL, 0), ("I cannot do that.", 0), ("", 0),
    (CALL[:-20], 0), (CALL + '<tool_call>{"name": "f", "argu', 0), (CALL.replace('"x": 1', '"x": NaN'), 0),
    ('{"x":' * 100_000, 0), ('{"name": "f", "arguments": [1]}', 0),
])  # fmt: skip
def test_a_tool_call_is_right_by_name_and_arguments(answer, score):
    assert tool_call(answer, CALL) == score


def test_several_calls_are_right_in_their_order_and_a_text_without_calls_where_none_is_made():
    assert tool_call(f"{CALL}, and then {SECOND}", CALL + SECOND) == 1 and tool_call(SECOND + CALL, CALL + SECOND) == 0
    assert tool_call("No {braces} [of] a call.", "There is no such tool.") == 1
    assert tool_call(CALL, "There is none.") == 0
    assert calls("I see {it}.") == [] and len(calls(CALL + SECOND)) == 2


IN_TAGS = ("glm4.5", "minimax-m2", "nemotron3", "qwen3.5", "seed-oss")
IN_WORDS_OF_THEIR_OWN = ("deepseek-v3.1", "gemma4", "gpt-oss", "mistral")


def with_calls(family):
    """What the recorded dialogues of a family call, and what its official template makes of them."""
    for dialogue in FAMILIES[family]["dialogues"]:
        called = [call["function"] for message in dialogue["messages"] for call in message.get("tool_calls") or []]
        if called:
            yield called, dialogue["supervised"]


@pytest.mark.parametrize("family", IN_TAGS)
def test_tool_calls_in_tags_are_read_as_the_family_s_own_template_writes_them(family):
    """All but true, null and lists, which some templates write as Python does: these are compared as they are written."""
    dialogues = list(with_calls(family))
    assert dialogues
    for called, answers in dialogues:
        found = [json.loads(call) for answer in answers for call in calls(answer)]
        assert [call["name"] for call in found] == [call["name"] for call in called]
        for given, wanted in zip(found, called, strict=True):
            assert given["arguments"].keys() == wanted["arguments"].keys()
            plain = {key: value for key, value in wanted["arguments"].items() if type(value) in (str, int, float)}
            assert {key: given["arguments"][key] for key in plain} == plain
        assert all(tool_call(answer, answer) == 1 for answer in answers)
        first, name = next(answer for answer in answers if calls(answer)), called[0]["name"]
        broken = first[: first.rindex(name) + len(name)]
        assert tool_call(broken, first) == 0 and tool_call(first.replace(name, "other"), first) == 0


@pytest.mark.parametrize("family", IN_WORDS_OF_THEIR_OWN)
def test_tool_calls_that_are_not_read_are_refused(family):
    """Mistral's older templates write lists of JSON, which are read."""
    for _, answers in with_calls(family):
        if any(map(calls, answers)):
            assert family == "mistral" and '[{"name": ' in "".join(answers)
            continue
        with pytest.raises(UserError, match=r"has a tool call in JSON, or in the tags|cannot read the held-out answer"):
            answer_scores.check_references(settings("--answer_score", "tool_call"), answers)


def test_arguments_in_tags_may_be_in_any_order_and_of_any_kind():
    one = "<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=y>\na {b} c\n</parameter>\n</function>"
    other = "<function=f><parameter=y>a {b} c</parameter><parameter=x>1.0</parameter></function>"
    assert tool_call(other, one) == 1 == tool_call(one, one)
    assert tool_call(one.replace("1", "2"), one) == 0 == tool_call(one.replace("</parameter>", "", 1), one)
    assert tool_call(one.replace("\n1\n", '"1"'), one) == 0 == tool_call(one + one, one)


@pytest.mark.parametrize("answer, score", [
    ('{"c": {"e": 2.0, "d": [1, {"x": 0}]}, "a": 1, "b": "two"}', 1), ('{"a": 1, "b": "two", "c": {"e": 2}}', 0.75),
    ('```json\n{"a": true, "b": "two", "more": 5}\n```', 0.25), ('{"c": 1}', 0), ("two", 0),
    ('{"a": 1', 0), ('{"a": 1}{"b": "two"}', 0),
])  # fmt: skip
def test_json_counts_the_references_fields_that_are_equal(answer, score):
    assert fields(answer, '{"a": 1, "b": "two", "c": {"d": [1, {"x": 0}], "e": 2}}') == score


def test_a_text_is_right_word_by_word():
    assert text("a b", "a b") == 1 and text("a  b", "a b") == 0


def settings(*words):
    return flags.load(list(words))


@pytest.mark.parametrize("words, place, problem", [
    (["--answer_score", "bleu"], "flag --answer_score", "text, tool_call, json, or a function of your own"),
    (["--answer_score", "text", "--objective", "dpo"], "flag --answer_score", "objective dpo does not read it"),
    (["--metric_for_best_model", "eval_answer_score"], "flag --metric_for_best_model", "without answer_score nothing is scored"),
])  # fmt: skip
def test_a_recipe_that_cannot_be_scored_is_refused(words, place, problem):
    with pytest.raises(UserError, match=problem) as caught:
        settings(*words)
    assert caught.value.place == place


def test_references_that_a_score_cannot_read_are_refused():
    def check(score, *references):
        answer_scores.check_references(settings("--answer_score", score), references)

    check("json", '{"a": 1}', "{}")
    check("tool_call", "none", CALL)
    check("text", "anything")
    for score, references, problem in (
        ("json", ['{"a": 1}', "four"], "json cannot read the held-out answer 'four'"),
        ("tool_call", ["f(x=1)"], "none of 1 held-out answers has a tool call"),
        ("tool_call", [CALL, '{"name": "f", "arguments": 3}'], "tool_call cannot read the held-out answer"),
    ):
        with pytest.raises(UserError, match=problem):
            check(score, *references)
    with pytest.raises(UserError, match="eval_answers is 0"):
        answer_scores.check(settings("--answer_score", "text", "--eval_answers", "0"))


def test_a_function_of_ones_own_gives_a_finite_number(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "def length(answer, reference):\n    return len(answer) / len(reference)\n"
        "def nothing(answer, reference):\n    return float('nan')\n"
        "def fails(answer, reference):\n    return answer[1000]\n"
    )

    def own(name):
        return settings("--answer_score", f"{file}:{name}")

    answer_scores.check(own("length"))
    assert answer_scores.score_of(own("length"))("ab", "abcd") == 0.5
    problems = {"nothing": "it gives nan for the answer", "fails": "IndexError", "none": "no function 'none'"}
    for name, problem in problems.items():
        with pytest.raises(UserError, match=problem) as caught:
            answer_scores.check(own(name))
        assert caught.value.place == "flag --answer_score"


# ---- the answers themselves ------------------------------------------------------------------------------------------
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
    for together, longest in ((4, sample_answers.LONGEST), (1, 90), (7, 90)):
        given = sample_answers.generate(model, TOKENIZER, questions, 0, 1, "cpu", None, together, longest)
        assert given == one_by_one if longest == sample_answers.LONGEST else all(len(answer) <= 90 for answer in given)
    assert any(answer[-1] == 1 for answer in one_by_one) and any(len(answer) == 64 for answer in one_by_one)


def test_an_exact_answer_is_the_reference_word_by_word():
    questions = asked(4)
    given = [[5, 6, 1], [5, 6], [5, 7, 1], [5, 6, 6, 1]]  # with its end or without, another word, a word too many
    assert answer_scores.mean(answer_scores.text, TOKENIZER, [each.reference for each in questions], given) == 0.5
