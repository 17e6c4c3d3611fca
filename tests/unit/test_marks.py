"""Templates with generation marks: a sample begins with its prompt, its end is learned, and nothing that others wrote."""

import pytest

from brigade.train.data import chat_template, report
from brigade.train.data.marks import AS_SAMPLE, PROMPTED, REWRITTEN, UNTAUGHT
from brigade.train.data.probes import PROBES, own_refuses
from testing import dialogues
from testing.dialogues import FAMILIES, text_of, unmarked

# Why the last answer of a dialogue or a probe is not learned behind its prompt.
CONTRADICT = {"gemma4": 1}  # thoughts where enable_thinking is not true
EMPTY = ("glm4.5", "qwen3.5")  # whose empty block of thoughts has no loss


@pytest.fixture
def machine(tokenizers):
    return lambda name, template=None: dialogues.machine(tokenizers[name], template or text_of(name))


def encoded(loaded, *messages, **columns):
    return dialogues.encoded(loaded, {"messages": list(messages)} | columns)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text} | more


@pytest.mark.parametrize("name", FAMILIES)
def test_each_sample_of_ours_begins_with_its_prompt_and_learns_its_end(machine, tokenizers, name):
    loaded, refused, tried = machine(name), 0, 0
    chats = [(probe["conversation"], probe["tools"], {}) for probe in PROBES]
    chats += [(chat["messages"], chat.get("tools"), chat.get("kwargs", {})) for chat in FAMILIES[name]["dialogues"]]
    for messages, tools, variables in chats:
        variables = {key: value for key, value in variables.items() if key != "add_generation_prompt"}
        if messages[-1]["role"] != "assistant":
            continue
        found = encoded(loaded, *messages, tools=tools, chat_template_kwargs=variables)
        if found.bad:
            refused += "is not how it begins that message" in found.bad[0][1].args[0]
            continue
        prompt = {"add_generation_prompt": True} | variables
        before = tokenizers[name].apply_chat_template(
            messages[:-1], tools=tools, chat_template=text_of(name), tokenize=False, **prompt
        )
        learned = [number for number, own in enumerate(found.supervised) if own]
        written = tokenizers[name].decode(found.tokens)
        own = tokenizers[name].decode(found.tokens[max(n for n in learned if n - 1 not in learned) :])
        assert written.startswith(before) and own.rstrip().endswith(loaded.chats.control_tokens)
        assert UNTAUGHT not in found.unread[-1] or name in EMPTY
        tried += 1
    assert refused == CONTRADICT.get(name, 0) and tried >= 5


def test_answers_without_thoughts_close_those_that_the_prompt_has_begun(machine, tokenizers):
    for name, learned in {
        "minimax-m2": "</think>\n\nx[e~[",
        "nemotron3": "</think>\nx<|im_end|>",
        "deepseek-r1": "</think>\n\nx" + tokenizers["deepseek-r1"].eos_token,
        "glm4.5": "\nx<|user|>",
        "gemma4": "x<turn|>",
    }.items():
        found = encoded(machine(name), user("q"), assistant("x"))
        assert tokenizers[name].decode(found.tokens[found.supervised]) == learned


def test_thoughts_that_the_official_template_hides_are_learned_where_the_prompt_asks_for_them(machine, tokenizers):
    row = user("q"), assistant("x", reasoning_content="Hm.")
    for name, variables in ("deepseek-r1", {}), ("deepseek-v3.1", {"thinking": True}):
        found = encoded(machine(name), *row, chat_template_kwargs=variables)
        assert tokenizers[name].decode(found.tokens[found.supervised]).startswith("Hm.")


def test_a_row_that_contradicts_its_prompt_is_refused(machine):
    without_thoughts = {"enable_thinking": False}
    for name, variables in (("gemma4", {}), ("qwen3", without_thoughts), ("nemotron3", without_thoughts)):
        found = encoded(
            machine(name), user("q"), assistant("x", reasoning_content="Hm."), chat_template_kwargs=variables
        )
        problem, cure = found.bad[0][1].args
        assert "is not how it begins that message" in problem and "enable_thinking" in cure


def test_what_has_no_loss_or_another_beginning_is_said(machine):
    several = user("a"), assistant("b"), user("c"), assistant("d")
    assert encoded(machine("qwen3.5"), *several).unread[-1] == (REWRITTEN, UNTAUGHT)
    assert encoded(machine("minimax-m2"), *several).unread[-1] == (REWRITTEN,)
    assert encoded(machine("llama3"), *several).unread[-1] == ()
    facts = {"unread": {UNTAUGHT: 2, "column 'id'": 3}}
    assert report.unread(facts) == "column 'id' (3 rows)" and report.said(facts) == f"{UNTAUGHT} (2 rows)"


# ---- templates of nobody's ---------------------------------------------------------------------------------------
TURN = "<|im_start|>{{ m.role }}\n"
HEAD = "{% for m in messages %}" + TURN + "{% if m.role == 'assistant' %}"
ELSE = "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
OWN = "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
NO_END = "{% generation %}{{ m.content }}{% endgeneration %}"
HEADER = "{% generation %}" + TURN + "{{ m.content }}<|im_end|>{% endgeneration %}"
ALL = "{% for m in messages %}{% generation %}" + TURN
ALL += "{{ m.content }}<|im_end|>\n{% endgeneration %}{% endfor %}" + PROMPT
BEHIND = HEAD + OWN + ELSE
CHAT = {"role": "system", "content": "s"}, user("q"), assistant("x")


@pytest.mark.parametrize("template, learned, said", [
    (BEHIND + PROMPT, "x<|im_end|>", ()),
    (HEAD + NO_END + "<|im_end|>" + ELSE + PROMPT, "x<|im_end|>", ()),
    (HEAD.replace(TURN, "") + HEADER + ELSE.replace("{{ m.c", TURN + "{{ m.c") + PROMPT, "x<|im_end|>", (PROMPTED,)),
], ids=["right", "the end behind the marks", "the prompt within the marks"])  # fmt: skip
def test_marks_that_can_be_set_right_are(machine, tokenizers, template, learned, said):
    found = encoded(machine("chatml", template), *CHAT)
    assert not found.bad and found.unread[-1] == said
    assert tokenizers["chatml"].decode(found.tokens[found.supervised]) == learned
    stops = chat_template.stops(tokenizers["chatml"], template)
    assert stops == {tokenizers["chatml"].convert_tokens_to_ids("<|im_end|>")}


@pytest.mark.parametrize("template, reason", [
    (BEHIND + PROMPT.replace("assistant", "model"), "is not how it begins that message: at character"),
    (BEHIND, "the model has to write '<|im_start|>assistant"),
    (BEHIND + PROMPT.replace("<|im_start|>assistant\n", "<|im_start|>"), "the model has to write 'assistant"),
    (HEAD + NO_END + ELSE + PROMPT, "no special token of the tokenizer ends an answer"),
    (HEAD + NO_END + "{{ '<|im_end|>' if not loop.last }}" + ELSE + PROMPT, "no special token of the tokenizer ends"),
    (BEHIND.replace("<|im_end|>{% endg", "<end>{% endg") + PROMPT, "no special token of the tokenizer ends an answer"),
    (ALL, "hold the user's turn"),
    (HEAD + "{{ m.content }}{% generation %}<|im_end|>{% endgeneration %}" + ELSE + PROMPT, "the model has to write 'That one.'"),
    (HEAD + OWN.replace("content", "text") + "{{ m.content }}" + ELSE + PROMPT, "leave the assistant's text out"),
    ("{{ messages | length }}" + BEHIND + PROMPT, "at character 0"),
])  # fmt: skip
def test_marks_that_claim_what_is_not_so_are_refused(machine, template, reason, user_error):
    refused = user_error(encoded, machine("chatml", template), user("q"), assistant("x"))
    assert refused.place == "the chat template" and reason in refused.problem


def test_a_row_does_not_say_how_samples_are_written(machine):
    found = encoded(machine("glm4.5"), user("q"), assistant("x"), chat_template_kwargs={AS_SAMPLE: False})
    assert f"sets {AS_SAMPLE}" in found.bad[0][1].args[0]


def test_a_stock_template_that_refuses_what_ours_renders_is_not_called_the_same(tokenizers):
    gemma = tokenizers["gemma3"]
    refuses = "{%- if messages[0].role == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}"
    assert own_refuses(dialogues.with_template(gemma, unmarked("gemma3")), text_of("gemma3")) == ""
    assert own_refuses(dialogues.with_template(gemma, refuses + unmarked("gemma3")), text_of("gemma3")) == "system"
