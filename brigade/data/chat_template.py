"""Which chat template a run uses: one with generation marks, for they say which tokens are the assistant's."""

import re
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..flags import Settings
from ..recipe import find

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATES = Path(__file__).with_name("templates")
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")

# What a template of ours must render exactly as the tokenizer's own before it stands in for it: (messages, tools,
# add_generation_prompt). Where it refuses instead, it loses nothing.
TOOL = {"type": "function", "function": {"name": "f", "description": "F.", "parameters": {
    "type": "object", "properties": {"x": {"type": "string", "description": "X."}}, "required": ["x"]}}}  # fmt: skip
PROBES: list[tuple[list[dict[str, str]], list[Any] | None, bool]] = [
    ([{"role": "user", "content": " Hello.\n"}, {"role": "assistant", "content": "Hi!"},
      {"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "Fine."}], None, False),
    ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"},
      {"role": "assistant", "content": "2"}], None, False),
    ([{"role": "user", "content": "Go on"}], None, True),
    ([{"role": "user", "content": "Go on"}], [TOOL], True),
]  # fmt: skip


def load(settings: Settings, tokenizer: "PreTrainedTokenizerBase") -> tuple[str, UserError | None]:
    """The text of the chat template to use, and the error of whoever meets a chat without a usable one.

    The stock templates of Llama 3, Qwen 3 and Gemma 3 have no generation marks, and every label would be masked (trl PR
    #4201): one of ours that renders the same stands in. Texts need no template. Raises UserError for a named one that
    is not there or has no marks.
    """
    name = settings.recipe.data.chat_template
    place = settings.place("chat_template")
    known = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
    error = UserError(place, "the chat template has no {% generation %} marks, so no token would be supervised",
                      f"set chat_template to one of: {', '.join(known)}, or to a .jinja file")  # fmt: skip
    if name in known:
        return (TEMPLATES / f"{name}.jinja").read_text(), None
    if not name:
        template = tokenizer.chat_template or ""
        template = template if _MARK.search(template) else stand_in(tokenizer)
        return template or "", None if template else error
    path = find(name, place, f"chat template (or one of: {', '.join(known)})")
    if not path.is_file():
        raise UserError(place, f"{name!r} is a directory, not a file", "name a .jinja file")
    template = path.read_text()
    if not _MARK.search(template):
        raise error
    return template, None


def stand_in(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """The template of ours that renders the probes as the tokenizer's own does, or None.

    Llama 3.2 and gpt-oss write today's date; ours write a fixed one unless they are given date_string, for data that
    changed overnight could be neither cached nor repeated.
    """
    if not tokenizer.chat_template:
        return None
    wanted = [_render(tokenizer, probe, None) for probe in PROBES]
    dates: list[dict[str, Any]] = [{}, *({"date_string": time.strftime(form)} for form in ("%d %b %Y", "%Y-%m-%d"))]
    for path in sorted(TEMPLATES.glob("*.jinja")):
        template = path.read_text()
        for date in dates:
            found = [_render(tokenizer, probe, template, **date) for probe in PROBES]
            same = all(ours in (theirs, None) for ours, theirs in zip(found, wanted, strict=True))
            if same and found[0] is not None:
                return template
    return None


def _render(tokenizer: "PreTrainedTokenizerBase", probe: Any, template: str | None, **variables: Any) -> str | None:
    messages, tools, prompt = probe
    with suppress(Exception):  # it refuses a system turn, or tools
        return tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False,
                                             add_generation_prompt=prompt, **variables)  # fmt: skip
    return None
