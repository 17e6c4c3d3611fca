"""Text to token ids and a mask of the supervised ones. Runs in the processes that tokenise; imports no torch."""

import functools
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import UserError
from .chat_template import TOOL
from .rows import Chunk
from .samples import BadRow, Text, at, convert


@dataclass(frozen=True)
class Encoder:
    """How rows become tokens; picklable.

    tokenizer: JSON of a Rust tokenizer; template: with generation marks, or "" and why there is none; variables: special
    tokens that templates use; end: the token id that closes a text or a completion; stands_in: which template of ours
    this is where the tokenizer's own has no marks
    """

    tokenizer: str
    template: str
    no_template: UserError | None
    variables: dict[str, str]
    end: int | None
    max_length: int
    truncation: bool
    stands_in: str = ""


# What became of a row: longer than max_length, it is cut off there, or in several samples; of white space alone, it is skipped.
WHOLE, CUT, SPLIT, EMPTY = range(4)


@dataclass
class Encoded:
    """Samples laid end to end.

    tokens: int32, all samples; supervised: bool, likewise; lengths: int64, one a sample; fates: int8, one a sample, of
    several from one text the first says SPLIT
    dropped: int64 (rows, 2), of each row that is EMPTY or without a supervised token within max_length how many samples stand
    before it, and its fate; of: int64, which of the chunk's rows each sample is of; rows: all of the chunk; size, after: its own
    """

    tokens: np.ndarray
    supervised: np.ndarray
    lengths: np.ndarray
    fates: np.ndarray
    dropped: np.ndarray
    of: np.ndarray
    size: int = 0
    rows: int = 0
    after: Any = None

    def behind(self, row: int) -> "Encoded":
        """The samples of this and later rows of the chunk."""
        first = int(np.searchsorted(self.of, row))
        token = int(self.lengths[:first].sum())
        dropped = self.dropped[self.dropped[:, 0] >= first] - [first, 0]
        return replace(self, tokens=self.tokens[token:], supervised=self.supervised[token:], dropped=dropped,
                       lengths=self.lengths[first:], fates=self.fates[first:], of=self.of[first:])  # fmt: skip


class Machine:
    """An Encoder with its tokenizer and template loaded."""

    def __init__(self, encoder: Encoder) -> None:
        from tokenizers import Tokenizer

        self.encoder = encoder
        self.tokenizer = Tokenizer.from_str(encoder.tokenizer)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> tuple[str, list[tuple[int, int]]]:
        """A chat as text, with the assistant's spans in characters. Raises BadRow where the template refuses."""
        from jinja2.exceptions import TemplateError, TemplateSyntaxError

        if self.encoder.no_template:
            raise self.encoder.no_template
        for name, given in ("tools", tools), ("tool_calls", any(message.get("tool_calls") for message in messages)):
            if given and name in self.leaves_out:
                raise BadRow(f"it has {name}, and the chat template leaves them out",
                             "name a chat_template that renders them, or remove them from the data")  # fmt: skip
        try:
            return self._render(messages, tools)
        except TemplateError as error:  # its syntax, or a chat that it refuses
            line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            raise BadRow(f"the chat template{line}: {error} (a chat that begins {str(messages)[:80]})",
                         "mend the template or the chat") from None  # fmt: skip

    def _render(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template([messages], tools=tools, chat_template=self.encoder.template,
                                             return_assistant_tokens_mask=True, **self.encoder.variables)  # fmt: skip
        return texts[0], spans[0]

    @functools.cached_property
    def leaves_out(self) -> set[str]:
        """Of tools and tool_calls, what the template drops without a word, tried on a chat. One that it refuses it reads."""
        call = {"id": "a12345678", "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
        plain: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        calling = [plain[0], plain[1] | {"tool_calls": [call]}]
        found = set()
        with suppress(Exception):
            found |= {"tools"} if self._render(plain, [TOOL]) == self._render(plain, None) else set()
        with suppress(Exception):
            found |= {"tool_calls"} if self._render(calling, None) == self._render(plain, None) else set()
        return found

    def encode(self, chunk: Chunk, columns: dict[str, str]) -> Encoded:
        """All samples of a chunk. Raises UserError at the place of the first bad row."""
        numbers, texts = [], []
        for number, row in chunk.rows():
            try:
                texts.append(convert(row, columns, self.render))
            except BadRow as error:
                raise at(chunk.place(number), error) from None
            numbers.append(number)
        try:
            return self._tokenise(texts, size=chunk.size, rows=len(texts), after=chunk.after)
        except _TooLong as error:
            index, length = error.args
            problem = f"{length:,} tokens, but max_length is {self.encoder.max_length:,} and truncation is off"
            cure = "raise max_length, drop the row, or set truncation: true"
            raise UserError(chunk.place(numbers[index]), problem, cure) from None
        except TypeError:
            index = next((i for i, text in enumerate(texts) if text and not _encodable(text.text)), -1)
            if index < 0:
                raise
            problem = r"half a surrogate pair (\ud800 to \udfff), which is no character"
            raise UserError(chunk.place(numbers[index]), problem, "mend or drop the row") from None

    def _tokenise(self, texts: list[Text | None], **about: Any) -> Encoded:
        longest = self.encoder.max_length
        fates: list[int] = []
        dropped: list[tuple[int, int]] = []
        tokens: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        of: list[int] = []
        encoded = iter(self._ids([text for text in texts if text]))
        for index, text in enumerate(texts):
            if text is None:
                dropped.append((len(tokens), EMPTY))
                continue
            ids, mask = next(encoded)
            fate = WHOLE if len(ids) <= longest else SPLIT if text.splits else CUT
            if fate and not self.encoder.truncation:
                raise _TooLong(index, len(ids))
            for begin in range(0, len(ids), longest) if text.splits else (0,):
                part, own = ids[begin : begin + longest], mask[begin : begin + longest]
                if len(own):
                    own[0] = False  # nothing comes before it that could predict it
                if own.any():
                    tokens.append(part)
                    masks.append(own)
                    fates.append(WHOLE if begin else fate)
                    of.append(index)
                elif begin == 0:
                    dropped.append((len(tokens), fate))
        lengths = np.array([len(part) for part in tokens], dtype=np.int64)
        nothing = np.zeros(0)
        return Encoded(
            np.concatenate([nothing, *tokens]).astype(np.int32) if not tokens else np.concatenate(tokens),
            np.concatenate([nothing, *masks]).astype(bool) if not masks else np.concatenate(masks),
            lengths,
            np.array(fates, dtype=np.int8),
            np.array(dropped, dtype=np.int64).reshape(-1, 2),
            np.array(of, dtype=np.int64),
            **about,
        )

    def _ids(self, texts: list[Text]) -> Iterable[tuple[np.ndarray, np.ndarray]]:
        """Token ids (int32) of each text and which of them are supervised."""
        rendered = [text.text for text in texts if text.rendered]
        others = [text.text for text in texts if not text.rendered]
        # A template writes its own special tokens; to other texts the tokenizer adds what it adds (a first token).
        encodings = iter(self.tokenizer.encode_batch(rendered, add_special_tokens=False) if rendered else ())
        plain = iter(self.tokenizer.encode_batch(others, add_special_tokens=True) if others else ())
        end = self.encoder.end
        for text in texts:
            encoding = next(encodings if text.rendered else plain)
            ids = np.array(encoding.ids, dtype=np.int32)
            mask = np.zeros(len(ids), dtype=bool)
            for begin, stop in text.spans:
                mask[_tokens_of(encoding, begin, stop)] = True
            if not text.rendered and end is not None:
                if not len(ids) or ids[-1] != end:
                    ids, mask = np.append(ids, np.int32(end)), np.append(mask, True)
                mask[-1] = True  # also where the tokenizer wrote it
            yield ids, mask


class _TooLong(Exception):
    """(index of the text, its length in tokens)"""


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _tokens_of(encoding: Any, begin: int, stop: int) -> slice:
    """The tokens of characters [begin, stop). One that began before them, at a blank say, is the first of them: to write
    what follows is to write that token."""
    first = next((t for c in range(begin, stop) if (t := encoding.char_to_token(c)) is not None), None)
    last = next((t for c in range(stop - 1, begin - 1, -1) if (t := encoding.char_to_token(c)) is not None), None)
    if first is None or last is None:
        return slice(0, 0)
    # Bytes of one character are several tokens with the same characters: char_to_token names the first of them.
    own = encoding.token_to_chars(last)
    while last + 1 < len(encoding) and encoding.token_to_chars(last + 1) == own is not None:
        last += 1
    return slice(first, last + 1)
