"""Token ids of a text, and the mask that says which are supervised. Runs in the processes that tokenise; imports no torch."""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...errors import UserError, first_line
from ..recipe.objectives import ANSWERS
from . import rendered
from .chat_template import ChatTemplates, bounded_template
from .encoded import BAD, CUT, EMPTY, SAMPLE, SPLIT, WHOLE, Encoded, entry
from .image_tokens import ImageTokens
from .images import NO_RULES, ImageProcessor, ImageReader, ImageRules, ImageSource, folder_of_images
from .keys import Columns, names_of
from .kinds import KINDS
from .order import NO_ANSWER
from .rendering import Chats
from .rows import BadRow, Chat, Chunk, Message, bounded
from .samples import Text

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer


@dataclass(frozen=True)
class Encoder:
    """How rows become tokens; picklable.

    tokenizer: JSON of a Rust tokenizer; templates: how chats are rendered; variables: special tokens that templates use;
    end: the token id that closes a text or a completion; rows: what a row holds, ANSWERS, PAIRS or JUDGED
    images: the model's processor, where rows may have images; image_rules: what the recipe says of them
    own_tokens: those that the recipe adds, which are meant wherever a row has them
    """

    tokenizer: str
    templates: ChatTemplates
    variables: dict[str, str]
    end: int | None
    max_length: int
    truncation: bool
    skip_bad_rows: bool = False
    train_on_last_turn_only: bool = False
    thinking: str = "template"
    rows: str = ANSWERS
    images: ImageProcessor | None = None
    image_rules: ImageRules = NO_RULES
    own_tokens: tuple[str, ...] = ()


ENDLESS = "the tokenizer has no token that ends a text (eos_token), so the model would never learn to stop"


class LoadedEncoder:
    """An Encoder with its tokenizer and template loaded."""

    def __init__(self, encoder: Encoder) -> None:
        from tokenizers import Tokenizer

        self.encoder, self.kind = encoder, KINDS[encoder.rows]
        self.tokenizer = Tokenizer.from_str(encoder.tokenizer)
        special = {number: t.content for number, t in self.tokenizer.get_added_tokens_decoder().items() if t.special}
        last_only, images = encoder.train_on_last_turn_only, encoder.images
        if images is not None:  # what the model reads as an image is never a user's text
            written = self.tokenizer.token_to_id(images.image_token)
            if written is None:
                problem = f"the model's processor writes {images.image_token} for an image, and it has no such token"
                raise UserError("the tokenizer", problem, "name the model's own: leave tokenizer_name_or_path out")
            for number in (images.image_token_id, written):
                special[number] = str(self.tokenizer.id_to_token(number))
        self.special, tokens = set(special), set(special.values())
        how, own = encoder.thinking, encoder.own_tokens
        self.chats = Chats(encoder.templates, encoder.variables, tokens, how, last_only, images, own, self.added)
        self.image_tokens = None if images is None else ImageTokens(images, self.tokenizer, self.special)

    def prompt(self, messages: list[Message], images: Sequence[ImageSource] = ()) -> list[int]:
        """Return the token ids of a chat up to where the assistant's next answer begins, as in a sample. Raises BadRow where the
        template refuses the chat. images: those whose images.MARK stands in the messages"""
        with bounded_template():
            text = self.chats.render(Chat(messages).asking(), images=images)
        with no_panic("the question"):
            return next(iter(self._ids([text])))[0].tolist()

    def beginning(self, text: str) -> list[int]:
        """Return the token ids of a text that goes on: those of a sample without a chat template, except for its end."""
        with no_panic("the question"):
            ids = self.tokenizer.encode(text, add_special_tokens=True).ids
        ids = ids[self._once(ids)]
        return ids[:-1] if len(ids) > 1 and ids[-1] == self.encoder.end else ids

    def encode(self, chunk: Chunk, columns: Columns, folder: str | None = None) -> Encoded:
        """Return all samples of a chunk, and which of its rows cannot be used. folder: Source.image_folder"""
        reader = None
        if self.encoder.images is not None:
            reader = ImageReader(self.encoder.image_rules, folder_of_images(folder, chunk.where.source))
        rows, absent = list[tuple[int, tuple[Text, ...] | BadRow | None]](), names_of(columns)
        with bounded(lambda: chunk.where.place(rows[-1][0] + 1 if rows else 0)):
            for number, row in chunk.rows():
                rows.append((number, self._texts(row, columns, reader)))
                absent = absent.difference(row) if absent and isinstance(row, dict) else absent
        encodings = iter(self._encodings(rows, chunk))
        longest = self.encoder.max_length
        tokens, masks = [np.zeros(0, np.int32)], [np.zeros(0, bool)]
        samples: list[tuple[float, ...]] = []
        images: list[tuple[ImageSource, ...]] = []
        dropped: list[tuple[int, int, int]] = []
        bad: list[tuple[int, BadRow]] = []
        unread: dict[tuple[str, ...], int] = {(): 0}
        for number, texts in rows:
            parts = [next(encodings) for _ in texts] if isinstance(texts, tuple) else []
            texts = self._refusal(texts, parts) or texts
            if isinstance(texts, BadRow):
                bad.append((number, texts))
            if not isinstance(texts, tuple):
                dropped.append((len(samples), BAD if texts else EMPTY, 0))
                continue
            for text, (ids, mask) in zip(texts, parts, strict=True):
                fate = WHOLE if len(ids) <= longest else SPLIT if text.splits else CUT
                counts = (*text.counts, unread.setdefault(text.unread, len(unread)))
                if text is not texts[0]:  # what was counted of the first answer's prompt is the same
                    counts = (*text.counts[:2], 0, 0, 0)
                room, pictures = longest, text.images
                if self.image_tokens:
                    room, pictures = self.image_tokens.cut(text, ids, mask, longest)
                for begin in range(0, len(ids), longest) if text.splits else (0,):
                    part, own = ids[begin : begin + room], mask[begin : begin + room]
                    own[:1] = False  # nothing comes before it that could predict it
                    if own.any():
                        tokens.append(part)
                        masks.append(own)
                        how = WHOLE if begin else fate, number, counts, text.desirable
                        samples.append(entry(part, own, *how, pictures, text.weight))
                        images.append(pictures)
                        counts = (0,) * len(counts)
                    elif begin == 0:
                        needs = 2 + int(mask[1:].argmax()) if mask[1:].any() else 0
                        dropped.append((len(samples), fate, needs))
        return Encoded(
            np.concatenate(tokens),
            np.concatenate(masks),
            np.array(samples, SAMPLE),
            np.array(dropped, np.int64).reshape(-1, 3),
            rows[-1][0] + 1 if rows else 0,
            chunk.size,
            chunk.after,
            chunk.where,
            bad,
            list(unread),
            frozenset(absent),
            images if self.image_tokens else [],
        )

    def _refusal(
        self, texts: "tuple[Text, ...] | BadRow | None", parts: list[tuple[np.ndarray, np.ndarray]]
    ) -> BadRow | None:
        """Return why token ids and masks of a row cannot be used; None where they can."""
        if self.image_tokens:
            for text, part in zip(texts if isinstance(texts, tuple) else (), parts, strict=True):
                refusal = self.image_tokens.refusal(text, *part)
                if refusal:
                    return refusal
        longest = max((len(ids) for ids, _ in parts), default=0)
        if longest > self.encoder.max_length and not self.encoder.truncation:
            problem = f"{longest:,} tokens, but max_length is {self.encoder.max_length:,} and truncation is off"
            return BadRow(problem, "raise max_length, drop the row, or set truncation: true")
        return self.kind.refusal(parts, self.encoder.max_length) if parts else None

    def _texts(self, row: object, columns: Columns, reader: ImageReader | None) -> tuple[Text, ...] | BadRow | None:
        """Return the texts of a row: one, or two of a pair."""
        if isinstance(row, BadRow):
            return row
        try:
            texts = tuple(map(self._checked, self.kind.texts(row, columns, self.chats, reader)))
            return texts if any(text.rendered or text.spans for text in texts) else None
        except BadRow as error:
            return error
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])[1:-1]
            whose = "the row" if half in ascii(row) else "what the chat template writes of the row"
            return BadRow(
                f"{whose} has half a surrogate pair ({half}), which is no character", f"fix {whose}, or drop it"
            )

    def _checked(self, text: Text) -> Text:
        """Return a text with a count of the control tokens that it spells out. Raises BadRow and UnicodeEncodeError."""
        text.text.encode()
        if text.rendered:
            return text
        if self.encoder.end is None:
            raise BadRow(ENDLESS, 'write "eos_token": "..." into its tokenizer_config.json, or name another')
        sign = rendered.learned_whole(text.text, self.added)
        marks = () if sign is None else (sign.counted("texts"),)
        counts = (0, len(self.chats.control.findall(text.text)), *text.counts[2:])
        text = self._trimmed(text)
        learned = "".join(text.text[begin:end] for begin, end in text.spans)
        if rendered.says_nothing(learned, itertools.chain.from_iterable(self.own_words)):
            if not text.splits:
                raise BadRow("the answer is nothing but special tokens, so it would teach to say nothing", NO_ANSWER)
            text = replace(text, spans=[])  # as good as an empty text
        return replace(text, counts=counts, unread=text.unread + marks)

    def _trimmed(self, text: Text) -> Text:
        """Return a text without the white space around a first and an end token of its own, as chat templates write behind it."""
        whole, (first, end) = text.text, self.own_words
        front, behind = len(whole) - len(whole.lstrip()), len(whole.rstrip())
        front = front if front and whole.startswith(first, front) else 0
        behind = behind if whole.endswith(end, 0, behind) else len(whole)
        if (front, behind) == (0, len(whole)):
            return text
        spans = [(max(begin - front, 0), min(stop, behind) - front) for begin, stop in text.spans]
        return replace(text, text=whole[front:behind], spans=spans)

    @functools.cached_property
    def added(self) -> list[str]:
        """The tokens that stand in no vocabulary of pieces, special or not: whoever spells one out means it."""
        return [token.content for token in self.tokenizer.get_added_tokens_decoder().values()]

    @functools.cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """The token ids that the tokenizer adds before a text and after it."""
        bare = self.tokenizer.encode("a", add_special_tokens=True)
        own = [place for place, added in enumerate(bare.special_tokens_mask) if not added] or [len(bare.ids)]
        return bare.ids[: own[0]], bare.ids[own[-1] + 1 :]

    @functools.cached_property
    def own_words(self) -> list[tuple[str, ...]]:
        """The token that the tokenizer adds before a text, and the one that ends a text; () where there is none."""
        ends = [] if self.encoder.end is None else [self.encoder.end]
        return [tuple(map(str, map(self.tokenizer.id_to_token, ids))) for ids in (self.around[0][:1], ends)]

    def _encodings(
        self, rows: list[tuple[int, tuple[Text, ...] | BadRow | None]], chunk: Chunk
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the _ids of all texts of rows. Raises UserError at the first row at which the tokenizer fails."""
        given = [(number, texts) for number, texts in rows if isinstance(texts, tuple)]
        try:
            with no_panic(chunk.where.place(0)):
                return list(self._ids([text for _, texts in given for text in texts]))
        except UserError:
            for number, texts in given:
                with no_panic(chunk.where.place(number)):
                    list(self._ids(list(texts)))
            raise

    def _ids(self, texts: list[Text]) -> Iterable[tuple[np.ndarray, np.ndarray]]:
        """Yield the token ids (int32) of each text, and which of them are supervised (bool)."""
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
            if text.plain:
                ids, mask = self._spelled_out(text, encoding, ids, mask)
            if not text.rendered:
                own = self._once(encoding.ids)
                ids, mask = ids[own], mask[own]
            if not text.rendered and end is not None:
                if not len(ids) or ids[-1] != end:
                    ids, mask = np.append(ids, np.int32(end)), np.append(mask, True)
                mask[-1] = True  # also where the tokenizer wrote it
            yield ids, mask

    def _once(self, ids: list[int]) -> slice:
        """Return which token ids of a text stay: not those that the tokenizer adds where the text has them itself."""
        front, behind = self.around
        twice = len(front) > 0 and ids[: 2 * len(front)] == front * 2
        ends_twice = len(behind) > 0 and ids[-2 * len(behind) :] == behind * 2
        return slice(len(front) * twice, len(ids) - len(behind) * ends_twice)

    def _spelled_out(
        self, text: Text, encoding: "Encoding", ids: np.ndarray, mask: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and mask where special tokens within `text.plain` are the tokens of their letters."""
        parts, masks = [], []
        for token, own, (begin, end) in zip(ids, mask, encoding.offsets, strict=True):
            pieces = [token]
            if int(token) in self.special and any(begin < stop and first < end for first, stop in text.plain):
                pieces = self.letters.encode(text.text[begin:end], add_special_tokens=False).ids
            parts += pieces
            masks += [own] * len(pieces)
        return np.array(parts, dtype=np.int32), np.array(masks, dtype=bool)

    @functools.cached_property
    def letters(self) -> "Tokenizer":
        """The tokenizer in a form that reads no text as a special token."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.encoder.tokenizer)
        tokenizer.encode_special_tokens = True
        return tokenizer


@contextmanager
def no_panic(place: str) -> Iterator[None]:
    """Raise UserError at `place` where the Rust library of tokenizers panics, as its patterns do that backtrack too far. PyO3
    raises a BaseException then, whose class no module has."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        cure = "look at that text, or name another tokenizer: tokenizer_name_or_path"
        raise UserError(place, f"the tokenizer fails at it: {first_line(error)}", cure) from None


def _tokens_of(encoding: "Encoding", begin: int, stop: int) -> slice:
    """Return the tokens of characters [begin, stop). A token that began before them, at a blank for instance, belongs to them:
    whoever writes them writes that token."""
    tokens = map(encoding.char_to_token, range(begin, stop))
    from_the_end = map(encoding.char_to_token, range(stop - 1, begin - 1, -1))
    first = next((token for token in tokens if token is not None), None)
    last = next((token for token in from_the_end if token is not None), None)
    if first is None or last is None:
        return slice(0, 0)
    # Bytes of one character are several tokens with the same characters: char_to_token names the first of them.
    own = encoding.token_to_chars(last)
    while last + 1 < len(encoding) and encoding.token_to_chars(last + 1) == own is not None:
        last += 1
    return slice(first, last + 1)
