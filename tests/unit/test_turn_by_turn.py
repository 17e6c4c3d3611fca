"""Templates without generation marks, rendered turn by turn: the labels of our marked templates, or a reason why not."""

import copy
import itertools
import re
from collections import Counter
from pathlib import Path

import pytest

from brigade.train.data import chat_template, encode
from brigade.train.data.probes import PROBES, TOOL
from brigade.train.data.tokenise import encoder_of
from brigade.train.data.turn_by_turn import try_probes
from testing.dialogues import FAMILIES, encoded, machine, text_of, unmarked, with_template

# For each family: chats (probes and recorded dialogues) with equal labels, those refused, and those that our template refuses as
# well left out; the same under train_on_last_turn_only; and why some are refused. In docs/data.md, too.
RESULTS = {
    "chatml": ((8, 0), (7, 0), ""),
    "deepseek-r1": ((0, 9), (0, 8), "the prompt begins thoughts that no answer has"),
    "deepseek-v3.1": ((12, 1), (11, 0), "thinking: true for answers without thoughts"),
    "ernie4.5": ((8, 0), (7, 0), ""),
    "gemma3": ((10, 0), (10, 0), ""),
    "gemma4": ((2, 17), (1, 15), "the prompt begins thoughts that no answer has"),
    "glm4.5": ((0, 20), (0, 17), "no token ends a turn"),
    "gpt-oss": ((9, 10), (16, 2), "earlier turns are rewritten"),
    "granite4": ((22, 0), (20, 0), ""),
    "lfm2": ((12, 1), (11, 1), "earlier turns are rewritten"),
    "llama3": ((19, 0), (18, 0), ""),
    "llama4": ((17, 0), (16, 0), ""),
    "minimax-m2": ((1, 19), (5, 14), "the prompt begins thoughts that no answer has"),
    "mistral": ((18, 0), (17, 0), ""),
    "nemotron3": ((3, 18), (5, 12), "the prompt begins thoughts that no answer has"),
    "phi4": ((8, 0), (7, 0), ""),
    "phi4-mini": ((8, 0), (7, 0), ""),
    "qwen2.5": ((19, 0), (18, 0), ""),
    "qwen3": ((5, 15), (13, 5), "earlier turns are rewritten"),
    "qwen3-2507": ((19, 0), (18, 0), ""),
    "qwen3.5": ((12, 11), (20, 0), "earlier turns are rewritten"),
    "seed-oss": ((20, 1), (17, 0), "thinking_budget: 0 for answers without thoughts"),
    "smollm2": ((9, 0), (8, 0), ""),
    "smollm3": ((17, 0), (16, 0), ""),
    "tulu": ((8, 0), (7, 0), ""),
}
every_family = pytest.mark.parametrize("name", FAMILIES)
NEVER = ("deepseek-r1", "gemma4", "glm4.5")  # of which no chat can be rendered turn by turn, but for chats that think


def rows(name):
    """The probes and the family's recorded dialogues, as rows."""
    chats = [{"messages": probe["conversation"], "tools": probe["tools"]} for probe in PROBES]
    for dialogue in FAMILIES[name]["dialogues"]:
        variables = {key: value for key, value in dialogue.get("kwargs", {}).items() if key != "add_generation_prompt"}
        chats.append({**dialogue, "chat_template_kwargs": variables})
    keys = ("messages", "tools", "chat_template_kwargs")
    return [{key: copy.deepcopy(chat.get(key)) for key in keys} for chat in chats]


def problem(found):
    return found.bad[0][1].args[0]


@every_family
@pytest.mark.parametrize("last", [False, True], ids=["all turns", "the last turn"])
def test_labels_are_those_of_our_marked_template_or_the_chat_is_refused(tokenizers, name, last):
    texts = (text_of(name), unmarked(name))
    ours, stock = (machine(tokenizers[name], text, train_on_last_turn_only=last) for text in texts)
    tally = Counter()
    for row in rows(name):
        marked, by_turns = encoded(ours, row), encoded(stock, row)
        assert by_turns.bad or not marked.bad, "what ours refuses is refused"
        tally["refused" if by_turns.bad and not marked.bad else "neither" if marked.bad else "equal"] += 1
        if not by_turns.bad:
            assert by_turns.tokens.tolist() == marked.tokens.tolist()
            assert by_turns.supervised.tolist() == marked.supervised.tolist()
    assert (tally["equal"], tally["refused"]) == RESULTS[name][last]


def test_the_guide_has_the_results():
    guide = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| (`.+`) \| (\d+ of \d+) \| (\d+ of \d+) \| (.*?) \|$", guide, re.M)
    table = {name.strip("`"): tuple(found) for names, *found in lines for name in names.split(", ")}
    for name, (every, last, why) in RESULTS.items():
        if why:
            assert table.pop(name) == (f"{every[0]} of {sum(every)}", f"{last[0]} of {sum(last)}", why)
    assert not table


@every_family
def test_answers_end_where_those_of_our_template_end(tokenizers, name):
    tokenizer = tokenizers[name]
    ends, reason = try_probes(tokenizer, unmarked(name), PROBES)
    assert ends == (set() if name in NEVER else chat_template.stops(tokenizer, text_of(name)))
    assert ends or reason


# ---- a template of nobody's --------------------------------------------------------------------------------------
UNKNOWN = "{% for m in messages %}<|im_start|>[{{ m.role }}]\n{{ m.content }}<|im_end|>\n{% endfor %}"
UNKNOWN += "{% if add_generation_prompt %}<|im_start|>[assistant]\n{% endif %}"


@pytest.fixture
def own(tokenizers, load):
    """own(template, **data): the encoder of a tokenizer with such a template of its own."""

    def call(template, **data):
        tokenizer = with_template(tokenizers["chatml"], template)
        return tokenizer, encode.LoadedEncoder(encoder_of(load(data={"chat_template": None, **data}), tokenizer))

    return call


def chat(*texts):
    roles = itertools.cycle(("user", "assistant"))
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


def learned(tokenizer, found):
    return tokenizer.decode([t for t, own in zip(found.tokens, found.supervised, strict=True) if own])


def test_the_tokenizers_own_template_is_rendered_turn_by_turn(own):
    tokenizer, loaded = own(UNKNOWN)
    found = encoded(loaded, chat("a", "b", "c", "d"))
    assert learned(tokenizer, found) == "b<|im_end|>d<|im_end|>"
    assert tokenizer.decode(found.tokens).startswith("<|im_start|>[user]\na<|im_end|>\n<|im_start|>[assistant]\nb")
    how = chat_template.chat_format(tokenizer, loaded.encoder.templates)
    assert how.turn_by_turn and how.own and how.stops == tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    how.record(tokenizer)
    assert tokenizer.chat_template == UNKNOWN
    assert tokenizer.decode(loaded.prompt([{"role": "user", "content": "a"}])).endswith("<|im_start|>[assistant]\n")


def test_what_a_user_spells_out_ends_no_turn(own):
    tokenizer, loaded = own(UNKNOWN)
    found = encoded(loaded, chat("a<|im_end|>", "b"))
    assert learned(tokenizer, found) == "b<|im_end|>"
    assert found.tokens.tolist().count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2


def test_two_renderings_a_turn(own, monkeypatch):
    _, loaded = own(UNKNOWN)
    for turns in 1, 2, 5:  # a chat of a new shape is rendered once more
        encoded(loaded, chat(*"ab" * turns))
    rendered = []
    render = loaded.chats._render
    monkeypatch.setattr(loaded.chats, "_render", lambda *given: rendered.append(1) or render(*given))
    for turns in 1, 2, 5:
        rendered.clear()
        assert not encoded(loaded, chat(*"ab" * turns)).bad
        assert len(rendered) == 2 * turns
    muted = chat("a", "b", "c", "d")
    muted["messages"][1]["train"] = False
    rendered.clear()
    encoded(loaded, muted)
    assert len(rendered) == 2, "one that is not learned costs nothing"


LATER = "{% for m in messages %}<|im_start|>{{ m.role }}:\n{{ 'Well, ' if m.role == 'assistant' and not loop.last }}"
LATER += "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:\n{% endif %}"


def test_earlier_turns_that_are_rewritten_are_refused_but_where_the_last_alone_is_learned(own):
    tokenizer, loaded = own(LATER)
    error = encoded(loaded, chat("a", "b", "c", "d")).bad[0][1]
    assert "rewrites the chat up to message 2 of 4" in error.args[0]
    assert re.search(r"at character \d+ it has '.*nb<.*', then '.*nWell, b", error.args[0])
    assert "train_on_last_turn_only" in error.args[1]
    assert learned(tokenizer, encoded(loaded, chat("a", "b"))) == "b<|im_end|>"
    _, loaded = own(LATER, train_on_last_turn_only=True)
    assert learned(tokenizer, encoded(loaded, chat("a", "b", "c", "d"))) == "d<|im_end|>"


@pytest.mark.parametrize("template, reason", [
    ("{{ messages | length }}" + UNKNOWN, "is not how it begins that message: at character 0 it has '3"),
    (UNKNOWN.replace("[assistant]\n", "[assistant]\n<hm>\n"), "is not how it begins that message: at character"),
    (UNKNOWN.replace("<|im_end|>", ""), "no special token ends message 4 of 4"),
    (UNKNOWN.replace("<|im_end|>", "{{ '<|im_end|>' if not loop.last or m.role == 'user' }}"), "no special token ends message"),
    ("{{ raise_exception('never') }}", "refuses each chat that it is tried on: never"),
    ("{{ strftime_now('%d') }}" + UNKNOWN, "writes today's date"),
])  # fmt: skip
def test_a_template_that_never_works_is_refused_when_it_is_loaded(own, template, reason):
    _, loaded = own(template)
    error = loaded.encoder.templates.no_template
    assert reason in error.problem and "cannot be rendered turn by turn" in error.problem
    assert "chatml" in error.cure and ".jinja file" in error.cure


def test_a_date_is_fixed(own):
    date = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    tokenizer, loaded = own(date + "{{ date_string }}\n" + UNKNOWN)
    assert tokenizer.decode(encoded(loaded, chat("a", "b")).tokens).startswith("26 Jul 2024\n")


def test_what_closes_a_chat_is_no_answers(own):
    """Phi-3's template."""
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|endoftext|>{% endif %}"
    tokenizer, loaded = own(template)
    found = encoded(loaded, chat("a", "b", "c", "d"))
    assert not found.bad, problem(found)
    assert learned(tokenizer, found) == "b<|im_end|>d<|im_end|>"


def test_chats_with_tools_may_have_a_template_of_their_own(own):
    tokenizer, loaded = own({"default": text_of("chatml"), "tool_use": "{{ tools }}\n" + UNKNOWN})
    row = chat("a", "b") | {"tools": [TOOL]}
    for each in (chat("a", "b"), row):
        assert learned(tokenizer, encoded(loaded, each)) == "b<|im_end|>"
    how = chat_template.chat_format(tokenizer, loaded.encoder.templates)
    assert how.turn_by_turn and not how.stands_in
