"""The recipe's key thinking: what the template does with thoughts, or all of them cut, or those of earlier turns kept."""

import copy

import pytest

from brigade.train.data import chat_template, report
from testing.chats import CHATS, HELD, chat, said, same, words
from testing.dialogues import unmarked

THINKS = said(
    {"content": "a"},
    {"content": "b", "reasoning_content": "Hm, one."},
    {"content": "c"},
    {"content": "d", "reasoning_content": "Hm, two."},
)
WITHIN = chat("a", "<think>\nHm, one.\n</think>\n\nb", "c", "<think>\nHm, two.\n</think>\n\nd")
PLAIN = chat("a", "b", "c", "d")
CALL = {"function": {"name": "f", "arguments": {}}}


@pytest.fixture
def samples(prepare, tokenizers):
    """samples(rows, family, **data): the prepared data of these rows through a family's template."""

    def call(rows, family, **data):
        return prepare(rows, HELD, tokenizer=tokenizers[family], **{"chat_template": family, **data})

    return call


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5", "chatml", "nemotron3", "seed-oss"])
def test_cut_thoughts_are_neither_read_nor_learned(samples, tokenizers, family):
    cut = samples([THINKS, WITHIN], family, thinking="cut")
    plain = samples([PLAIN, PLAIN], family)
    assert same(cut.train, plain.train)
    assert words(tokenizers[family], cut.train) == words(tokenizers[family], plain.train)
    assert cut.facts["thoughts"] == 4 and plain.facts["thoughts"] == 0
    assert "4 answers whose thoughts are removed" in "".join(report.losses(cut.facts))
    assert "Hm" not in tokenizers[family].decode(cut.train[0]["input_ids"])


@pytest.mark.parametrize(
    "text", ["<thinking>Hm.</thinking>b", "[THINK]Hm.[/THINK] b", " <seed:think>Hm.</seed:think>\n\nb"]
)
def test_other_marks_of_thoughts(samples, tokenizers, text):
    cut = samples([said({"content": "a"}, {"content": text})], "chatml", thinking="cut")
    assert words(tokenizers["chatml"], cut.train) == ["b<|im_end|>"]


@pytest.mark.parametrize("turn, problem", [
    ({"content": "Hm.\n</think>\n\nb"}, "message 2 has '</think>' behind its beginning"),
    ({"content": "b <think>Hm.</think>"}, "message 2 has '<think>' behind its beginning"),
    ({"content": "<think>Hm.</think>"}, "message 2 is nothing but thoughts"),
])  # fmt: skip
def test_what_cannot_be_cut_is_refused(samples, mistake, turn, problem):
    assert problem in mistake(samples, [said({"content": "a"}, turn)], "chatml", thinking="cut")
    assert samples([said({"content": "a"}, turn)], "chatml").train


def test_a_call_stays_without_its_thoughts(samples, tokenizers):
    turns = [{"content": "a"}, {"content": "", "reasoning_content": "Hm.", "tool_calls": [CALL]}]
    cut = samples([said(*turns)], "qwen2.5", thinking="cut")
    assert '"name": "f"' in words(tokenizers["qwen2.5"], cut.train)[0]


def test_of_earlier_turns_thoughts_are_kept_by_the_templates_own_switch(samples, tokenizers):
    tokenizer = tokenizers["nemotron3"]
    for rows in [THINKS], [WITHIN]:
        (template,), (kept,) = (
            words(tokenizer, samples(rows, "nemotron3", **how).train) for how in ({}, {"thinking": "keep"})
        )
        assert "Hm, one." not in template and "Hm, two." in template
        assert "Hm, one." in kept and "Hm, two." in kept
    assert samples([THINKS], "seed-oss", thinking="keep").train, "it shows them anyway"
    last = {"thinking": "keep", "train_on_last_turn_only": True}
    data = samples([THINKS], "nemotron3", **last)
    assert "Hm, one." in tokenizer.decode(data.train[0]["input_ids"])
    assert "Hm, one." not in words(tokenizer, data.train)[0]


@pytest.mark.parametrize("family", ["llama4", "gpt-oss"])
def test_one_that_writes_marks_as_any_other_text_keeps_what_stands_in_the_text(samples, mistake, family):
    assert samples([WITHIN], family, thinking="keep").train
    assert "leaves out the thoughts of message 2" in mistake(samples, [THINKS], family, thinking="keep")


@pytest.mark.parametrize("family", ["qwen3", "deepseek-r1", "minimax-m2"])
def test_a_template_without_a_switch_is_refused(samples, mistake, family):
    message = mistake(samples, [THINKS], family, thinking="keep")
    assert "it has none of the switches preserve_thinking" in message and "data.thinking" in message


def test_a_switch_that_keeps_some_thoughts_is_not_taken_for_all(samples, tokenizers, mistake):
    """Gemma 4 keeps those beside earlier calls alone."""
    roles = ("user", "assistant", "tool", "assistant", "user", "assistant")
    texts = ("a", "", "z", "b", "c", "d")
    rows = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    rows[1] |= {"reasoning_content": "Hm, one.", "tool_calls": [CALL]}
    data = samples([{"messages": rows}], "gemma4", thinking="keep")
    assert "Hm, one." in words(tokenizers["gemma4"], data.train)[0]
    earlier = said({"content": "a"}, {"content": "b", "reasoning_content": "Hm."}, {"content": "c"}, {"content": "d"})
    assert "leaves out the thoughts of message 2" in mistake(samples, [earlier], "gemma4", thinking="keep")


def test_a_row_cannot_set_the_switch_itself(samples, mistake):
    row = THINKS | {"chat_template_kwargs": {"truncate_history_thinking": True}}
    assert "sets truncate_history_thinking" in mistake(samples, [row], "nemotron3", thinking="keep")


def test_a_saved_model_keeps_thoughts_when_it_serves(tokenizers, load):
    tokenizer = copy.deepcopy(tokenizers["nemotron3"])
    tokenizer.chat_template = unmarked("nemotron3")
    settings = load(data={"chat_template": None, "thinking": "keep"})
    for _ in range(2):  # once more, by an export
        templates = chat_template.load(settings, tokenizer)
        chat_template.chat_format(tokenizer, templates).record(tokenizer)
        assert "Hm, one." in tokenizer.apply_chat_template([*THINKS["messages"]], tokenize=False)
    assert tokenizer.chat_template.count("truncate_history_thinking | default(false)") == 1


@pytest.mark.parametrize("how", ["cut", "keep"])
def test_without_a_chat_template_there_is_nothing_to_cut_or_keep(prepare, mistake, how):
    rows = [{"prompt": "a", "completion": "b"}]
    assert f"thinking is {how}, and there is no chat template" in mistake(
        prepare, rows, chat_template="none", thinking=how
    )


def test_the_key_makes_other_data_and_its_default_the_same_as_ever(prepare):
    found = {how: prepare(CHATS, HELD, thinking=how).fingerprint for how in ("template", "cut", "keep")}
    assert len(set(found.values())) == 3 and found["template"] == prepare(CHATS, HELD).fingerprint
