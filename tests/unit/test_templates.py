"""Our chat templates: byte for byte the official rendering, with the marks on exactly what the assistant writes.

What the official templates render is recorded in tests/data/dialogues with its source (benchmarks/record_dialogues.py).
The strings under "supervised" there were written by hand, not taken from a template.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from jinja2 import meta, nodes
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from brigade.train.data import chat_template
from brigade.train.data.layout import TEMPLATES
from brigade.train.data.probes import stand_in
from testing.dialogues import FAMILIES, text_of, unmarked, with_template

CASES = [
    pytest.param(name, dialogue, id=f"{name}: {dialogue['name']}")
    for name, family in FAMILIES.items()
    for dialogue in family["dialogues"]
]
every_dialogue = pytest.mark.parametrize("name, dialogue", CASES)
every_template = pytest.mark.parametrize("name", FAMILIES)
HELLO = [{"role": "user", "content": "x"}]


def render(name, messages, template=None, **kwargs):
    """The rendering of a chat, and the spans under generation marks."""
    options = FAMILIES[name]["special_tokens"] | kwargs | {"return_assistant_tokens_mask": True}
    (rendered,), (spans,) = render_jinja_template([messages], chat_template=template or text_of(name), **options)
    return rendered, spans


def again(name, dialogue, **kwargs):
    return render(name, dialogue["messages"], tools=dialogue.get("tools"), **dialogue.get("kwargs", {}), **kwargs)


# ---- what is recorded --------------------------------------------------------------------------------------------
def test_every_template_has_its_recordings():
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == set(FAMILIES)
    assert set(FAMILIES) >= {"llama3", "qwen3", "gemma3", "mistral", "phi4", "gpt-oss"}
    guide = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in guide for name in FAMILIES)


WITHOUT_TOOLS = ("chatml", "deepseek-r1", "ernie4.5", "gemma3", "phi4", "smollm2", "tulu")


@every_template
def test_recordings_are_enough_and_name_their_source(name):
    family = FAMILIES[name]
    dialogues = family["dialogues"]
    assert len({json.dumps([d["messages"], d.get("tools"), d.get("kwargs")]) for d in dialogues}) >= 5
    assert any(d.get("kwargs", {}).get("add_generation_prompt") for d in dialogues)
    assert any(len(d["supervised"]) > 2 for d in dialogues)
    assert any(d["messages"][0]["role"] == "system" for d in dialogues)
    roles = {message["role"] for d in dialogues for message in d["messages"]}
    assert ("tool" in roles) == (name not in WITHOUT_TOOLS)
    assert name in (*WITHOUT_TOOLS, "deepseek-v3.1", "phi4-mini", "smollm3") or any(d.get("tools") for d in dialogues)
    for dialogue in dialogues:  # one part a turn, for turns without loss; Mistral joins messages that follow each other
        turns = [message["role"] for message in dialogue["messages"]].count("assistant")
        assert len(dialogue["supervised"]) == turns or name == "mistral"
    for source in family["sources"].values():
        assert re.fullmatch(r"[0-9a-f]{40}", source["commit"]) and re.fullmatch(r"[0-9a-f]{64}", source["sha256"])
        assert source["model"] and source["path"] and source["licence"] and source["repository"].startswith("https://")
    assert all(d["sources"] and set(d["sources"]) <= set(family["sources"]) for d in dialogues)


# ---- the rendering -----------------------------------------------------------------------------------------------
@every_dialogue
def test_marks_change_nothing(name, dialogue):
    bare = unmarked(name)
    assert bare != text_of(name) and not re.search(r"%-? *(end)?generation", bare)
    rendered, spans = again(name, dialogue, template=bare)
    assert rendered == dialogue["rendering"] and not spans


# ---- the marks ---------------------------------------------------------------------------------------------------
@every_dialogue
def test_it_renders_like_the_official_template_with_marks_on_exactly_the_assistants_text(name, dialogue):
    rendered, spans = again(name, dialogue)
    assert rendered == dialogue["rendering"]
    assert [rendered[start:end] for start, end in spans] == dialogue["supervised"]
    # Where they stand, too: right behind what the model is prompted with.
    prompts = tuple(FAMILIES[name]["prompts"])
    assert all(rendered[:start].endswith(prompts) for start, _ in spans)


@every_dialogue
def test_labels_decode_to_exactly_the_assistants_text(tokenizers, name, dialogue):
    tokenizer = tokenizers[name]
    chat = {"conversation": dialogue["messages"], "tools": dialogue.get("tools"), "chat_template": text_of(name)}
    options = {"return_dict": True, "return_assistant_tokens_mask": True, **dialogue.get("kwargs", {})}
    encoded = tokenizer.apply_chat_template(**chat, **options)
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    assert tokenizer.decode(ids) == dialogue["rendering"]
    own = "".join(str(bit) for bit in mask)
    runs = [tokenizer.decode(ids[run.start() : run.end()]) for run in re.finditer("1+", own)]
    expected = list(dialogue["supervised"])
    last = FAMILIES[name]["prompts"][0][-1]
    if last.isspace():
        # A token can hold the header's newline together with white space that begins the answer, and a header's space together
        # with any beginning of it. It counts as the answer's.
        held = [last == " " or want[:1].isspace() for want in expected]
        runs = [run.lstrip() if held else run for run, held in zip(runs, held, strict=True)]
        expected = [want.lstrip() for want in expected]
    assert runs == expected


# ---- standing in for stock templates -----------------------------------------------------------------------------
DEEPSEEKS = "<｜end▁of▁sentence｜>"  # noqa: RUF001
ENDS = {
    "chatml": ["<|im_end|>"],
    "qwen3": ["<|im_end|>"],
    "llama3": ["<|eot_id|>"],
    "gemma3": ["<end_of_turn>"],
    "phi4": ["<|im_end|>"],
    "smollm2": ["<|im_end|>"],
    "mistral": ["</s>"],
    "gpt-oss": ["<|return|>", "<|call|>"],
    "tulu": [],
    "qwen3.5": ["<|im_end|>"],
    "qwen3-2507": ["<|im_end|>"],
    "qwen2.5": ["<|im_end|>"],
    "glm4.5": ["<|user|>", "<|observation|>"],
    "gemma4": ["<turn|>", "<|tool_response>"],
    "deepseek-r1": [DEEPSEEKS],
    "granite4": ["<|end_of_text|>"],
    "seed-oss": ["<seed:eos>"],
    "lfm2": ["<|im_end|>"],
    "minimax-m2": ["[e~["],
    "nemotron3": ["<|im_end|>"],
    "llama4": ["<|eot|>"],
    "deepseek-v3.1": [DEEPSEEKS],
    "smollm3": ["<|im_end|>"],
    "ernie4.5": ["<|end_of_sentence|>"],
    "phi4-mini": ["<|end|>"],
}


def record(settings, tokenizer, generation):
    templates = chat_template.load(settings, tokenizer)
    chat_template.chat_format(tokenizer, templates).record(tokenizer, generation)


@every_template
def test_what_is_saved_has_the_template_that_was_named_and_stops_at_its_ends(load, tokenizers, tmp_path, name):
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = with_template(tokenizers[name], None)  # a base model's
    generation = GenerationConfig(eos_token_id=7)
    for _ in range(2):  # once more, by an export
        record(load(data={"chat_template": name}), tokenizer, generation)
        tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == text_of(name)
    ends = {7, tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(ENDS[name])}
    assert sorted(generation.eos_token_id) == sorted(ends)


def test_an_own_template_for_which_ours_stood_in_stays(load, tokenizers):
    tokenizer = with_template(tokenizers["llama3"], unmarked("llama3"))
    generation = SimpleNamespace(eos_token_id=7)
    record(load(data={"chat_template": None}), tokenizer, generation)
    assert tokenizer.chat_template == unmarked("llama3")
    assert set(tokenizer.convert_tokens_to_ids(ENDS["llama3"])) <= set(generation.eos_token_id)


def stands_in(tokenizer, stock):
    """Name and text of the template of ours that stands in where this one is the tokenizer's own."""
    return stand_in(with_template(tokenizer, stock))


@every_template
@pytest.mark.parametrize("version", ["v7", "v11", "v13"])
def test_a_stock_template_that_renders_the_same_is_recognised(tokenizers, name, version):
    """(The official files themselves are not part of this repository; ours without marks render what they render.)"""
    if name != "mistral" and version != "v13":
        version = "anything"
    tokenizer = with_template(tokenizers[name], f"{{%- set version = '{version}' -%}}" + unmarked(name))
    found, template = stand_in(tokenizer)
    assert found == name and template.endswith(text_of(name))
    messages = called({"a": 1}) if name == "mistral" else HELLO
    assert render(name, messages, template)[0] == render(name, messages, tokenizer.chat_template)[0]


@pytest.mark.parametrize("name, variable, value", [
    ("gemma4", "version", "'small'"), ("granite4", "version", "'4.1'"), ("lfm2", "version", "'2.5'"),
    ("mistral", "version", "'v7'"), ("qwen3.5", "version", "'3.6'"), ("qwen3.5", "enable_thinking", "false"),
])  # fmt: skip
def test_each_version_of_a_family_is_recognised(tokenizers, name, variable, value):
    version = f"{{%- set {variable} = {variable} | default({value}) -%}}"
    tokenizer = with_template(tokenizers[name], version + unmarked(name))
    found, template = stand_in(tokenizer)
    assert found == name and template != text_of(name) and template.endswith(text_of(name))
    chat = {"conversation": HELLO, "tokenize": False, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template(**chat, chat_template=template) == tokenizer.apply_chat_template(**chat)


@pytest.mark.parametrize("name, old, new", [
    ("qwen3", "'\\n<tool_response>\\n' + text", "'\\n<result>\\n' + text"), ("qwen3", "'<tool_call>\\n", "'<call>\\n"),
    ("qwen3", "thoughts.strip('\\n')", "thoughts"), ("qwen3", "'\\n' if text or not loop.first", "'\\n'"),
    ("mistral", "[TOOL_RESULTS]", "[RESULTS]"), ("mistral", "[ARGS]", "[WITH]"), ("llama3", "ipython<|end", "tool<|end"),
    ("llama3", '"parameters": ', '"arguments": '), ("gpt-oss", "<|start|>functions.", "<|start|>function."),
])  # fmt: skip
def test_one_that_writes_tools_or_thoughts_otherwise_is_not_replaced(tokenizers, name, old, new):
    assert old in unmarked(name)
    assert stands_in(tokenizers[name], unmarked(name).replace(old, new)) == ("", "")


@pytest.mark.parametrize("stock", ["{{ raise_exception('no') }}", "{% if %}", "", None])
def test_one_that_renders_nothing_is_not_replaced(tokenizers, stock):
    assert stands_in(tokenizers["chatml"], stock) == ("", "")


def test_what_it_refuses_ours_need_not_refuse(tokenizers):
    refuses = "{%- for m in messages if m.role == 'tool' -%}{{- raise_exception('no tools') -}}{%- endfor -%}"
    stock = refuses + unmarked("qwen3").replace("<tool_response>", "<result>")
    assert stands_in(tokenizers["qwen3"], stock)[0] == "qwen3"


# ---- the templates themselves ------------------------------------------------------------------------------------
CHAT = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
OFFICIAL = {"date_string", "enable_thinking", "model_identity", "reasoning_effort", "custom_tools", "builtin_tools"}
OFFICIAL |= {"tools_in_user_message", "preserve_thinking", "keep_past_thinking", "documents", "available_tools"}
OFFICIAL |= {"thinking_budget", "use_json_tooldef", "low_effort", "truncate_history_thinking", "thinking", "xml_tools"}
OFFICIAL |= {"python_tools"}  # and "version", which a few set
OURS = {"as_sample"}  # data/marks.py
SANDBOX = {"raise_exception", "namespace", "dict"}


@every_template
def test_needs_nothing_but_the_chat_and_the_sandbox(name):
    environment = _compile_jinja_template(text_of(name)).environment
    assert isinstance(environment, ImmutableSandboxedEnvironment)
    tree = environment.parse(text_of(name))
    # No strftime_now: the same data would be encoded differently tomorrow.
    own = {node.name for node in tree.find_all(nodes.Name) if node.ctx != "load"}
    assert meta.find_undeclared_variables(tree) - own <= CHAT | OFFICIAL | OURS | SANDBOX
    assert max(map(len, text_of(name).splitlines())) <= 120


@pytest.mark.parametrize("first, begin", [("<s>", "<s><|user|>"), (None, "<|user|>")])
def test_tulu_begins_as_a_base_model_has_seen_texts_begin(first, begin):
    assert render("tulu", [{"role": "user", "content": "x"}], bos_token=first)[0].startswith(begin)


def called(arguments, calls=1):
    function = {"name": "f", "arguments": arguments}
    asked = {"role": "assistant", "content": "", "tool_calls": [{"id": "call00001", "function": function}] * calls}
    return [{"role": "user", "content": "x"}, asked]


READ_OBJECTS = ["qwen2.5", "qwen3.5", "glm4.5", "gemma4", "seed-oss", "minimax-m2", "nemotron3", "llama4"]
READ_BOTH = ["qwen3", "qwen3-2507", "granite4", "deepseek-v3.1"]
ONE_CALL = ["llama3", "gpt-oss"]  # a message, with arguments as an object
CALLS = {"tool_calls": [{"id": "short", "function": {"name": "f", "arguments": {}}}]}
REFUSED = [
    *[(name, "frobnicate", [{"role": "frobnicate", "content": "x"}], {}) for name in FAMILIES if name != "gemma3"],
    ("gemma3", "take turns", [{"role": "assistant", "content": "x"}], {}),
    ("gemma3", "take turns", [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}], {}),
    ("gemma3", "take turns", [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}], {}),
    ("gemma3", "no format for tools", HELLO, {"tools": [{"type": "function"}]}),
    ("phi4", "no format for tools", HELLO, {"tools": [{"type": "function"}]}),
    ("phi4", "no role tool", [{"role": "tool", "content": "x"}], {}),
    ("mistral", "cannot follow", [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}], {}),
    ("mistral", "neither text nor", [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}], {}),
    ("mistral", "v3", HELLO, {"version": "v3"}),
    ("gpt-oss", "in its place", [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}], {}),
    ("gpt-oss", "tool call", [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}], {}),
    ("gpt-oss", "built-in", HELLO, {"builtin_tools": ["python"]}),
    ("gpt-oss", "channel tags", [{"role": "assistant", "content": "<|channel|>final<|message|>x"}], {}),
    ("llama3", "built-in", HELLO, {"builtin_tools": ["code_interpreter"]}),
    ("llama3", "begin with one", [{"role": "assistant", "content": "x"}], {"tools": []}),
    ("gpt-oss", "both content", [{"role": "assistant", "content": "x", "thinking": "y"} | CALLS], {}),
    ("gpt-oss", "tool call", [{"role": "assistant", "content": ""} | CALLS, {"role": "assistant", "content": "x"},
                              {"role": "tool", "content": "y"}], {}),
    ("llama3", "only the assistant", [{"role": "user", "content": "x"} | CALLS], {}),
    ("gemma3", "without tool calls", [{"role": "user", "content": "x"} | CALLS], {}),
    ("phi4", "without tool calls", [{"role": "assistant", "content": "x"} | CALLS], {}),
    ("mistral", "9 characters", [{"role": "user", "content": "x"}, {"role": "assistant"} | CALLS], {"version": "v7"}),
    ("mistral", "needs the tool_call_id", [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"},
                                 {"role": "tool", "content": "y"}], {"version": "v11"}),
    ("mistral", "not a text", [{"role": "user", "content": "x"}, {"role": "assistant", "content": [{}]}], {}),
    *[(name, "not a text", [{"role": "user", "content": None}], {})
      for name in ("llama3", "qwen3", "mistral", "qwen3.5", "qwen3-2507", "qwen2.5", "glm4.5", "gemma4", "granite4", "seed-oss",
                   "lfm2", "minimax-m2", "nemotron3", "llama4", "deepseek-v3.1", "smollm3", "phi4-mini")],
    ("qwen3.5", "needs a user", [{"role": "assistant", "content": "x"}], {}),
    ("qwen3.5", "is the first", [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}], {}),
    ("qwen3.5", "follow a tool call", [{"role": "tool", "content": "x"}, {"role": "user", "content": "y"}], {}),
    ("deepseek-r1", "no format for tools", HELLO, {"tools": [{"type": "function"}]}),
    ("deepseek-r1", "no role tool", [{"role": "tool", "content": "x"}], {}),
    ("deepseek-r1", "without tool calls", [{"role": "assistant", "content": "x"} | CALLS], {}),
    ("deepseek-r1", "is the first", [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}], {}),
    ("deepseek-v3.1", "list of tools", HELLO, {"tools": [{"type": "function"}]}),
    ("deepseek-v3.1", "is the first", [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}], {}),
    ("deepseek-v3.1", "does not follow a user", [{"role": "assistant", "content": "x"}], {}),
    ("deepseek-v3.1", "follow a tool call", [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}], {}),
    ("deepseek-v3.1", "only the assistant", [{"role": "user", "content": "x"} | CALLS], {}),
    ("deepseek-v3.1", "prefix", [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "prefix": True}],
     {"thinking": True}),
    ("ernie4.5", "no format for tools", HELLO, {"tools": [{"type": "function"}]}),
    ("ernie4.5", "no role tool", [{"role": "tool", "content": "x"}], {}),
    ("ernie4.5", "without tool calls", [{"role": "assistant", "content": "x"} | CALLS], {}),
    ("phi4-mini", "into the system message", HELLO, {"tools": [{"type": "function"}]}),
    ("phi4-mini", "into the content", [{"role": "assistant", "content": "x"} | CALLS], {}),
    ("phi4-mini", "into the content", [{"role": "system", "content": "x", "tools": "[]"}], {}),
    ("smollm3", "no format for tool_calls", [{"role": "assistant", "content": "x"} | CALLS], {}),
    ("smollm3", "is the first", [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}], {}),
    ("llama4", "only the assistant", [{"role": "user", "content": "x"} | CALLS], {}),
    ("llama4", "first user message", [{"role": "assistant", "content": "x"}], {"tools": []}),
    ("llama4", "in the system message", [{"role": "user", "content": "x"}],
     {"tools": [], "tools_in_user_message": False}),
    ("seed-oss", "is empty", [{"role": "assistant", "content": " "}], {}),
    ("seed-oss", "only the assistant", [{"role": "user", "content": "x"} | CALLS], {}),
    ("seed-oss", "use_json_tooldef", HELLO, {"use_json_tooldef": True}),
    ("seed-oss", "no returns", HELLO, {"tools": [{"function": {
        "name": "f", "description": "F.", "parameters": {}, "returns": {}}}]}),
    ("lfm2", "no format for tool_calls", [{"role": "assistant", "content": "x"} | CALLS], {}),
    ("minimax-m2", "is the first", [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}], {}),
    ("minimax-m2", "the date", [{"role": "system", "content": "x", "current_date": "1999-12-31"}], {}),
    ("minimax-m2", "follow a tool call", [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}], {}),
    ("nemotron3", "follow a tool call", [{"role": "tool", "content": "y"}], {}),
    ("gemma4", "in a row", [{"role": "assistant", "content": "x"}, {"role": "assistant", "content": "y"}], {}),
    ("gemma4", "behind the results", [{"role": "assistant", "content": "x"} | CALLS], {}),
    ("gemma4", "follow a tool call", [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}], {}),
    ("gemma4", "only the assistant", [{"role": "user", "content": "x"} | CALLS], {}),
    ("gemma4", "no response", HELLO, {"tools": [{"function": {
        "name": "f", "response": {"type": "string"}}}]}),
    ("qwen2.5", "only the assistant", [{"role": "user", "content": "x"} | CALLS], {}),
    *[(name, "must be an object", called('{"a": 1}'), {}) for name in READ_OBJECTS + ONE_CALL],
    *[(name, "not several", called({"a": 1}, calls=2), {}) for name in ONE_CALL],
]  # fmt: skip


@pytest.mark.parametrize("name, reason, messages, kwargs", REFUSED)
def test_refuses_what_the_family_cannot_express(name, reason, messages, kwargs):
    with pytest.raises(TemplateError, match=reason):
        render(name, messages, **kwargs)


@pytest.mark.parametrize("name", ONE_CALL)
def test_an_object_of_arguments_is_written_as_json(name):
    assert '{"a": 1}' in render(name, called({"a": 1}))[0]


@pytest.mark.parametrize(
    "name, version", [*[(name, None) for name in READ_BOTH], *[("mistral", v) for v in ("v7", "v11", "v13")]]
)
def test_arguments_as_text_or_as_an_object_are_the_same(name, version):
    # mistral-common's v7 template escapes the quotation marks of an object's call, so no rendering is recorded of it.
    kwargs = {"version": version} if version else {}
    assert render(name, called({"a": 1}), **kwargs) == render(name, called('{"a": 1}'), **kwargs)


@every_template
def test_tool_calls_of_none_are_no_tool_calls(name):
    """Columnar data sets give every message the column tool_calls."""
    plain = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert render(name, [m | {"tool_calls": None} for m in plain]) == render(name, plain)


@pytest.mark.parametrize("name", ["llama3", "gpt-oss", "smollm3"])
def test_the_date_is_no_clock_but_can_be_set(name):
    messages = [{"role": "user", "content": "x"}]
    assert "1 Jan 1999" in render(name, messages, date_string="1 Jan 1999")[0]
    assert re.search("26 Jul 2024|2025-08-05|08 July 2025", render(name, messages)[0])
