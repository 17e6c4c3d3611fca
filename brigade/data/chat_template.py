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
from ..recipe.files import find
from ..recipe.flags import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATES = Path(__file__).with_name("templates")
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")

# What a template of ours must render exactly as the tokenizer's own before it stands in for it: (messages, tools,
# add_generation_prompt). Where it refuses instead, it loses nothing.
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "F.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "X."}},
            "required": ["x"],
        },
    },
}
ASKED, THOUGHT = {"role": "user", "content": "Go on"}, {"reasoning_content": "\nHm.\nSo be it.\n"}


def _calls(*numbers: int) -> dict[str, Any]:
    """Tool calls whose ids are of the nine letters and digits that Mistral's templates ask for."""
    return {
        "tool_calls": [
            {"type": "function", "id": f"call0000{n}", "function": {"name": "f", "arguments": {"x": f"y{n}"}}}
            for n in numbers
        ]
    }


def _answer(number: int) -> dict[str, Any]:
    return {"role": "tool", "name": "f", "tool_call_id": f"call0000{number}", "content": f"z{number}"}


def _says(content: str, *more: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | {key: value for part in more for key, value in part.items()}


PROBES: list[tuple[list[dict[str, Any]], list[Any] | None, bool]] = [
    ([{"role": "user", "content": " Hello.\n"}, _says("Hi!"), {"role": "user", "content": "How are you?"}, _says("Fine.")],
     None, False),
    ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}, _says("2")], None, False),
    ([ASKED], None, True),
    ([ASKED], [TOOL], True),
    ([{"role": "system", "content": "Be brief."}, ASKED, _says("Done.")], [TOOL], False),
    ([ASKED, _says("", _calls(1))], [TOOL], False),
    ([ASKED, _says("", _calls(1)), _answer(1)], [TOOL], True),
    ([ASKED, _says("", _calls(1)), _answer(1), _says("Done.")], None, False),
    ([ASKED, _says("I look.", _calls(1)), _answer(1), _says("Done."), ASKED, _says("No.")], [TOOL], False),
    ([ASKED, _says("", _calls(1, 2)), _answer(1), _answer(2), _says("Done.")], [TOOL], False),
    ([ASKED, _says("", _calls(1)), _answer(1), _says("", _calls(2)), _answer(2), _says("Done.")], [TOOL], False),
    ([ASKED, _says("Yes.", THOUGHT), ASKED, _says("No.", THOUGHT)], None, False),
    ([ASKED, _says("", THOUGHT, _calls(1)), _answer(1), _says("Done.", THOUGHT)], [TOOL], False),
    ([ASKED, _says("<think>\nHm.\n</think>\n\nYes."), ASKED, _says("<think>\nHm.\n</think>\n\nNo.")], None, False),
]  # fmt: skip


# What precedes a template of ours where it stands in for one of several versions.
_VERSIONS = {"mistral": ("", *(f"{{%- set version = '{version}' -%}}\n" for version in ("v11", "v7")))}


def load(settings: Settings, tokenizer: "PreTrainedTokenizerBase") -> tuple[str, UserError | None, str]:
    """The text of the chat template to use, the error of whoever meets a chat without a usable one, and the name of ours
    that stands in for the tokenizer's own, or "".

    The stock templates of Llama 3, Qwen 3 and Gemma 3 have no generation marks, and every label would be masked (trl PR
    #4201): one of ours that renders the same stands in. Texts need no template. Raises UserError for a named one that
    is not there or has no marks.
    """
    name = settings.recipe.data.chat_template
    place = settings.place("chat_template")
    known = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
    error = UserError(
        place,
        "the chat template has no {% generation %} marks, so no token would be supervised",
        f"set chat_template to one of: {', '.join(known)}, or to a .jinja file",
    )
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


def record(settings: Settings, tokenizer: "PreTrainedTokenizerBase", generation: Any = None) -> None:
    """Have what is saved say how its chats are written and where an answer ends: the tokenizer gets the template (its own
    stays where one of ours stood in for it, which renders the same), and the generation config's eos_token_id the special
    tokens with which the template ends the assistant's turns."""
    template, _, stands_in = load(settings, tokenizer)
    if template and not stands_in:
        tokenizer.chat_template = template
    if template and generation is not None:
        there = generation.eos_token_id
        ends = [
            *(there if isinstance(there, list) else [there]),
            tokenizer.eos_token_id,
            *sorted(stops(tokenizer, template)),
        ]
        if found := list(dict.fromkeys(token for token in ends if token is not None)):
            generation.eos_token_id = found if len(found) > 1 else found[0]


def stops(tokenizer: "PreTrainedTokenizerBase", template: str) -> set[int]:
    """The special tokens that end an assistant's turn in the probes."""
    # Not all_special_ids: a Llama 3 base model's has no <|eot_id|>, with which our template ends a turn.
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    found: set[int] = set()
    for messages, tools, prompt in PROBES:
        with suppress(Exception):  # it refuses a system turn, or tools
            whole = tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=template,
                return_dict=True,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=True,
            )
            turns = itertools.groupby(
                zip(whole["input_ids"], whole["assistant_masks"], strict=True), lambda pair: pair[1]
            )
            for own, tokens in turns:
                written = [token for token, _ in tokens if own and not tokenizer.decode(token).isspace()]
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
    wanted = [(_render(tokenizer, probe, None), _render(tokenizer, _as_text(probe), None)) for probe in PROBES]
    if wanted[0][0] is None:
        return "", ""
    dates: list[dict[str, Any]] = [{}, *({"date_string": time.strftime(form)} for form in ("%d %b %Y", "%Y-%m-%d"))]
    for path in sorted(TEMPLATES.glob("*.jinja")):
        for version, date in itertools.product(_VERSIONS.get(path.stem, ("",)), dates):
            template = version + path.read_text()

            def same(number: int, template: str = template, date: dict[str, Any] = date) -> bool:
                ours, theirs = _render(tokenizer, PROBES[number], template, **date), wanted[number]
                return ours in theirs if number == 0 else ours is None or theirs[0] is None or ours in theirs

            if all(map(same, range(len(PROBES)))):
                return path.stem, template
    return "", ""


def _as_text(probe: Any) -> Any:
    """A probe with its calls' arguments as JSON in a text."""
    messages, tools, prompt = copy.deepcopy(probe)
    for call in (call for message in messages for call in message.get("tool_calls", [])):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return messages, tools, prompt


def _render(tokenizer: "PreTrainedTokenizerBase", probe: Any, template: str | None, **variables: Any) -> str | None:
    messages, tools, prompt = probe
    with suppress(Exception):  # it refuses a system turn, or tools
        return tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=prompt, **variables
        )
    return None
