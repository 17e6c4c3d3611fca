"""`python -m brigade chat OUTPUT`: talk in the terminal to the model that a run trained."""

import argparse
import contextlib
import functools
import io
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..errors.console import counted, printable
from ..errors.flags import add_flags
from ..errors.tables import table
from ..train.checkpoint import saved_weights
from ..train.data import chat_template
from ..train.data.encode import LoadedEncoder
from ..train.data.images import ImageReader, ImageSource
from ..train.data.rows import BadRow
from ..train.recipe import flags, remote_code
from ..train.recipe.method import method_name
from ..train.recipe.objectives import objective_of
from ..train.recipe.settings import Settings
from .answer import Answering
from .conversation import Conversation

NEW, QUIT, IMAGE = "/new", "/quit", "/image"
COMMANDS = f"{NEW} forgets the conversation, {QUIT} or Ctrl-D ends it, Ctrl-C stops an answer."
OF_IMAGES = f" {IMAGE} FILE: the next question is about this image."
NO_IMAGES = " It takes no picture, for this run trained it on texts (data.images is false)."
TRAINED, BASE = "trained", "base"
ENDLESS = 2**31  # positions of a model that names no limit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add_flags(parser, table(Path(__file__).with_suffix(".yaml")))
    parser.add_argument(remote_code.FLAG, action="store_true", help=remote_code.HELP)


def run(options: argparse.Namespace) -> int:
    """Answer questions until there are none. Returns 0, or 1 where one could not be answered."""
    saved_weights.check_run(options.output)
    settings = flags.of_run(options.output, options.trust_remote_code)
    source = saved_weights.find(options.output, options.step)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no letter
    asks = not options.question and sys.stdin is not None and sys.stdin.isatty()  # None: closed
    with ExitStack() as held:
        with contextlib.redirect_stdout(sys.stderr):  # standard output holds answers
            chat = load(settings, options, source, asks, held)
        if asks:
            about = _about(settings, options.output, source)
            _tell(f"{options.output}: {about}, on {chat.answering.device}. {COMMANDS}{chat.about_images}")
        if not chat.speakers[0].conversation.has_turns:
            _tell("The run has no chat template, so your text is continued, and each line by itself.")
        if not asks:
            return 0 if chat.answer_all(options.question or sys.stdin or ()) else 1
        try:
            chat.answer_all(_typed())
        except (EOFError, KeyboardInterrupt):
            _tell("")  # so that the shell's prompt begins a line
        return 0


@dataclass(frozen=True)
class Speaker:
    """One side of a conversation. model: opens the model that answers (adapters may have to be switched off meanwhile)"""

    name: str
    model: Callable[[], AbstractContextManager[Any]]
    conversation: Conversation


@dataclass(frozen=True)
class Chat:
    """The trained model, and beside it the base under --compare. Each goes on with its own answers.

    echo: whether questions are shown as they are answered, for nobody typed them here
    reader: of images, where the model was trained on some; images: those that the next question is about
    about_images: what a user of a model with a vision tower is told
    """

    answering: Answering
    speakers: list[Speaker]
    echo: bool
    reader: ImageReader | None = None
    images: list[ImageSource] = field(default_factory=list)
    about_images: str = ""

    def answer_all(self, questions: Iterable[str]) -> bool:
        """Answer questions, and obey commands, until there are none or one says so. Returns whether all could be answered."""
        fine = True
        for line in questions:
            question = _letters(line.strip())
            if question == QUIT:
                break
            if question == NEW:
                for speaker in self.speakers:
                    speaker.conversation.forget()
                self.images.clear()
                _tell("The conversation begins anew.")
            elif question.partition(" ")[0] == IMAGE:
                fine &= self._take(question.partition(" ")[2].strip())
            elif question:
                if self.echo:
                    _tell(f"> {question}")
                fine &= self._answer(question)
        return fine

    def _take(self, file: str) -> bool:
        try:
            self.images.append(read_image(self.reader, file, IMAGE))
        except UserError as error:
            print(error, file=sys.stderr, flush=True)
            return False
        return True

    def _answer(self, question: str) -> bool:
        images = tuple(self.images)
        self.images.clear()
        for speaker in self.speakers:
            label = f"{speaker.name}: " if len(self.speakers) > 1 else ""
            conversation = speaker.conversation
            try:
                prompt, dropped = conversation.prompt(question, images)
            except UserError as error:
                print(error, file=sys.stderr, flush=True)
                return False
            if dropped:
                turns = f"the oldest {counted(dropped, 'turn')} of the conversation {'is' if dropped == 1 else 'are'} forgotten"
                _tell(f"({label}{turns}: the model has positions for {conversation.positions:,} tokens)")
            _show(label)
            with speaker.model() as model:
                shown = conversation.images(images)
                answer = self.answering.answer(model, prompt, conversation.positions, _show, shown)
            _show("\n")
            if answer.stopped:
                _tell("(stopped)")
            if answer.cut:
                _tell("(cut: the tokens that it may have, --max_new_tokens, are used up)")
            conversation.add(question, answer.text, images)
        return True


def _letters(text: str) -> str:
    """Return an argument or a line with a question mark for each byte that is no letter: no tokenizer takes those."""
    return text.encode(errors="replace").decode()


def load(settings: Settings, options: argparse.Namespace, source: Path, asks: bool, held: ExitStack) -> Chat:
    """Load the model whose weights are in `source`, and the base if it is to answer, too.

    asks: whether questions are typed at a terminal; held: what has to stay open while the models answer

    Raises UserError where something is damaged, or a system message is given and there is no template for it.
    """
    import torch
    from transformers.utils import logging

    from ..train.checkpoint import reading
    from ..train.data.tokenise import encoder_of
    from ..train.model.images.load import load as load_processor
    from ..train.model.load_trained import loading_from_run, untrained
    from ..train.model.location import load_config
    from ..train.model.tokenizer import saved_tokenizer
    from ..train.step import sample_answers

    warnings.filterwarnings("ignore", category=FutureWarning)  # of libraries among themselves
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if objective_of(settings.recipe.training).scores:
        cure = "python -m brigade eval shows its scores of held-out pairs"
        raise UserError(str(options.output), "a reward model scores answers, and gives none", cure)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = load_config(settings)
    with loading_from_run(source):
        tokenizer = saved_tokenizer(settings, config, source, options.output)
        processor = load_processor(settings, tokenizer, config, str(options.output))
        encoder = LoadedEncoder(encoder_of(settings, tokenizer, processor))
        model = reading.read_model(settings, config, source).eval().to(device)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or ENDLESS
    begin = functools.partial(Conversation, encoder, positions, options.max_new_tokens, _letters(options.system))
    speakers = [Speaker(TRAINED, lambda: nullcontext(model), begin())]
    if options.system and not speakers[0].conversation.has_turns:
        problem = "the run has no chat template, and without one there are no messages"
        raise UserError("flag --system", problem, "leave it out, or begin your text with it")
    if options.compare:
        base: Callable[[], AbstractContextManager[Any]] = functools.partial(untrained, settings, model, device)
        if not settings.recipe.model.use_peft:  # loaded once, and not for each answer
            base = functools.partial(nullcontext, held.enter_context(base()))
        speakers.append(Speaker(BASE, base, begin()))
    ends = sample_answers.stops(model, tokenizer, [])
    if speakers[0].conversation.has_turns:
        ends |= set(chat_template.chat_format(tokenizer, encoder.encoder.templates).stops)
    answering = Answering(
        tokenizer,
        ends,
        device,
        options.max_new_tokens,
        options.temperature,
        speakers[0].conversation.opening(),
        stoppable=asks,
        processor=processor,
    )
    reader = ImageReader(encoder.encoder.image_rules, Path.cwd()) if processor else None
    if options.image and not (reader and speakers[0].conversation.has_turns):
        raise UserError("flag --image", "the run was trained on texts", "leave it out, or name a run with data.images")
    images = [read_image(reader, file, "flag --image") for file in options.image]
    about_images = OF_IMAGES if reader else NO_IMAGES if getattr(config, "vision_config", None) is not None else ""
    return Chat(answering, speakers, echo=not asks, reader=reader, images=images, about_images=about_images)


def read_image(reader: ImageReader | None, file: str, place: str) -> ImageSource:
    """Return an image that is named at `place`. Raises UserError for one that cannot be read."""
    if reader is None:
        raise UserError(place, "the run was trained on texts", "leave it out, or name a run with data.images")
    try:
        return reader.read(file)
    except BadRow as error:
        raise UserError(place, str(error.args[0]), "name an image file that can be opened") from None


def _about(settings: Settings, output: Path, source: Path) -> str:
    section = settings.recipe.model
    where = f", from {source.name}" if source != output else ""
    return f"{section.model_name_or_path} after {method_name(section)}{where}"


def _typed() -> Iterator[str]:
    """Yield the lines that are typed at the terminal."""
    with suppress(ImportError):  # a Python without it: then no line is edited or called back
        import readline  # noqa: F401
    while True:
        yield input("> " if sys.stdout.isatty() else "")  # a file gets the answers


def _show(text: str) -> None:
    """Show a piece of an answer; what a terminal would obey is left out."""
    print(printable(text), end="", flush=True)


def _tell(text: str) -> None:
    """Say what is no answer."""
    print(printable(text), file=sys.stderr, flush=True)
