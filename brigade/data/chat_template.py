"""Which chat template a run uses: one with generation marks, for they say which tokens are the assistant's."""

import copy
import itertools
import json
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..recipe.files import find, read_yaml
from ..recipe.flags import Settings
from .layout import TEMPLATES, ChatFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FILE = read_yaml(Path(__file__).with_name("probes.yaml"))
TOOL = _FILE["tool"]
PROBES: list[dict[str, Any]] = [  # as apply_chat_template takes them
    {
        "conversation": probe["messages"],
        "tools": [TOOL] if probe.get("tools") else None,
        "add_generation_prompt": probe.get("prompt", False),
    }
    for probe in _FILE["probes"]
]

# What precedes a template of ours where it stands in for one of several versions.
_VERSIONS = {"mistral": ("", *(f"{{%- set version = '{version}' -%}}\n" for version in ("v11", "v7")))}


def load(settings: Settings, tokenizer: "PreTrainedTokenizerBase") -> tuple[str, UserError | None, str]:
    """The text of the chat template to use, the error of whoever meets a chat without a usable one, and the name of ours
    that stands in for the tokenizer's own, or "".

    The stock templates of Llama 3, Qwen 3 and Gemma 3 have no generation marks, and every label would be masked (trl PR
    #4201): one of ours that renders the same stands in. Texts need no template. Raises UserError for a named one that
    is not there or has no marks.
    """
    name, place = settings.recipe.data.chat_template, settings.place("chat_template")
    known = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
    problem = "the chat template has no {% generation %} marks, so no token would be supervised"
    error = UserError(place, problem, f"set chat_template to one of: {', '.join(known)}, or to a .jinja file")
    if name in known:
        return (TEMPLATES / f"{name}.jinja").read_text(), None, ""
    if not name:
        own = tokenizer.chat_template or ""
        stem, template = ("", own) if _MARK.search(own) else stand_in(tokenizer)
        return template, None if template else error, stem
    path = find(name, place, f"chat template (or one of: {', '.join(known)})")
    if not path.is_file():
        raise UserError(place, f"{name!r} is a directory, not a file", "name a .jinja file")
    template = path.read_text()
    if not _MARK.search(template):
        raise error
    return template, None, ""


def chat_format(tokenizer: "PreTrainedTokenizerBase", template: str, stands_in: str) -> ChatFormat:
    """What a model that is saved says of its chats."""
    return ChatFormat(template, stands_in, sorted(stops(tokenizer, template)) if template else [])


def stops(tokenizer: "PreTrainedTokenizerBase", template: str) -> set[int]:
    """The special tokens that end an assistant's turn in the probes."""
    # Not all_special_ids: a Llama 3 base model's has no <|eot_id|>, with which our template ends a turn.
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    found: set[int] = set()
    for probe in PROBES:
        with suppress(Exception):  # it refuses a system turn, or tools
            whole = tokenizer.apply_chat_template(
                **probe, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
            )
            tokens = zip(whole["assistant_masks"], whole["input_ids"], strict=True)
            for own, turn in itertools.groupby(tokens, lambda pair: pair[0]):
                written = [token for _, token in turn if own and not tokenizer.decode(token).isspace()]
                found |= special.intersection(written[-1:])  # some templates put a line's end after it
    return found


def stand_in(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, str]:
    """Name and text of the template of ours that renders the probes as the tokenizer's own does, or two empty ones.

    A probe that either of the two refuses tells nothing. Tool calls may be written as the tokenizer's own template writes
    OpenAI's form, arguments as JSON in a text: Mistral's v7 quotes an object's twice.
    Llama 3.2 and gpt-oss write today's date; ours write a fixed one unless they are given date_string, for data that
    changed overnight could be neither cached nor repeated.
    """
    if not tokenizer.chat_template:
        return "", ""
    wanted = [(_render(tokenizer, probe), _render(tokenizer, _with_json_arguments(probe))) for probe in PROBES]
    if wanted[0][0] is None:
        return "", ""
    dates: list[dict[str, Any]] = [{}, *({"date_string": time.strftime(form)} for form in ("%d %b %Y", "%Y-%m-%d"))]

    def renders_the_same(template: str, date: dict[str, Any]) -> bool:
        for number, (probe, theirs) in enumerate(zip(PROBES, wanted, strict=True)):
            ours = _render(tokenizer, probe, chat_template=template, **date)
            refused = number > 0 and (ours is None or theirs[0] is None)
            if not refused and ours not in theirs:
                return False
        return True

    for path in sorted(TEMPLATES.glob("*.jinja")):
        for version, date in itertools.product(_VERSIONS.get(path.stem, ("",)), dates):
            if renders_the_same(template := version + path.read_text(), date):
                return path.stem, template
    return "", ""


def _with_json_arguments(probe: dict[str, Any]) -> dict[str, Any]:
    probe = copy.deepcopy(probe)
    for call in (call for turn in probe["conversation"] for call in turn.get("tool_calls", [])):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return probe


def _render(tokenizer: "PreTrainedTokenizerBase", probe: dict[str, Any], **variables: Any) -> str | None:
    with suppress(Exception):  # it refuses a system turn, or tools
        return tokenizer.apply_chat_template(**probe, tokenize=False, **variables)
    return None
