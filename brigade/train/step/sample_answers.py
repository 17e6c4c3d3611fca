"""What the model answers to held-out questions: greedily generated on all ranks together, shown, and kept in a file."""

from __future__ import annotations

import base64
import io
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...errors.console import OF_LOGS, console
from ...errors.disk import exists
from ..data.collate import on_device
from ..data.images import ImageSource
from ..data.store import IGNORED, TokenSequence
from ..distributed import heartbeat, ranks
from ..distributed.process import this_process
from ..host import files
from ..recipe.objectives import SCORE
from ..run.directory import ANSWERS
from . import answer_scores

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..model.images.processor import Processor
    from .context import TrainingContext

LONGEST = 64  # new tokens
TOGETHER = 27  # questions that `brigade eval` has answered at once
SHOWN = 8  # answers of an evaluation in the log; all are kept
THUMBNAIL = 128  # pixels


@dataclass(frozen=True)
class Question:
    """Token ids of a held-out sample up to its first supervised token, and of the supervised ones that follow; of a pair the
    better answer's. images: those of the prompt, in order"""

    source: str
    prompt: list[int]
    reference: list[int]
    images: tuple[ImageSource, ...] = ()


Record = dict[str, Any]  # a line of a JSON file


def ask(trainer: TrainingContext) -> dict[str, float]:
    """Let the model answer unless it is untrained, and show and keep what it said. Return what the recipe's answer_score says of
    it, as it is logged: the mean score, the number of answers, and the seconds that they took. A collective."""
    settings, tokenizer, began = trainer.run.settings, trainer.processing_class, time.perf_counter()
    questions = choose(trainer.data.heldout, settings.recipe.training.eval_answers)
    references, scored = [asked.reference for asked in questions], settings.recipe.training.answer_score
    if scored:
        answer_scores.check_references(settings, answer_scores.texts(tokenizer, references))
    if not trainer.state.global_step:
        return {}
    trainer.model_wrapped.eval()
    given = trainer.answers(questions, longest_scored(questions) if scored else LONGEST)
    trainer.model_wrapped.train()
    figures = {}
    if scored:
        score = answer_scores.mean(answer_scores.score_of(settings), tokenizer, references, given)
        score = ranks.gather_all(score)[0]  # a function of the user's may draw random numbers
        figures = {SCORE: score, "eval_answers": len(questions), "eval_answers_runtime": time.perf_counter() - began}
    if trainer.run.world.is_main_rank:
        kept = entries(trainer.processing_class, questions, given, trainer.state.global_step, trainer.data.images)
        trainer.run.check_directory()
        store(kept, trainer.run.directory)
        show(kept[:SHOWN])
        for callback in trainer.callback_handler.callbacks:
            if getattr(callback, "tb_writer", None):
                callback.tb_writer.add_text("answers", markdown(kept[:SHOWN]), trainer.state.global_step)
    return figures


def longest_scored(questions: list[Question]) -> int:
    """Return how many tokens a scored answer may have: LONGEST more than the longest reference, so that none is cut too early."""
    return LONGEST + max(len(question.reference) for question in questions)


def choose(heldout: Mapping[str, Sequence[TokenSequence]], wanted: int) -> list[Question]:
    """Return the first held-out samples, the same number from each source that has enough; of judged answers, the good ones."""
    first = {name: _first(samples, wanted) for name, samples in heldout.items()}
    turns = range(max(map(len, first.values())))
    places = [(name, turn) for turn in turns for name in first if turn < len(first[name])]
    return [question(name, first[name][turn]) for name, turn in places[:wanted]]


def _first(samples: Sequence[TokenSequence], wanted: int) -> list[TokenSequence]:
    """Return the first samples whose answers are not labelled bad, or simply the first where all are."""
    good = list(itertools.islice(filter(_is_good, samples), wanted))
    return good or list(itertools.islice(samples, wanted))


def _is_good(sample: TokenSequence) -> bool:
    return bool(sample.get("desirable", (True,))[0])


def question(source: str, sample: TokenSequence) -> Question:
    """Return a sample as a question. A text that is supervised from its first token on is cut in half, for the model to continue.
    The reference of a pair is the better answer, which comes first; a bad answer is never one."""
    length = int(sample["lengths"][0]) if "lengths" in sample else None
    ids = [int(token) for token in sample["input_ids"][:length]]
    own = [label != IGNORED for label in sample["labels"][:length]]
    begin = own.index(True)
    if begin == 1:
        begin = max(1, len(ids) // 2)
    end = next((i for i in range(begin, len(ids)) if not own[i]), len(ids))
    return Question(source, ids[:begin], ids[begin:end] if _is_good(sample) else [], tuple(sample.get("images", ())))


def generate(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[Question],
    rank: int,
    size: int,
    device: torch.device,
    processor: Processor | None = None,
    together: int = 1,
    longest: int = LONGEST,
) -> list[list[int]]:
    """Greedy answers in token ids. A collective.

    rank, size: data-parallel ones; ranks that compute a layer together have the same, and generate together
    processor: what reads the questions' images, where they have some
    together: questions that a rank answers at once, padded on the left; longest: tokens of an answer at most

    Rank r answers batches r, r + size, ...; sharded parameters are gathered by all ranks at once, hence a rank
    that has none left repeats one, and synced_gpus keeps a rank that is done in step with the others. With images all ranks
    answer the same batch: a tower's parameters are gathered, too, and a question without an image needs no tower.
    """
    mine: dict[int, list[int]] = {}
    if any(question.images for question in questions):
        rank, apart = 0, 1
    else:
        apart = size
    each = max(1, min(together, -(-len(questions) // apart)))
    batches = [range(len(questions))[first : first + each] for first in range(0, len(questions), each)]
    # A compiled model would be compiled again for each length.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for first in range(0, len(batches), apart):
            batch = batches[(first + rank) % len(batches)]
            how: dict[str, Any] = {"synced_gpus": size > 1, "streamer": _Beat(), "processor": processor}
            given = _greedy(model, tokenizer, questions, [questions[index] for index in batch], device, longest, **how)
            mine |= zip(batch, given, strict=True)
    found = {index: answer for of_rank in ranks.gather_all(mine) for index, answer in of_rank.items()}
    return [found[index] for index in range(len(questions))]


def _greedy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[Question],
    asked: list[Question],
    device: torch.device,
    longest: int,
    processor: Processor | None,
    **how: object,
) -> list[list[int]]:
    """Answer some of the questions at once, padded on the left; an answer ends with its end. A prompt that leaves no room for an
    answer loses its beginning, unless it has images, which would be cut."""
    ends, pad = sorted(stops(model, tokenizer, questions)), tokenizer.pad_token_id
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
    room = max(1, positions - longest)
    prompts = [question.prompt[0 if question.images else -room :] for question in asked]
    width = max(map(len, prompts))
    inputs = {
        "input_ids": torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
    }
    if processor:
        images = [image for question in asked for image in question.images]
        inputs |= processor.of_prompts(inputs["input_ids"], images)
    tokens = model.generate(
        **on_device(inputs, device),
        max_new_tokens=longest,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        eos_token_id=ends,
        pad_token_id=pad,
        **how,
    )
    answers = []
    for answer in tokens[:, width:].tolist():
        end = next((place for place, token in enumerate(answer) if token in ends), len(answer))
        answers.append(answer[: end + 1])
    return answers


class _Beat:
    """A streamer of Transformers: each token is a sign of life."""

    def put(self, _: object) -> None:
        this_process.heartbeat.enter(heartbeat.EVALUATION)

    def end(self) -> None:
        pass


def stops(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: list[Question]) -> set[int]:
    """Tokens that end an answer: the tokenizer's, the model's own, and the special ones that end the references."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])}
    # Not all_special_ids: a Llama 3 base model's has no <|eot_id|>, with which our template ends a turn.
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    for asked in questions:  # some templates put a line's end after it; a tag before it ends no answer
        ends.add(next((token for token in asked.reference[:-3:-1] if token in special), None))
    return {int(token) for token in ends if token is not None}


def entries(
    tokenizer: PreTrainedTokenizerBase,
    questions: list[Question],
    given: list[list[int]],
    step: int,
    processor: Processor | None = None,
) -> list[Record]:
    """One record per question: step, source, question, reference, answer, as text with its control tokens: what the model read,
    and where it ended. Only one of an image's tokens is shown, and `images` has the images, made small, as data URLs."""
    found = []
    for asked, answer in zip(questions, given, strict=True):
        prompt, pictures = asked.prompt, {}
        if processor and asked.images:
            prompt = processor.with_one_token_each(prompt)
            pictures = {"images": [thumbnail(image.open()) for image in asked.images]}
        texts = tokenizer.batch_decode([prompt, asked.reference, answer])
        named = dict(zip(("question", "reference", "answer"), texts, strict=True))
        found.append({"step": step, "source": asked.source, **named, **pictures})
    return found


def thumbnail(picture: Image) -> str:
    """Return a picture, at most THUMBNAIL pixels wide and high, as the data URL of a PNG file."""
    file, small = io.BytesIO(), picture.copy()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    small.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def store(found: list[Record], directory: Path) -> None:
    """Add records to the run's answers.jsonl. They replace those that an interrupted run wrote for this step or a later one."""
    path = directory / ANSWERS
    lines = _earlier(path)
    kept = [line for line in lines if json.loads(line)["step"] < found[0]["step"]]
    text = "\n".join([*kept, *(json.dumps(entry, ensure_ascii=False) for entry in found)]) + "\n"
    files.write(path, text, secret=True)


def _earlier(path: Path) -> list[str]:
    """Return the file's lines. If another user began the run, lines that only they may read stay in a file next to it."""
    try:
        return [line for line in files.read_text(path).split("\n") if line]
    except FileNotFoundError:
        return []
    except PermissionError:
        names = (path.with_suffix(f".{number}{path.suffix}") for number in itertools.count(1))
        aside = next(name for name in names if not exists(name))
        path.rename(aside)
        print(f"{path}: the answers until here are another user's, and stay in {aside.name}", file=sys.stderr)
        return []


def show(found: list[Record]) -> None:
    """Print records as a table, above a progress bar where there is one."""
    from rich.table import Table
    from rich.text import Text
    from tqdm import tqdm

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    several = len({entry["source"] for entry in found}) > 1
    for entry in found:
        asked = f"question ({entry['source']})" if several else "question"
        table.add_row(asked, Text(_short(entry["question"], end=True)))  # Text: brackets in it are no markup
        table.add_row("reference", Text(_short(entry["reference"])))
        if "base" in entry:
            table.add_row("before", Text(_short(entry["base"])))
        table.add_row("answer", Text(_short(entry["answer"]), style="bold"))
    with tqdm.external_write_mode():
        console(columns=OF_LOGS).print(table)
        sys.stdout.flush()


def markdown(found: list[Record]) -> str:
    """Records as a table for TensorBoard's text page."""
    rows = [{key: _short(str(text)).replace("|", "\\|") for key, text in entry.items()} for entry in found]
    lines = [f"| {row['question']} | {row['reference']} | {row['answer']} |" for row in rows]
    return "\n".join(["| question | reference | answer |", "|---|---|---|", *lines])


def _short(text: str, most: int = 240, end: bool = False) -> str:
    """`text` on one line and not longer than `most` characters; the end of a question says more than its beginning."""
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    return f"... {line[-most:]}" if end else f"{line[:most]} ..."
