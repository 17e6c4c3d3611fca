"""Chats that are rendered on trial (probes.yaml), and what they tell of chat templates: which of ours renders as a tokenizer's
own does, and what that one refuses."""

import itertools
import json
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..recipe.files import read_yaml
from .layout import TEMPLATES
from .rows import Message, Variables
from .template_forms import Forms

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILE = read_yaml(Path(__file__).with_name("probes.yaml"))
TOOL = _FILE["tool"]
PROBES, IMAGE_PROBES = (  # as apply_chat_template takes them
    [
        {
            "conversation": probe["messages"],
            "tools": [TOOL] if probe.get("tools") else None,
            "add_generation_prompt": probe.get("prompt", False),
        }
        for probe in _FILE[name]
    ]
    for name in ("probes", "image_probes")
)

JSON = Forms(json_arguments=True)
# Other values that a template of ours may begin with, where it stands in for one of several versions.
_VERSIONS: dict[str, list[dict[str, Any]]] = {
    "gemma4": [{"version": "small"}],
    "granite4": [{"version": "4.1"}],
    "lfm2": [{"version": "2.5"}],
    "mistral": [{"version": "v11"}, {"version": "v7"}],
    "qwen3.5": [{"enable_thinking": False}, {"version": "3.6"}],
}


def templates_of_ours() -> dict[str, str]:
    """Return name -> text of our templates."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(TEMPLATES.glob("*.jinja"))}


def tokens_in(text: str) -> set[str]:
    """Return what stands in a template, or in what it writes, in the form of special tokens."""
    return set(re.findall(r"<[^<>\s]+>|\[[A-Z_/]+\]", text))


def own_refuses(tokenizer: "PreTrainedTokenizerBase", template: str) -> str:
    """Return the role of the first turn that the tokenizer's own template refuses in the probes, and this one renders: Gemma 1's
    and 2's refuse the system's, which Gemma 3's puts before the question. "": there is none."""
    own = tokenizer.chat_template
    own = own["default"] if isinstance(own, dict) else own
    for probe in PROBES:
        first = probe["conversation"][0]["role"]
        if first == "user":
            continue
        theirs, ours = (render_probe(tokenizer, probe, chat_template=each) for each in (own, template))
        if theirs is None and ours is not None:
            return first
    return ""


def stand_in(
    tokenizer: "PreTrainedTokenizerBase", own: str | None = None, probes: list[Message] = PROBES
) -> tuple[str, str]:
    """Return name and text of the template of ours that renders the probes as the tokenizer's own does, or ("", "").

    own: which of the tokenizer's templates is meant; default: its only one
    A probe that either of the two refuses tells nothing. Tool calls may be written as the tokenizer's own template writes
    OpenAI's form, arguments as JSON in a text: Mistral's v7 quotes an object's twice.
    Llama 3.2 and gpt-oss write today's date; ours write a fixed one unless they are given date_string, for data that
    changed overnight could be neither cached nor repeated.
    """
    own = own or tokenizer.chat_template
    if not own:
        return "", ""
    wanted = [
        (
            render_probe(tokenizer, probe, chat_template=own),
            render_probe(tokenizer, probe | {"conversation": JSON.of(probe["conversation"])}, chat_template=own),
        )
        for probe in probes
    ]
    if wanted[0][0] is None:
        return "", ""
    dates = [{"date_string": time.strftime(form)} for form in ("%d %b %Y", "%d %B %Y", "%Y-%m-%d")]

    def renders_the_same(template: str, variables: Variables) -> bool:
        for number, (probe, theirs) in enumerate(zip(probes, wanted, strict=True)):
            ours = render_probe(tokenizer, probe, chat_template=template, **variables)
            refused = number > 0 and (theirs[0] is None or (ours is None and not _with_images([probe])))
            if not refused and ours not in theirs:
                return False
        return True

    # Those that have the most tokens in common come first: to compile one takes longer than to render all probes.
    for name, text in sorted(templates_of_ours().items(), key=lambda item: len(tokens_in(own) ^ tokens_in(item[1]))):
        days = dates if "date_string" in text else []
        for version, date in itertools.product([{}, *_VERSIONS.get(name, [])], [{}, *days]):
            if renders_the_same(text, version | date):
                return name, "".join(map(defaulting, version.items())) + text
    return "", ""


def _with_images(probes: list[Message]) -> bool:
    """Whether there are chats with images among these."""
    return any(isinstance(turn["content"], list) for probe in probes for turn in probe["conversation"])


def defaulting(variable: tuple[str, object]) -> str:
    """Return a line of a template that gives a variable a value where whoever renders it gives none."""
    name, value = variable
    return f"{{%- set {name} = {name} | default({json.dumps(value)}) -%}}\n"


def render_probe(tokenizer: "PreTrainedTokenizerBase", probe: Message, **variables: object) -> str | None:
    """Return a probe as a template writes it, or None where it refuses it."""
    with suppress(Exception):  # it refuses a system turn, or tools
        return tokenizer.apply_chat_template(**probe, tokenize=False, **variables)
    return None
