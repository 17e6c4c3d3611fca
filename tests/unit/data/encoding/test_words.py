"""A row's words arrive in its text: they are there, or counted, or the row is refused."""

import pytest

from brigade.train.data.chat_template import ChatTemplates
from brigade.train.data.layout import TEMPLATES
from brigade.train.data.marks import SAID
from brigade.train.data.rendering import Chats
from brigade.train.data.rows import BadRow
from brigade.train.data.samples import convert
from testing.dialogues import FAMILIES

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
CODE = "def f(x):\n\tif x < 3 and \"a\" != 'b':\n        return {'k': \"v\\n\"}  # <b>bold</b> & more\n"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "description": 'The city\'s "name"'}}}
WEATHER = {"name": "weather_of", "description": "It looks:\né, <b>.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": WEATHER}]
ARGUMENTS = {"city": "Ro\"m'e\n é", "days": 3, "f": 1.5, "big": 1e20, "yes": True, "in": {"l": [1, "two", {"x": CODE}]}}
OPENING = "{% for m in messages %}<{{ m.role }}>"
CLOSING = "</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
MARKED = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(arguments, name="weather_of"):
    return {"type": "function", "id": "call00001", "function": {"name": name, "arguments": arguments}}


def result(text):
    return {"role": "tool", "name": "weather_of", "tool_call_id": "call00001", "content": text}


@pytest.fixture(scope="module")
def chats():
    """chats(template, **how): what renders with a template of ours, or with this one."""
    made = {}

    def call(template, **how):
        key = template, *how.items()
        if key not in made:
            path = TEMPLATES / f"{template}.jinja"
            text = template if "{" in template else path.read_text(encoding="utf-8")
            family = FAMILIES.get(template, {"added_tokens": [], "special_tokens": {}})
            special = {"</s>", "<|im_end|>", *family["added_tokens"], *family["special_tokens"].values()}
            made[key] = Chats(ChatTemplates(text), VARIABLES, special, **how)
        return made[key]

    return call


def left_out(chats, *turns, **columns):
    """What of the turns is left out, in words; or why the row is refused."""
    try:
        text = convert({"messages": list(turns), **columns}, {}, chats)
    except BadRow as error:
        return f"refused: {error.args[0]}"
    return "; ".join(words for words in text.unread if not words.startswith("key") and words not in SAID)


HONEST = {
    "short": [user("2"), answer("4"), user("2"), answer("4"), user("2"), answer("4")],
    "white space": [system("  Be brief.\n\n"), user("\n Hi \n"), answer("  Hello\n\n"), user("x"), answer("y")],
    "code": [user(CODE), answer(CODE + CODE), user(f"```\n{CODE}```"), answer(f"```\n{CODE}```")],
    "other letters": [
        user("Ünïcødé 👍🏽 你好"),
        answer("👍"),
        user("\\u00e9 C:\\new\\t"),
        answer("C:\\new \\n \"q\" 'p'"),
    ],
    "tags": [user("<div>a</div>"), answer("<p>x &amp; y</p>"), user("<b>"), answer("<tool>")],
    "marks of a user": [user("Use </think> to close <think> it."), answer("ok")],
    "an opened mark": [user("How?"), answer("Use <think> to open it.")],
    "a switch": [system("Be brief. /no_think"), user("Hi /no_think"), answer("Hello")],
    "empty thoughts": [user("Hi"), answer("<think>\n\n</think>\n\nHello"), user("So"), answer("Yes")],
}
CALLS = {
    "a call": [user("W?"), answer("", tool_calls=[call({"city": "Rome"})]), result("22"), answer("22 C")],
    "arguments": [user("W?"), answer("", tool_calls=[call(ARGUMENTS)]), result('{"s": "a\\"b"}'), answer("22 C")],
    "no arguments": [user("W?"), answer("", tool_calls=[call({})]), result(CODE), answer("22 C")],
}
WITH_CALLS = "gemma4 glm4.5 gpt-oss granite4 llama3 llama4 minimax-m2 mistral nemotron3 qwen2.5 qwen3 qwen3-2507 qwen3.5 seed-oss"


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_of_honest_chats_nothing_is_missed(chats, name):
    for kind, turns in HONEST.items():
        in_other_marks = kind == "empty thoughts" and name in ("gemma4", "gpt-oss", "seed-oss")
        within_open = (
            kind == "an opened mark" and name == "nemotron3"
        )  # which then closes no thoughts before the answer
        assert bool(left_out(chats(name), *turns)) == (in_other_marks or within_open), kind
    for kind, turns in CALLS.items() if name in WITH_CALLS.split() else ():
        assert not left_out(chats(name), *turns, tools=TOOLS), kind


EARLIER = "thoughts of earlier turns, which the chat template leaves out"
LAST = "thoughts after the last question, which the chat template leaves out"
THINKS = [user("a"), answer("<think>\nFirst.\n</think>\n\nb"), user("c"), answer("<think>Second.</think>d")]
KEYS = [user("a"), answer("b", reasoning_content="b"), user("c"), answer("d", thinking="Second.")]
BEGUN = [user("a"), answer("First.\n</think>\n\nb")]  # by the prompt
MENTION = [user("a"), answer("Use </think> to close it."), user("c"), answer("d")]
BESIDE = [user("W?"), answer("I look.", tool_calls=[call({"city": "Rome"})]), result("22"), answer("22 C")]
FENCE = [user("a"), answer("```\n<think>\nx\n</think>\n```\nb")]
ENDLESS = [user("a"), answer("<think>\nI wonder")]
OKAY = [user("a"), answer("<think>\nyes\n</think>\n\nOkay"), user("c"), answer("<think>\nOkay, two.\n</think>\n\n4")]
TWO_KEYS = [user("a"), answer("b", reasoning_content="Hm.", reasoning="Hm.")]
OPEN = "refused: message 2 has marks of thoughts, and its answer begins within thoughts that are open"
TAKES_APART = "refused: message 2 mentions </think>, and the chat template takes its text apart there"
MUTED = [answer("b", weight=0), answer("First. </think> b", train=False)]
NO_SYSTEM = OPENING + MARKED + "{% elif m.role == 'user' %}{{ m.content }}{% endif %}" + CLOSING
LAST_ONLY = "{% for m in messages[-2:] %}<{{ m.role }}>" + MARKED + "{% else %}{{ m.content }}{% endif %}" + CLOSING
LAST_QUESTION = OPENING + MARKED + "{% elif loop.revindex < 3 %}{{ m.content }}{% endif %}" + CLOSING
FIRST_WORD = (
    OPENING + MARKED.replace("m.content", "m.content.split()[0]") + "{% else %}{{ m.content }}{% endif %}" + CLOSING
)
CALLING = MARKED.replace("{% endgeneration %}", "{{ CALLS }}{% endgeneration %}")
TEXTS = OPENING + CALLING + "{% else %}{{ m.content }}{% endif %}" + CLOSING
NAMES = TEXTS.replace("CALLS", "(m.tool_calls or [{}])[0].get('function', {}).get('name', '')")
STRINGS = TEXTS.replace("{{ CALLS }}", (
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% for k, v in c.function.arguments.items() if v is string %}"
    "{{ k }}={{ v }}{% endfor %}{% endfor %}"
))  # fmt: skip


@pytest.mark.parametrize("template, turns, expected", [
    ("qwen3", THINKS, EARLIER), ("glm4.5", THINKS, EARLIER), ("chatml", THINKS, ""),
    ("deepseek-r1", THINKS, EARLIER), ("deepseek-v3.1", BEGUN, LAST), ("qwen3", BEGUN, ""),
    ("qwen3", KEYS, EARLIER), ("chatml", KEYS, f"{LAST}; {EARLIER}"), ("gpt-oss", KEYS, EARLIER),
    *[(name, MENTION, TAKES_APART) for name in ("qwen3", "glm4.5", "minimax-m2", "qwen3.5", "deepseek-r1", "deepseek-v3.1")],
    ("qwen3", MENTION[:2], TAKES_APART), ("nemotron3", MENTION, ""), ("chatml", MENTION, ""),
    ("qwen3", [user("a"), answer("Wait <think>Hm.</think> b")], "refused: the chat template leaves out 'Wait' of message 2"),
    *[(name, turns, OPEN) for name in ("deepseek-r1", "nemotron3") for turns in (MENTION[:2], FENCE, ENDLESS)],
    *[(name, OKAY, EARLIER) for name in ("deepseek-r1", "minimax-m2", "nemotron3", "qwen3.5", "qwen3")],
    ("qwen3", ENDLESS, OPEN), ("chatml", FENCE, ""), ("deepseek-r1", THINKS[:2], ""), ("deepseek-r1", BEGUN, ""),
    ("qwen3", TWO_KEYS, ""), ("gpt-oss", TWO_KEYS, ""), ("chatml", TWO_KEYS, LAST),
    ("qwen3", [user("a"), MUTED[1], user("c"), answer("d")], "earlier answers, which"),
    ("llama3", BESIDE, "texts beside tool calls, which the chat template leaves out"),
    ("gpt-oss", BESIDE, ""), ("qwen3", BESIDE, ""),
    ("chatml", [user("a"), answer("b", reasoning_content=["Hm."])], "refused: the reasoning_content of message 2 is ['Hm.']"),
    ("chatml", [user("a"), answer("b", thinking={"text": "Hm."})], "refused: the thinking of message 2 is {'text': 'Hm.'}"),
    (NO_SYSTEM, [system("Be brief."), user("a"), answer("b")], "refused: the chat template leaves out 'Be brief.' of message 1"),
    (NO_SYSTEM, [user("W?"), answer("b")], ""),
    (LAST_ONLY, [user("a"), answer("b"), user("c"), answer("d")], "refused: the chat template's prompt for an answer"),
    (LAST_QUESTION, [user("a"), MUTED[0], user("c"), answer("d")], "earlier turns, which the chat template leaves out"),
    (FIRST_WORD, [user("a"), answer("One word more than it shows.")], "refused: the chat template leaves out 'One word more"),
    ("chatml", [user("W?"), answer("", tool_calls=[call({})])], "refused: it has tool_calls, and the chat template leaves them"),
    (NAMES, CALLS["a call"], "refused: the chat template leaves out 'city', an argument of a tool call in message 2"),
    (STRINGS, CALLS["a call"], ""), (STRINGS, CALLS["arguments"], "refused: the chat template leaves out"),
])  # fmt: skip
def test_what_does_not_arrive_is_counted_or_refused(chats, template, turns, expected):
    found = left_out(chats(template), *turns)
    assert found.startswith(expected) if expected else not found, found


OTHERS = (
    "<|begin_of_thought|>", "<|begin_of_solution|>", "<thinking>", "<Thought>", "<reasoning>", "<|START_THINKING|>", "[THINK]",
    "◁think▷", "<seed:think>", "<longcat_think>", "<|channel>thought", "<|im_start|>think", "## Thinking", "<think>",
)  # fmt: skip


@pytest.mark.parametrize("template, own", [("qwen3", "<think>"), ("seed-oss", "<seed:think>"), ("gpt-oss", "")])
def test_thoughts_in_another_format_are_counted(chats, template, own):
    for mark in OTHERS:
        found = left_out(chats(template), user("a"), answer(f"{mark}\nHm.\n\nSo: b"))
        assert mark == own or found.startswith(f"{mark} at the beginning of answers"), found
        if mark != "<think>":  # which templates look at
            assert not left_out(chats("chatml"), user("a"), answer(f"{mark}\nHm.\n\nSo: b")), "its own format"
    for text in (
        "# Thinking about it",
        "Thinking: b",
        "<p>Think</p>",
        "<b>Thought</b>",
        "Use <thinking>.",
        "[Analysis](a.md)",
    ):
        assert not left_out(chats(template), user("a"), answer(text))
    assert left_out(chats("chatml", how="cut"), user("a"), answer("<reasoning>Hm.</reasoning>b"))
    assert not left_out(chats(template, how="cut"), user("a"), answer("<think>Hm.</think>b")), (
        "it is cut, and not learned"
    )
    twice = answer("b", **{"reasoning_content" if own else "thinking": f"{own or '<think>'}\nHm."})
    assert "where the chat template writes its own" in left_out(chats(template), user("a"), twice)
    if own:
        both = f"<{own[1:-1]}>Hm.</{own[1:-1]}>b"
        assert "thoughts in a key and at the beginning" in left_out(
            chats(template), user("a"), answer(both, reasoning_content="Oh.")
        )
        assert not left_out(chats(template), user("a"), answer(both))
    meant = chats(template, own_tokens=("<|begin_of_thought|>",))
    assert not left_out(meant, user("a"), answer("<|begin_of_thought|>Hm. b"))


def test_definitions_of_tools(chats):
    assert "it has tools, and the chat template leaves them" in left_out(
        chats("chatml"), user("a"), answer("b"), tools=TOOLS
    )
    nested = {"type": "object", "properties": {"unit": {"type": "string", "description": "Its unit"}}}
    schema = {"type": "object", "properties": {"more": nested}}
    tools = [{"type": "function", "function": TOOLS[0]["function"] | {"parameters": schema}}]
    for name, counted in ("qwen3", False), ("gpt-oss", True), ("seed-oss", True):
        assert left_out(chats(name), user("a"), answer("b"), tools=tools).startswith("parts of definitions") == counted


def test_a_shape_is_tried_once(chats, monkeypatch):
    templates = chats("phi4")
    assert not left_out(templates, user("a?"), answer("b"))
    rendered, render = [], templates._render
    monkeypatch.setattr(templates, "_render", lambda *given: rendered.append(1) or render(*given))
    for number in range(5):
        assert not left_out(templates, user(f"{number}?"), answer(str(number)))
    assert len(rendered) == 5, "each row, and nothing else"


@pytest.mark.parametrize("turns, problem", [
    ([user("a"), answer("")], "the answer in message 2 is empty"),
    ([user("a"), answer(" \n\t\u200b\u00ad\u3164\u2800\ufe0f\0\x7f\u202e\U000e0041")], "the answer in message 2 is empty"),
    ([user("a"), answer(""), user("b"), answer("c")], "the answer in message 2 is empty"),
    ([user("a"), answer([{"type": "text", "text": ""}])], "the answer in message 2 is empty"),
    ([user("a"), answer("<think>\n\n</think>\n\n")], "the answer in message 2 is empty"),
    ([user("a"), answer("", refusal="I cannot.")], "its 'refusal' is not read"),
    ([user("a"), answer(None, refusal="I cannot.")], "its 'refusal' is not read"),
    ([user("a"), answer("", reasoning_content="Hm.")], "the chat template leaves out its thoughts"),
])  # fmt: skip
def test_an_empty_answer_is_refused(chats, turns, problem):
    assert problem in left_out(chats("chatml"), *turns)


def test_an_empty_answer_that_is_not_learned_is_counted_and_thoughts_that_are_shown_are_an_answer(chats):
    last = chats("chatml", last_turn_only=True)
    for templates, more in (chats("chatml"), {"weight": 0}), (last, {}):
        turns = [user("a"), answer("", **more), user("b"), answer("c")]
        assert left_out(templates, *turns) == "empty answers, which are not learned"
    assert not left_out(chats("chatml"), user("a"), answer("<think>Hm.</think>"))
    assert not left_out(chats("qwen3"), user("a"), answer("", reasoning_content="Hm."))


def test_an_empty_question_is_counted(chats):
    for question in ("", "\u200b\n"):
        assert left_out(chats("chatml"), user(question), answer("b")) == "empty questions"


# ---- forms -----------------------------------------------------------------------------------------------------------
PARTS = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
LISTS = OPENING + "{% if m.role == 'assistant' %}{% generation %}" + PARTS + "{% endgeneration %}{% else %}" + PARTS
LISTS += "{% endif %}" + CLOSING
CONCATENATES = TEXTS.replace("{{ CALLS }}", (
    "{% for c in m.tool_calls or [] %}{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}"
))  # fmt: skip
WRITES_REPR = CONCATENATES.replace("' ' +", "' ' ~")
UNWRAPPED = "{% for t in tools or [] %}{{ t.parameters | tojson }}{% endfor %}" + TEXTS


def test_a_template_that_reads_lists_of_parts_alone_gets_lists(chats):
    text = convert({"messages": [user("Where?"), answer("Here.")]}, {}, chats(LISTS))
    assert text.text == "<user>Where?</s><assistant>Here.</s>"
    assert [text.text[begin:end] for begin, end in text.spans] == ["Here.</s>"]


@pytest.mark.parametrize("template", [LISTS, "chatml"])
def test_a_letter_that_stands_for_images_elsewhere_is_a_letter_without_them(chats, template):
    """Fonts of symbols put theirs there, and web pages hold them."""
    turns = [user("a\ue001b"), answer("c\ue001")]
    assert (
        not left_out(chats(template), *turns) and "a\ue001b" in convert({"messages": turns}, {}, chats(template)).text
    )


@pytest.mark.parametrize("roles", [
    {"user"}, {"assistant"}, {"system"}, {"tool"}, {"user", "assistant"}, {"user", "tool"}, {"system", "user", "assistant"},
    {"system", "user", "assistant", "tool"}, set(),
], ids=lambda roles: "+".join(sorted(roles)))  # fmt: skip
@pytest.mark.parametrize("other", ["{{ m.content }}", "{{ m.content + '' }}", "{{ m.content | tojson }}"])
def test_a_template_that_reads_lists_of_some_roles_gets_lists_of_these(chats, roles, other):
    """A list would be written as Python prints it, or a text as its letters, and both would be learned."""
    content = f"{{% if m.role in {sorted(roles)} %}}{PARTS}{{% else %}}{other}{{% endif %}}"
    behind = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endgeneration %}{% else %}"
    whole = (
        OPENING
        + "{% if m.role == 'assistant' %}{% generation %}"
        + content
        + behind
        + content
        + "{% endif %}"
        + CLOSING
    )
    turns = [{"role": "system", "content": "Briefly."}, *CALLS["a call"]]
    text = convert({"messages": turns}, {}, chats(whole)).text
    assert "'type'" not in text and '"type"' not in text
    assert all(turn["content"] in text for turn in turns)


@pytest.mark.parametrize("template", [CONCATENATES, WRITES_REPR])
def test_a_template_that_reads_arguments_as_text_gets_json(chats, template):
    text = convert({"messages": CALLS["a call"]}, {}, chats(template))
    assert 'weather_of {"city": "Rome"}' in text.text


def test_a_template_that_writes_calls_beside_null_gets_null(chats):
    """As DeepSeek-V3's does."""
    only = CALLING.replace("m.content", "m.content or ''").replace("CALLS", "m.tool_calls if m.content is none else ''")
    template = OPENING + only + "{% else %}{{ m.content }}{% endif %}" + CLOSING
    assert "weather_of" in convert({"messages": CALLS["a call"]}, {}, chats(template)).text
    assert "leaves them out" not in left_out(chats(template), *CALLS["a call"])
    assert "None" not in convert({"messages": CALLS["a call"]}, {}, chats("qwen3")).text


def test_a_developers_turn_is_offered_the_systems_role(chats):
    with pytest.raises(BadRow) as refused:
        convert({"messages": [{"role": "developer", "content": "S"}, user("a"), answer("b")]}, {}, chats("qwen3"))
    assert "write the role 'developer' as 'system'" in refused.value.args[1]


def test_an_error_that_is_none_of_the_templates_own_names_the_key_that_it_wants(chats):
    problem = left_out(chats(UNWRAPPED), user("a"), answer("b"), tools=TOOLS)
    assert "Undefined is not JSON serializable" in problem and "has no attribute 'parameters'" in problem
    failing = chats(TEXTS.replace("m.content }}{% endif", "m.content + 1 }}{% endif"))
    assert "can only concatenate str" in left_out(failing, user("a"), answer("b"))
    adds = chats(
        "{% for t in tools or [] %}\n{{ 'f ' + t.function.name + t.function['parameters'] }}{% endfor %}" + TEXTS
    )
    problem = left_out(adds, user("a"), answer("b"), tools=TOOLS)
    assert "can only concatenate str" in problem and "for t.function['parameters']" in problem
