"""Texts that have been through a chat template already: told by the marks at their ends, not by what they speak of."""

import re

import pytest

from brigade.train.data.chat_template import ChatTemplates
from brigade.train.data.encode import Encoder, LoadedEncoder
from brigade.train.data.rendered import answer, learned_whole, look, question, repeats
from brigade.train.data.rows import BadRow, RowChunk
from testing.chats import chat

HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"
LLAMA = f"<|begin_of_text|>{HEAD.format('user')}Hi<|eot_id|>{HEAD.format('assistant')}"
VICUNA = "A chat between a curious user and an assistant. USER: Hi ASSISTANT:"
ALPACA = "Below is an instruction that describes a task.\n\n### Instruction:\nHi\n\n### Response:\n"
CHAT = (
    "{% for m in messages %}{% if m.role == 'user' %}Q {{ m.content }} A{% else %}"
    "{% generation %}{{ m.content }}</s>{% endgeneration %}{% endif %}{% endfor %}"
)


def level(sign):
    return sign and ("sure" if sign.sure else "counted")


@pytest.mark.parametrize("text", [
    "<|system|>\nS</s>\n<|user|>\nHi</s>\n<|assistant|>\n", "<|user|>\nHi<|end|>\n<|assistant|>\n",
    "[gMASK]<sop><|user|>\nHi<|assistant|>",
    "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nHi [/INST]", "[INST] Hi [/INST]", "<s> [INST] Hi [/INST] a </s><s>[INST] b [/INST]", LLAMA,
    "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n", "<start_of_turn>user\nHi<end_of_turn>\n", VICUNA, ALPACA,
    "Be brief. USER: Hi ASSISTANT:", "### Instruction:\nHi\n\n### Response:", "### Human: Hi\n### Assistant:",
    "User: Hi\nFalcon:",
    "\n\nHuman: Hi\n\nAssistant:", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>user\nHi<|im_end|>\n",
    "<｜begin▁of▁sentence｜>S<｜User｜>Hi<｜Assistant｜>", "Hi<｜Assistant｜>", "Hi\n<|assistant|>\n", "<human>: Hi\n<bot>:",  # noqa: RUF001
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "<|prompter|>Hi<|endoftext|><|assistant|>", "<|start|>user<|message|>Hi<|end|><|start|>assistant", "Instruct: Hi\nOutput:",
    "BEGINNING OF CONVERSATION: USER: Hi GPT:", "<reserved_106>Hi<reserved_107>", "<用户>Hi<AI>", "[Round 1]\n\n问：Hi\n\n答：",  # noqa: RUF001
    "<extra_id_0>System\n\n<extra_id_1>User\nHi\n<extra_id_1>Assistant\n",
    "<SPECIAL_10>System\n\n<SPECIAL_11>User\nHi\n<SPECIAL_11>Assistant\n",
    "<s><|user_start|>Hi<|user_end|><|assistant_start|>", "[gMASK]<sop><|user|>\nHi<|assistant|>\n<think></think>",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", "Hi<｜Assistant｜></think>",  # noqa: RUF001
])  # fmt: skip
def test_a_rendered_question(text):
    assert level(question(text)) == "sure" and learned_whole(text, [])


@pytest.mark.parametrize("text", [
    "Very.</s>", "Very.<|im_end|>\n", "Very.<end_of_turn>", "Very.<|eot_id|>", "Very.<|endoftext|>", "<|assistant|>\nVery.",
    "<｜Assistant｜>Very.", "<|im_start|>assistant\nVery.", "<|user|>\nHi</s>\n<|assistant|>\nVery.", LLAMA + "Very.",  # noqa: RUF001
    "<|channel|>final<|message|>Very.<|return|>", "[INST] Hi [/INST] Very. </s>", "ASSISTANT: Very.</s>",
    "Very.<|assistant_end|>", "Very.\n<extra_id_1>", "Very.<|endofturn|>", "Very.\n<SPECIAL_12>",
])  # fmt: skip
def test_a_rendered_answer(text):
    assert level(answer(text)) == "sure"


@pytest.mark.parametrize("read, text, found", [
    (question, "Explain <|assistant|>", None), (question, "How do <|user|> and <|assistant|> differ?", None),
    (question, "How do <|user|> and <|assistant|> differ", None), (question, "<s>old price</s> new", None),
    (question, "<s>old</s>", None), (question, "Human: an essay. Discuss.", None), (question, "What does [INST] mean?", None),
    (question, "[INST] and [/INST]: what are they?", None), (question, "Continue:\nUser: hi\nAssistant:", None),
    (question, "Q: 2 + 2?\nA:", None), (question, "USER: is a shell's variable", None), (question, "Why <|im_end|> here?", None),
    (question, "What is <|im_end|>", "counted"), (question, "<|user|>\nHi\n<|assistant|>\nyo\nWhose is this?", "counted"),
    (answer, "<|im_end|> ends a turn.", None), (answer, "It ends with <|im_end|>.", None), (answer, "<s>old</s>", None),
    (answer, "<div><s class='x'>a</s>", None), (answer, "Human: he said. The Assistant: a novel", None),
    (answer, "Output: 5", None),
    (answer, "It ends with </s>", "counted"), (answer, "<|assistant|> is a mark", "counted"),
    (answer, "ASSISTANT: Hi", "counted"), (question, f"{ALPACA}Let's think step by step.", "counted"),
    (answer, "### Human: Hi### Assistant: Yo### Human: So?", "counted"), (question, "Why <think>\n</think>", None),
    (question, "### Instruction: S\n### Input: [|Human|] Hi\n### Response: [|AI|]", "counted"),
    (answer, "User: hi\nAssistant: hello", "counted"), (answer, "[INST] Hi [/INST] Very.", "counted"),
])  # fmt: skip
def test_a_text_that_speaks_of_templates_is_not_refused(read, text, found):
    assert level(read(text)) == found


def test_the_runs_own_template_is_known_whatever_it_writes(machine):
    turns = "{% for m in messages %}{{ m.role }} says {{ m.content }}\n{% endfor %}"
    own = machine(turns + "{% if add_generation_prompt %}reply{% endif %}")
    assert own.chats.around == ("user says", "reply")
    assert level(question("user says Hi\nreply\n", own.chats.around)) == "sure"
    assert not question("user says what?", own.chats.around) and not question("Hi, reply", own.chats.around)


def test_a_tools_result_in_its_tags_is_counted():
    result = {"role": "tool", "content": "<tool_response>\n{}\n</tool_response>"}
    (said,) = look([result], re.compile("(?!)"), ("", ""))
    assert not look([result], re.compile("(?!)"), ("", ""), own={"<tool_response>"})
    assert said.startswith("<tool_response> at the beginning of tool results")
    assert not look([result | {"content": "{}"}], re.compile("(?!)"), ("", ""))


def test_the_runs_own_end_is_known_whatever_it_is(machine):
    """In pairs of texts as in messages; other special tokens that an answer ends with, as those of boxes, are counted."""
    loaded = machine(CHAT.replace("</s>", "<stop>"))
    assert loaded.chats.end == "<stop>" and machine(CHAT.replace("</s>", "")).chats.end == ""
    for text, refused in (
        ("yo<stop>", True),
        ("yo <stop>\n", False),
        ("yo<box>", False),
        ("an <s>old</s>", False),
        ("old</s>", True),
    ):
        for row in {"prompt": "hi?", "completion": text}, chat("hi?", text):
            found = loaded.encode(RowChunk([row], "here", 1, 1, None), {})
            assert len(found.bad) == refused, text
            assert refused or found.samples["control"].tolist() == [text.count("<")], text


def test_a_token_that_the_recipe_adds_is_meant():
    messages = chat("Hi", "Very.<|end|>")["messages"]
    assert look(messages, re.compile("(?!)"), ("", ""), own={"<|end|>"}) == ()
    with pytest.raises(BadRow, match="the assistant turn ends with"):
        look(messages, re.compile("(?!)"), ("", ""))


def test_a_prompt_that_answers_repeat():
    long = "Name a warm city in Europe."
    assert repeats("Which?", ["Which? This.", "Which?\nThat."]) and repeats(long, [f" {long} Rome.", f"{long}\nParis."])
    assert not repeats("Good morning", ["Good morning!", "Good morning to you"])
    assert not repeats("Which?", ["Which? This.", "That."])


@pytest.fixture(scope="module")
def machine():
    """machine(template, before, behind): an encoder whose tokenizer adds such tokens. template: its text"""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    def call(template="", before="<s>", behind=""):
        words = {word: number for number, word in enumerate(["<s>", "</s>", "hi", "yo", "?"])}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens(["<s>", "</s>", "<stop>", "<box>"])
        around = " ".join(part for part in (before, "$A", behind) if part)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=around, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
        templates = ChatTemplates(template, joins=not template)
        return LoadedEncoder(Encoder(tokenizer.to_str(), templates, {}, 1, 64, True))

    return call


def tokens(loaded, row):
    found = loaded.encode(RowChunk([row], "here", 1, 1, None), {})
    assert not found.bad, found.bad[0][1].args
    return found.tokens.tolist(), found.supervised.tolist()


@pytest.mark.parametrize("before, behind", [("<s>", ""), ("<s>", "</s>"), ("", "</s>"), ("", "")])
def test_a_texts_own_first_and_end_token_stand_there_once(machine, before, behind):
    loaded = machine(before=before, behind=behind)
    whole = ([0, 2, 3, 1], [False, True, True, True])
    for text in ("<s>hi yo</s>", "<s>hi yo</s>\n", " \n<s>hi yo</s>", "<s>hi yo"):
        assert tokens(loaded, {"text": text}) == whole, text
    if before:
        assert tokens(loaded, {"text": "hi yo"}) == tokens(loaded, {"text": "hi yo</s> "}) == whole
    joined = ([0, 2, 3, 1], [False, False, True, True])
    for row in ({"prompt": "<s>hi ", "completion": "yo</s>\n"}, {"prompt": "<s>hi ", "completion": "yo"}):
        assert tokens(loaded, row) == joined
    assert tokens(loaded, {"text": "<s><s>hi"})[0] == [0, 0, 2, 1], "no token of the text is left out"
    assert loaded.beginning("<s>hi") == [0, 2]


def test_marks_of_other_templates_in_texts_are_counted(machine):
    def unread(row, template=""):
        found = machine(template).encode(RowChunk([row], "here", 1, 1, None), {})
        return found.bad[0][1].args[0] if found.bad else "".join(found.unread[found.samples["unread"][0]])

    assert unread({"text": "hi</s>"}) == "" == unread({"text": "hi"})
    assert unread({"text": ALPACA + "yo"}).startswith("Below is an instruction at the beginning of texts")
    assert unread({"text": "<|user|>\nhi\n<|assistant|>\nyo"}) == (
        "<|user|> at the beginning of texts (a chat template's mark), read as letters"
    )
    assert unread({"prompt": "[INST] hi [/INST]", "completion": "yo"}).startswith("[INST] at the beginning of texts")
    assert "went" not in unread({"prompt": "hi", "completion": "yo"}, CHAT)
    assert "the user turn ends with '[/INST]'" in unread({"prompt": "[INST] hi [/INST]", "completion": "yo"}, CHAT)
    assert "the assistant turn ends with '<end_of_turn>'" in unread(chat("hi", "yo<end_of_turn>"), CHAT)
    assert "completions that begin with their prompt" in unread(
        {"prompt": "hi yo hi yo hi", "completion": "hi yo hi yo hi. yo"}, CHAT
    )


@pytest.mark.parametrize("first", ["<s>", "<bos>", "<|begin_of_text|>"])
def test_a_first_token_before_an_answer_is_seen(first):
    assert level(answer(f"{first}Paris")) == "counted" and answer(f"{first} begins a text") is None
    asked = "What is the capital of France?"
    assert repeats(asked, [f"{first}{asked} Paris"]) and repeats(f"{first}{asked}", [f"{asked} Rome"])


def test_an_answer_of_special_tokens_alone_is_refused(machine):
    def encoded(row):
        return machine(before="<s>", behind="</s>").encode(RowChunk([row], "here", 1, 1, None), {})

    for answered in ("</s>", "<s>", " <s></s>\n", "<|eot_id|>"):
        assert "teach to say nothing" in encoded({"prompt": "hi", "completion": answered}).bad[0][1].args[0]
    for text in ("<s>", "<s></s>"):
        found = encoded({"text": text})
        assert not found.bad and not len(found.samples) and len(found.dropped) == 1
    assert len(encoded({"prompt": "hi", "completion": "yo</s>"}).samples) == 1
