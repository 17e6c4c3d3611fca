"""Chat templates: a user's own, ours in place of one without marks, and those that do not fit."""

import copy

import pytest

from brigade.train.data import chat_template
from testing.chats import CHATML, CHATS, HELD, chat, same, words


def test_a_template_of_the_users_own(tokenizer, prepare, tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text(
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'user' %}{{ m.content }} {% else %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endif %}{% endfor %}"
        "{{ 'assistant: ' if add_generation_prompt }}"
    )
    data = prepare([chat("abc", "def")], [chat("ghi", "jkl")], chat_template=str(own))
    assert words(tokenizer, data.train)[0].replace(" ", "") == "def<|im_end|>"
    own.write_text("\ufeff" + own.read_text())  # as some editors begin a file
    assert same(prepare([chat("abc", "def")], [chat("ghi", "jkl")], chat_template=str(own)).train, data.train)


def test_a_tokenizer_without_the_token_that_a_template_writes(prepare, mistake):
    message = mistake(prepare, CHATS[:1], HELD, chat_template="llama3")
    assert "bos_token, and the tokenizer has none" in message and "chat_template" in message.splitlines()[-1]


def test_a_stock_template_without_marks(prepare, mistake, tokenizer):
    """It is never an all-zero mask: ours stands in where it renders the same, else it goes turn by turn, or the run stops."""
    stock = copy.deepcopy(tokenizer)
    stock.chat_template = CHATML.read_text().replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    found = prepare(chat_template=None, tokenizer=stock)
    assert same(found.train, prepare(chat_template="chatml").train)
    assert (found.stands_in, prepare(chat_template="chatml", tokenizer=stock).stands_in) == ("chatml", "")
    unknown = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    stock.chat_template = unknown + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    found = prepare(CHATS, HELD, chat_template=None, tokenizer=stock)
    assert words(tokenizer, found.train) == words(tokenizer, prepare(CHATS, HELD).train)
    assert found.stands_in == "" and not same(found.train, prepare(CHATS, HELD).train)
    stock.chat_template = "{{ messages | length }} messages: " + unknown
    message = mistake(prepare, chat_template=None, tokenizer=stock)
    assert "chat_template" in message and "generation" in message and "chatml" in message.splitlines()[-1]
    stock.chat_template = None
    assert "generation" in mistake(prepare, chat_template=None, tokenizer=stock)
    assert len(prepare(chat_template="chatml", tokenizer=stock).train) == 19
    # Texts need none.
    assert (
        len(prepare([{"text": c["messages"][1]["content"]} for c in CHATS], chat_template=None, tokenizer=stock).train)
        == 19
    )


def test_a_template_that_is_not_there(prepare, mistake):
    message = mistake(prepare, chat_template="chatmi")
    assert "chat_template" in message and "'chatmi'" in message and "chatml" in message


@pytest.mark.parametrize("content, said", [
    ("Frage: é".encode("latin-1"), "cannot be read: 'utf-8' codec can't decode byte 0xe9"),
    (rb"{{ '\ud83d' }}" + CHATML.read_bytes(), r"what the chat template writes of the row has half a surrogate pair (\ud83d)"),
])  # fmt: skip
def test_a_template_that_is_no_text(prepare, mistake, tmp_path, content, said):
    own = tmp_path / "own.jinja"
    own.write_bytes(content)
    assert said in mistake(prepare, CHATS[:2], HELD, chat_template=str(own))


@pytest.mark.parametrize("template, roles", [
    ("{% for m in messages %}{% generation %}{{ m.content }", ("user", "assistant")),
    ("{{ raise_exception('roles must alternate') }}{% generation %}{% endgeneration %}", ("user", "assistant")),
    (None, ("user", "tool")),  # chatml has no tools
])  # fmt: skip
def test_a_template_that_breaks_or_refuses(prepare, mistake, tmp_path, template, roles):
    own = tmp_path / "own.jinja"
    own.write_text(template or CHATML.read_text())
    mistake(prepare, [chat("a", "b", roles=roles)] * 3, chat_template=str(own))


STOCK = CHATML.read_text().replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
WITH_TOOLS = "{% if tools %}{{ tools[0].function.name }}: {% endif %}" + CHATML.read_text()
TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}


def test_of_several_named_templates_the_default_is_used_and_the_one_for_tools(tokenizer, prepare, mistake):
    """Command R's and Hermes' tokenizers have `default` and `tool_use`."""
    several = copy.deepcopy(tokenizer)
    several.chat_template = {"default": STOCK, "tool_use": STOCK, "rag": "{{ documents }}"}
    found = prepare(CHATS, HELD, chat_template=None, tokenizer=several)
    assert same(found.train, prepare(CHATS, HELD).train) and found.stands_in == "chatml"
    several.chat_template = {"default": CHATML.read_text(), "tool_use": WITH_TOOLS}
    plain, with_tools = prepare([CHATS[0], CHATS[0] | TOOLS], HELD, chat_template=None, tokenizer=several).train
    assert tokenizer.decode(with_tools["input_ids"]) == "f: " + tokenizer.decode(plain["input_ids"])
    several.chat_template = {"default": CHATML.read_text(), "tool_use": "{{ tools }}{{ messages }}"}
    assert len(prepare(CHATS, HELD, chat_template=None, tokenizer=several).train) == len(CHATS)
    message = mistake(prepare, [CHATS[0] | TOOLS], HELD, chat_template=None, tokenizer=several)
    assert "for tools, tool_use, has no {% generation %} marks, and cannot be rendered turn by turn" in message
    assert "chatml" in message.splitlines()[-1]
    several.chat_template = {"rag": STOCK, "tool_use": STOCK}
    message = mistake(prepare, CHATS, HELD, chat_template=None, tokenizer=several)
    assert "several chat templates (rag, tool_use) and none is its default" in message


def test_what_is_saved_has_all_named_templates_but_where_the_recipe_names_one(tokenizer, load):
    for named in None, "chatml":
        several = copy.deepcopy(tokenizer)
        several.chat_template = own = {"default": CHATML.read_text(), "tool_use": WITH_TOOLS}
        templates = chat_template.load(load(data={"chat_template": named}), several)
        chat_template.chat_format(several, templates).record(several)
        assert several.chat_template == (own if named is None else CHATML.read_text())
