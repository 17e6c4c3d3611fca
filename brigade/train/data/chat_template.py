"""The chat template of a run. Generation marks say which tokens are the assistant's; without them it is rendered turn by turn."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UserError, first_line
from ..host.limits import (
    TEMPLATE_BYTES,
    TEMPLATE_GROWTH,
    TEMPLATE_LETTERS,
    TEMPLATE_SECONDS,
    gib,
    memory_limit,
    time_limit,
)
from ..recipe.files import find, text_of
from ..recipe.settings import Settings
from . import template_forms
from .layout import NONE, TEMPLATES, ChatFormat
from .probes import IMAGE_PROBES, PROBES, TOOL, defaulting, own_refuses, stand_in
from .rows import BadRow, Message, Variables
from .thinking import KEEP, SWITCHES, switch
from .turn_by_turn import try_probes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATE = "26 Jul 2024"  # what Llama 3.2's template writes where nothing tells it the date
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class ChatTemplates:
    """How chats are rendered.

    template: "" where there is none, and no_template says why; without generation marks it is rendered turn by turn
    stands_in: the name of the template of ours that is used for the tokenizer's own, or ""
    with_tools, no_with_tools: the same for chats with tools, where a tokenizer has a template of its own for them
    joins: whether prompts and completions are joined as they are, for want of a template
    own: whether chats are rendered as the tokenizer's own template renders them
    """

    template: str
    no_template: UserError | None = None
    stands_in: str = ""
    with_tools: str = ""
    no_with_tools: UserError | None = None
    joins: bool = False
    own: bool = False

    def for_tools(self) -> str:
        """Return the template for chats with tools."""
        return self.with_tools or self.template

    def turn_by_turn(self, tools: object) -> bool:
        """Whether chats with these tools (None: without any) are rendered turn by turn, for want of generation marks."""
        template = self.for_tools() if tools else self.template
        return bool(template) and not _MARK.search(template)

    def error(self, tools: object) -> UserError | None:
        """Return the reason why a chat with these tools (None: without any) has no template, or None where it has one."""
        return self.no_template or (self.no_with_tools if tools else None)


@contextmanager
def bounded_template(memory: bool = True) -> Iterator[None]:
    """Raise UserError where templates take longer to render than any honest one does, or more memory. memory: False where the
    caller has such a limit, for it costs more than a short chat's rendering."""
    try:
        with time_limit(TEMPLATE_SECONDS), memory_limit(TEMPLATE_BYTES) if memory else nullcontext():
            yield
    except (TimeoutError, MemoryError) as error:
        if isinstance(error, TimeoutError):
            what, limit = str(error), "TEMPLATE_SECONDS"
        elif memory:
            what, limit = f"it takes more than {gib(TEMPLATE_BYTES)}", "TEMPLATE_BYTES"
        else:
            raise
        problem = f"{what} to render ({limit} in brigade/train/host/limits.py)"
        cure = "look for loops within loops and products in it, or name another one: chat_template"
        raise UserError("the chat template", problem, cure) from None


def check_length(text: str, *chat: object) -> None:
    """Raise BadRow for a rendered chat that is far longer than what it was made of: tokenising it takes 100 bytes a letter."""
    if len(text) > TEMPLATE_LETTERS and len(text) > TEMPLATE_LETTERS + TEMPLATE_GROWTH * len(repr(chat)):
        problem = f"the chat template writes {len(text):,} letters for a chat that has {len(repr(chat)):,}"
        raise BadRow(problem, "look for loops and products in it, or name another one: chat_template")


@bounded_template()
def load(settings: Settings, tokenizer: "PreTrainedTokenizerBase") -> ChatTemplates:
    """Return the chat templates to use, and the error to raise for a chat that has no usable one.

    The stock templates of Llama 3, Qwen 3 and Gemma 3 have no generation marks, and every label would be masked (trl PR
    #4201): one of ours that renders the same stands in, or else they are rendered turn by turn (turn_by_turn.py), where that
    works. Texts need no template. Raises UserError for a named one that is not there or has no marks, and where thinking says
    what none of them can do.
    """
    templates = _load(settings, tokenizer)
    how, place = settings.recipe.data.thinking, settings.place("thinking")
    if how != "template" and templates.joins:
        raise UserError(
            place, f"thinking is {how}, and there is no chat template", "leave it out, or name a chat_template"
        )
    return _keeping(tokenizer, templates, place) if how == KEEP and not templates.no_template else templates


def _names() -> list[str]:
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


def file_of(settings: Settings) -> Path | None:
    """Return the file that chat_template names; None for one of ours, or none. Raises UserError where it is not there."""
    name, place = settings.recipe.data.chat_template, settings.place("chat_template")
    known = _names()
    if not name or name == NONE or name in known:
        return None
    path = find(name, place, f"chat template (or one of: {', '.join(known)})")
    if not path.is_file():
        raise UserError(place, f"{name!r} is a directory, not a file", "name a .jinja file")
    return path


def _load(settings: Settings, tokenizer: "PreTrainedTokenizerBase") -> ChatTemplates:
    name, place = settings.recipe.data.chat_template, settings.place("chat_template")
    cure = f"set chat_template to one of: {', '.join(_names())}, or to a .jinja file"

    def error(problem: str, also: str = "") -> UserError:
        return UserError(place, problem, cure + also)

    if name == NONE:
        return ChatTemplates("", error("chat_template is none, and the data has chats"), joins=True)
    if not name and not tokenizer.chat_template:
        return ChatTemplates("", error("the tokenizer has no chat template (with generation marks)"), joins=True)
    path = file_of(settings)
    if name and not path:
        return ChatTemplates((TEMPLATES / f"{name}.jinja").read_text())
    if path:
        try:
            template = text_of(path).removeprefix("\ufeff")  # with which some editors begin a file
        except (OSError, UnicodeDecodeError) as why:
            cure = "write it in UTF-8, as a file that you may read"
            raise UserError(place, f"{name!r} cannot be read: {first_line(why)}", cure) from None
        if not _MARK.search(template):
            raise error("the chat template has no {% generation %} marks, so no token would be supervised")
        return ChatTemplates(template)
    own = tokenizer.chat_template
    named = own if isinstance(own, dict) else {"default": own}
    if "default" not in named:
        problem = f"the tokenizer has several chat templates ({', '.join(sorted(named))}) and none is its default"
        return ChatTemplates("", error(problem))
    probes = PROBES + IMAGE_PROBES if settings.recipe.data.images else PROBES
    stem, template, reason = _usable(tokenizer, named["default"], probes)
    none = error(f"the chat template {reason}", f"; {NONE} joins prompts and completions") if reason else None
    if named.get("tool_use", named["default"]) == named["default"]:
        return ChatTemplates(template, none, stem, own=True)
    probes = [probe for probe in probes if probe["tools"]]
    _, with_tools, reason = _usable(tokenizer, named["tool_use"], probes)
    no_tools = error(f"the tokenizer's chat template for tools, tool_use, {reason}") if reason else None
    return ChatTemplates(template, none, stem, with_tools, no_tools, own=True)


def _keeping(tokenizer: "PreTrainedTokenizerBase", templates: ChatTemplates, place: str) -> ChatTemplates:
    """Return templates that keep the thoughts of earlier turns: by default, so that a saved model keeps them when it serves.
    Raises UserError at `place` for those that cannot."""
    if templates.with_tools:
        problem = (
            "thinking is keep, and the tokenizer has several chat templates: only one can be saved that keeps thoughts"
        )
        raise UserError(place, problem, "name a chat_template")

    def render(messages: list[Message], variables: Variables) -> str:
        return str(
            tokenizer.apply_chat_template(messages, chat_template=templates.template, tokenize=False, **variables)
        )

    found = switch(templates.template, render)
    if found is None:
        problem = "thinking is keep, and the chat template leaves out the thoughts of earlier turns: it has none of the switches"
        cure = "leave thinking out (train_on_last_turn_only learns the last turn as it serves), or name another chat_template"
        raise UserError(place, f"{problem} {', '.join(SWITCHES)}", cure)
    if not found:
        return templates
    return replace(templates, template="".join(map(defaulting, found.items())) + templates.template, own=False)


def _usable(tokenizer: "PreTrainedTokenizerBase", own: str, probes: list[Message]) -> tuple[str, str, str]:
    """Return name and text of a template of ours that renders as this one does; ("", itself) where it has marks, or can be
    rendered turn by turn; else "", "" and the reason."""
    if _MARK.search(own):
        return "", own, ""
    stem, template = stand_in(tokenizer, own, probes)
    if template:
        return stem, template, ""
    unmarked = "has no {% generation %} marks, and cannot be rendered turn by turn instead"
    if "strftime_now" in own:  # what is prepared tomorrow, or resumed, would be other data
        if "date_string" not in own:
            return "", "", f"{unmarked}: it writes today's date, and takes no date_string in its place"
        own = defaulting(("date_string", DATE)) + own
    ends, reason = try_probes(tokenizer, own, probes)
    return ("", own, "") if ends else ("", "", f"{unmarked}: {reason}")


@bounded_template()
def chat_format(tokenizer: "PreTrainedTokenizerBase", templates: ChatTemplates) -> ChatFormat:
    """Return what a saved model says about how its chats are written."""
    ends = [stops(tokenizer, template) for template in (templates.template, templates.with_tools) if template]
    turn_by_turn = templates.turn_by_turn(None) or templates.turn_by_turn([TOOL])
    stops_of_all = sorted(set().union(*ends))
    beyond = own_refuses(tokenizer, templates.template) if templates.stands_in else ""
    return ChatFormat(
        templates.template, templates.stands_in, stops_of_all, templates.own, turn_by_turn, own_refuses=beyond
    )


def stops(tokenizer: "PreTrainedTokenizerBase", template: str) -> set[int]:
    """Return the ids of the special tokens that end an assistant's turn in the probes."""
    return _stops(tokenizer, template, PROBES) or _stops(tokenizer, template, IMAGE_PROBES)


def _stops(tokenizer: "PreTrainedTokenizerBase", template: str, probes: list[Message]) -> set[int]:
    if not _MARK.search(template):
        return try_probes(tokenizer, template, probes)[0]
    from transformers.utils.chat_template_utils import render_jinja_template

    # Not all_special_ids: a Llama 3 base model's has no <|eot_id|>, with which our template ends a turn.
    special = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    longest_first = tuple(sorted(special, key=len, reverse=True))  # one may end another
    ends: set[int] = set()
    forms = template_forms.of_tokenizer(tokenizer, template)
    how = {"chat_template": template, "return_assistant_tokens_mask": True, **tokenizer.special_tokens_map}
    for probe in probes:
        with suppress(Exception):  # it refuses a system turn, or tools
            more = {key: probe[key] for key in ("tools", "add_generation_prompt")}
            (text,), (spans,) = render_jinja_template([forms.of(probe["conversation"])], **how, **more)
            check_length(text, probe)
            # Marks that leave out the token behind the last answer: it is learned all the same (marks.py).
            behind = [token for token in longest_first if text.startswith(token, spans[-1][1])]
            for begin, end in spans:  # some templates put a line's end after it
                found = [token for token in longest_first if text[begin:end].rstrip().endswith(token)]
                ends |= {special[token] for token in (found or (behind if end == spans[-1][1] else []))[:1]}
    return ends
