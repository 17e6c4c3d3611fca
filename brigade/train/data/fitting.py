"""Which chat templates of ours fit a tokenizer: those that write markers of turns which it has as tokens, and no others."""

import re
from collections.abc import Collection, Iterator
from contextlib import suppress

from .layout import TEMPLATES
from .template_forms import ANSWERED, ASKED

_MARKER = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")
_CHAT = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}]


def fitting(added: Collection[str], variables: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield name and text of each template of ours that fits a tokenizer.

    added: the tokenizer's tokens that stand in no vocabulary of pieces; variables: special tokens that templates use
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    for path in sorted(TEMPLATES.glob("*.jinja")):
        template, markers = path.read_text(encoding="utf-8"), set[str]()
        with suppress(Exception):  # it writes a first token, say, and the tokenizer has none
            markers = set(_MARKER.findall(render_jinja_template([_CHAT], chat_template=template, **variables)[0][0]))
        if markers and markers <= {*added}:
            yield path.stem, template
