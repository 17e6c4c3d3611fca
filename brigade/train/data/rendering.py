"""Chats as text: rendered through their template, with the assistant's spans, and with what nobody meant as a special token."""

import functools
import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any

from ...errors import UserError
from . import rendered, template_errors, template_forms, thinking, turn_by_turn
from .chat_template import ChatTemplates, bounded_template, check_length
from .images import MARK, ImageSource
from .keys import says_nothing
from .marks import AS_SAMPLE, Marks
from .messages import READ, THOUGHTS
from .probes import TOOL, templates_of_ours, tokens_in
from .rows import BadRow, Chat, Message, Tools
from .samples import Text
from .template_forms import ANSWERED, ASKED, CHAT, Forms
from .words import LeavesOut, Words

ACCOUNTED = READ.union(THOUGHTS)  # keys of messages that are read, or whose words are looked for
_NOTHING: tuple[object, ...] = (None, "", "[]", "{}", "null", [], {})  # that a turn says of tools
HIDDEN = "\ue000"  # of Unicode's private use


class Chats:
    """What renders the chats of a run.

    templates: how chats are rendered; variables: special tokens that templates use; control_tokens: all special tokens
    how: data.thinking; last_turn_only: data.train_on_last_turn_only
    images: the model's processor, where rows may have images
    own_tokens: special tokens that the recipe adds, which are meant wherever a row has them
    added: the tokenizer's tokens that stand in no vocabulary of pieces, for templates that fit it; () looks for none
    """

    def __init__(
        self,
        templates: ChatTemplates,
        variables: dict[str, str],
        control_tokens: set[str],
        how: str = "template",
        last_turn_only: bool = False,
        images: Any = None,
        own_tokens: tuple[str, ...] = (),
        added: Collection[str] = (),
    ) -> None:
        self.added = added
        # of each cure, for its first chat: to try them all takes a second
        self._rendered_by: dict[str, list[str] | None] = {}
        self.templates, self.variables, self.thinking, self.last_turn_only = templates, variables, how, last_turn_only
        self.images, self.own_tokens = images, own_tokens
        self.control_tokens = tuple(sorted(control_tokens, key=len, reverse=True))  # one may begin another
        unmeant = (token for token in self.control_tokens if token not in own_tokens)  # where users write them
        self.control = re.compile("|".join(map(re.escape, unmeant)) or "(?!)")  # of none: matches nothing
        self.turn_by_turn = [templates.turn_by_turn(tools) for tools in (None, [TOOL])]
        self.marks = Marks(self._render, self.control_tokens, TOOL)
        self.words = Words(lambda chat: self._render(chat)[0])

    @property
    def joins(self) -> bool:
        return self.templates.joins

    def render(self, chat: Chat, learned: Sequence[bool] | None = None, images: Sequence[ImageSource] = ()) -> Text:
        """Return a chat as text, with the assistant's spans in characters. Raises BadRow where the template refuses.

        learned: of each turn of the assistant's; None: the chat is a prompt
        images: those whose MARKs stand in the messages; in the text stands what the processor makes of each one's size

        Special tokens that are spelled out in turns other than the assistant's are plain text: a user who writes <|im_end|>
        ends no turn.
        """
        error = self.templates.error(chat.tools)
        if error:
            raise error
        if images and not self.writes_images:
            problem = f"it does not write {self.images.image_token} for an image, once for each"
            cure = "leave chat_template out, so that the model's own is used, or name one that writes it"
            raise UserError("the chat template", problem, cure)
        template = self.templates.for_tools() if chat.tools else self.templates.template
        messages, thoughts = chat.messages, 0
        signs = () if learned is None else rendered.look(messages, self.control, self.around, self.end, self.own_tokens)
        if learned is not None and self.thinking == thinking.CUT:
            messages, thoughts = thinking.cut(messages)
            chat = chat._replace(messages=messages)
        formats = thinking.in_another_format(messages, template, self.thinking, self.own_tokens)
        signs += () if learned is None else tuple(sorted({*formats}))
        if learned is not None and self.thinking == thinking.KEEP:
            thinking.refuse_own_switch(chat.variables)
        try:
            text, spans = self._render(chat)
            said: tuple[str, ...] = ()
            if learned and self.turn_by_turn[bool(chat.tools)]:
                spans = self._turns(text, chat, learned)
            elif learned:
                spans, said = self.marks.check(chat, learned, text, spans)
            other, hidden = self._other(chat, text)
            unread = (*signs, *self._unread(chat, text), *said)
        except (BadRow, UserError, MemoryError):
            raise
        except Exception as error:  # the template refuses the chat, or fails at it
            raise template_errors.explained(error, messages, template, bool(images)) from None
        if learned is not None:
            keeps = self.thinking == thinking.KEEP
            try:
                unread += self.words.account(chat, text, learned, keeps)
            except LeavesOut as error:
                way = error.args[1]
                if way not in self._rendered_by:
                    self._rendered_by[way] = self._who_renders(chat, learned)
                raise error.naming(self._rendered_by[way]) from None
        answers = [message for message in messages if message["role"] == "assistant"]
        asked = self._spelled_out(hidden) - self._spelled_out(answers)
        answered = self._spelled_out([*chat]) - asked  # or special all the same
        if not asked or len(other) != len(text):  # a template that reads the content: nothing says what is whose
            whole = Text(text, spans, rendered=True, counts=(thoughts, answered + asked, 0, 0), unread=unread)
        else:
            plain = tuple(match.span() for match in re.finditer(f"{HIDDEN}+", other))
            counts = (thoughts, answered, asked, 0)
            whole = Text(text, spans, rendered=True, plain=plain, counts=counts, unread=unread)
        return whole if self.images is None else self._with_images(whole, messages, tuple(images))

    def _who_renders(self, chat: Chat, learned: Sequence[bool]) -> list[str] | None:
        """Return the names of the templates of ours that fit the tokenizer and render a chat whole; None where none was tried."""
        if not self.added or self.images is not None:
            return None
        found = []
        for name, template in fitting(self.added, self.variables):
            other = Chats(
                ChatTemplates(template), self.variables, set(self.control_tokens), self.thinking, self.last_turn_only
            )
            with suppress(Exception):  # it refuses the chat, or leaves something out, too
                other.render(chat, learned)
                found.append(name)
        return found

    def _with_images(self, text: Text, messages: list[Message], images: tuple[ImageSource, ...]) -> Text:
        """Return a text in which the processor's expansions stand in place of the template's tokens for images. Raises BadRow
        where there are not as many tokens as images."""
        token = self.images.image_token
        most = getattr(self.images, "most_images", None)
        if most and len(images) > most:
            problem = (
                f"it has {len(images)} images, and this model reads several images of a sample otherwise than here"
            )
            raise BadRow(problem, "divide the row, or drop it")
        meant = [message for message in messages if message["role"] == "assistant" or not text.plain]
        if any(token in message["content"] for message in meant):
            raise BadRow(f"a text spells out {token}, which stands for an image", "remove it from the text")
        places = [match.span() for match in self.control.finditer(text.text) if match[0] == token]
        places = [(a, b) for a, b in places if not any(first < b and a < stop for first, stop in text.plain)]
        if len(places) != len(images):
            problem = f"the chat template writes {len(places):,} times {token}, and the row has {len(images):,} images"
            raise BadRow(problem, "drop the row, or name a chat_template that writes each image once")
        if not images:
            return text
        expansions = tuple(self._expansion(image) for image in images)
        begins = [begin for begin, _ in places]
        grown = [0, *accumulate(len(expansion) - len(token) for expansion in expansions)]

        def moved(span: tuple[int, int]) -> tuple[int, int]:
            begin, end = (at + grown[bisect_left(begins, at)] for at in span)
            return begin, end

        pieces, done = list[str](), 0
        for (begin, end), expansion in zip(places, expansions, strict=True):
            pieces += [text.text[done:begin], expansion]
            done = end
        return replace(
            text,
            text="".join([*pieces, text.text[done:]]),
            spans=[moved(span) for span in text.spans],
            plain=tuple(moved(span) for span in text.plain),
            images=images,
            expansions=expansions,
        )

    def _expansion(self, image: ImageSource) -> str:
        try:
            text: str = self.images.expansion(image.width, image.height)
            return text
        except BadRow as error:
            problem, cure = error.args
            raise BadRow(f"the image {image.path!r}: {problem}" if image.path else problem, cure) from None

    @functools.cached_property
    def around(self) -> tuple[str, str]:
        """What the template writes before a question that is a whole prompt, and behind it, without white space at their ends."""
        with suppress(Exception):
            prompt = self._render(Chat(CHAT[:1]).asking())[0]
            before, _, behind = prompt.partition(ASKED)
            return before.strip(), behind.strip()
        return "", ""

    @functools.cached_property
    def end(self) -> str:
        """The special token that the template writes behind an answer; "" where it writes none."""
        with suppress(Exception):
            behind = self._render(Chat(CHAT))[0].partition(ANSWERED)[2]
            token = self.control.match(behind.lstrip())
            return token[0] if token else ""
        return ""

    @functools.cached_property
    def forms(self) -> list[Forms]:
        """The forms that the templates for chats without and with tools take."""

        def form(tools: Tools | None) -> Forms:
            return template_forms.tried(
                lambda messages: self._rendered(Chat(messages, tools))[0], self.images is not None
            )

        return [form(None), form([TOOL]) if self.templates.error([TOOL]) is None else Forms()]

    @functools.cached_property
    def writes_images(self) -> bool:
        """Whether the template writes the processor's token once for an image: tried on a chat."""
        with suppress(Exception):
            text = self._render(Chat([CHAT[0] | {"content": MARK + ASKED}, CHAT[1]]))[0]
            return text.count(self.images.image_token) == 1 and ASKED in text and ANSWERED in text
        return False

    def _turns(self, text: str, chat: Chat, learned: Sequence[bool]) -> list[tuple[int, int]]:
        """Return the assistant's spans in a chat's text, whose template has no generation marks."""

        def render(messages: list[Message], prompt: bool) -> str:
            return self._render(chat._replace(messages=messages).asking(prompt))[0]

        closing = self.closings[bool(chat.tools)]
        return turn_by_turn.spans(text, chat.messages, learned, render, self.control_tokens, closing)

    @functools.cached_property
    def closings(self) -> list[str]:
        """What closes chats without and with tools, as turn_by_turn.closing_of() says."""

        def closing(tools: Tools | None) -> str:
            return turn_by_turn.closing_of(lambda turns, _: self._render(Chat(turns, tools))[0], self.control_tokens)

        return [closing(None), closing([TOOL])]

    def _unread(self, chat: Chat, text: str) -> tuple[str, ...]:
        """Return the row's variables and the messages' further keys that the template does not read: names that it does not
        have, and keys without which the text is the same."""
        messages, tools, variables = chat
        words = self._names_in_templates[bool(tools)]
        unknown = [name for name, value in variables.items() if name not in words and not says_nothing(value)]
        unread = [f"{name!r} of chat_template_kwargs" for name in unknown]
        further = {key for turn in messages for key in turn if key not in ACCOUNTED and not says_nothing(turn[key])}
        for key in sorted(further):
            without = [{name: value for name, value in turn.items() if name != key} for turn in messages]
            if key not in words or self._render(chat._replace(messages=without))[0] == text:
                if (
                    key in ("tools", "functions")
                    and not tools
                    and any(turn.get(key) not in _NOTHING for turn in messages)
                ):
                    problem = f"the key {key!r} of a turn holds tools, and the chat template does not read it"
                    raise BadRow(problem, "write them into a column of the row: tools")
                unread.append(f"key {key!r} of messages")
        return tuple(unread)

    @functools.cached_property
    def _names_in_templates(self) -> list[set[str]]:
        return [set(re.findall(r"\w+", text)) for text in (self.templates.template, self.templates.for_tools())]

    def _other(self, chat: Chat, text: str) -> tuple[str, Any]:
        """Return (the chat's text with special tokens of the row hidden, each letter in its place; in which parts of the row).

        They stay in tools and variables of a template that writes those in another length then, as Python's repr does.
        """
        hidden = Chat(*map(self._hidden, chat))
        other = self._render(hidden)[0] if hidden != chat else text
        if len(other) == len(text) or hidden[1:] == chat[1:]:
            return other, [*chat]
        return self._render(chat._replace(messages=hidden.messages))[0], chat.messages

    def _hidden(self, value: Any) -> Any:
        """Return what a row has with special tokens in its texts become HIDDEN, which no template knows; the assistant's turns as
        they are."""
        if isinstance(value, str):
            return self.control.sub(lambda match: HIDDEN * len(match[0]), value)
        if isinstance(value, list):
            return [self._hidden(inner) for inner in value]
        if not isinstance(value, dict) or value.get("role") == "assistant":
            return value
        return {self._hidden(key): self._hidden(inner) for key, inner in value.items()}

    def _spelled_out(self, value: Any) -> int:
        """Return how many special tokens the texts within a value spell out, and the keys within it."""
        if isinstance(value, dict):
            value = [*value.keys(), *value.values()]
        if isinstance(value, list):
            return sum(map(self._spelled_out, value))
        return len(self.control.findall(value)) if isinstance(value, str) else 0

    def _render(self, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        """Return a chat as its template writes it, and the spans that it marks."""
        return self._rendered(chat._replace(messages=self.forms[bool(chat.tools)].of(chat.messages)))

    def _rendered(self, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        templates, marked = self.templates, not self.turn_by_turn[bool(chat.tools)]
        with bounded_template(memory=False):
            texts, spans = render_jinja_template(
                [chat.messages],
                tools=chat.tools,
                chat_template=templates.for_tools() if chat.tools else templates.template,
                return_assistant_tokens_mask=marked,
                **self.variables | ({AS_SAMPLE: True} if marked else {}) | chat.variables,
            )
        check_length(texts[0], *chat)
        return texts[0], spans[0] if marked else []


def fitting(added: Collection[str], variables: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield name and text of each template of ours that fits a tokenizer.

    added: the tokenizer's tokens that stand in no vocabulary of pieces; variables: special tokens that templates use
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    for name, template in templates_of_ours().items():
        tokens = set[str]()
        with suppress(Exception):  # it writes a first token, say, and the tokenizer has none
            tokens = tokens_in(render_jinja_template([CHAT], chat_template=template, **variables)[0][0])
        if tokens and tokens <= {*added}:
            yield name, template
