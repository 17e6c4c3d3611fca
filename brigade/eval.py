"""`python -m brigade eval OUTPUT`: a fresh process judges what a run saved."""

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import UserError
from .errors.console import counted
from .errors.flags import add_flags
from .errors.tables import Document, table
from .train.checkpoint import saved_weights
from .train.data import tokenizer_trial
from .train.recipe import flags, remote_code
from .train.recipe.objectives import objective_of
from .train.recipe.program import check_functions
from .train.recipe.settings import Settings
from .train.run import page
from .train.run.directory import TASK_RESULTS, check_exists

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .train.data.store import Samples, TokenSequence
    from .train.model.images.processor import Processor

TOGETHER = 8  # held-out sequences that a model computes at once
FEW = 0.1  # share of answers that a model may have had right before training
OF_TASKS, OF_HELD_OUT = ("chat_template", "limit", "batch_size"), ("answers", "exact")  # flags


def agree(loss: float, recorded: float, half: bool) -> bool:
    """Whether two losses in nats are the same, but for the rounding of fp32, or of half precision, which is of the size of logits
    and so can be a large share of a small loss: the weights of the demo's model give 0.01698 in fp32, and in bf16 0.01735 end to
    end, 0.01746 one by one, and 0.01691 with its adapters in bf16, too."""
    return math.isclose(loss, recorded, **({"rel_tol": 2e-2, "abs_tol": 1e-3} if half else {"rel_tol": 1e-4}))


def _in_half(settings: Settings, model: "PreTrainedModel") -> bool:
    """Whether a run computed in half precision, or its model was saved in it, as its base was."""
    training = settings.recipe.training
    return bool(training.bf16 or training.fp16 or model.dtype.itemsize == 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add_flags(parser, table(Path(__file__).with_suffix(".yaml")))
    parser.add_argument(remote_code.FLAG, action="store_true", help=remote_code.HELP)
    add = parser.add_argument
    add(remote_code.ALLOW, metavar="FILE=SHA256", action="append", default=[], help=remote_code.ALLOW_HELP)


def run(options: argparse.Namespace) -> int:
    """Return 0 where the loaded model has the held-out loss that the run recorded, else 1."""
    from .train.model.load_trained import load_trained, loading_from_run, untrained

    _check_flags(options)
    check_exists(options.output)
    marker = options.output / "success.json"
    if not marker.is_file():
        raise UserError(str(marker), "there is none, so no run has succeeded here", "name the output of a finished run")
    saved_weights.find(options.output, None)  # no checkpoint stands in for a model that is gone
    if options.tasks is not None:
        return _evaluate_tasks(options, marker)
    with loading_from_run(marker):
        recorded = json.loads(marker.read_text())
        before, after = float(recorded["held_out_loss_before"] or 0), float(recorded["held_out_loss"])

    import torch
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from .train.data.prepare import prepare
    from .train.model.images.load import load as load_processor
    from .train.model.images.saved import difference
    from .train.step import answer_scores, sample_answers

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    settings = flags.of_run(options.output, options.trust_remote_code, options.allow_code)
    check_functions(settings)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer_trial.check(options.output, str(options.output))
    with loading_from_run(options.output):
        tokenizer = AutoTokenizer.from_pretrained(
            options.output, trust_remote_code=settings.recipe.model.trust_remote_code
        )
        model = load_trained(settings, options.output).eval().to(device)
    processor = load_processor(settings, tokenizer, model.config, str(options.output))
    prepared = prepare(settings, tokenizer, processor)
    splits = prepared.heldout
    if objective_of(settings.recipe.training).compares:
        return _judge_preferences(options, settings, model, tokenizer, splits, recorded)
    heldout = [sequence for split in splits.values() for sequence in split]

    loss = held_out_loss(model, heldout, tokenizer.pad_token_id, processor)
    rows = {
        "before training": f"{before:.4f}" if before else "not measured",
        "after training": f"{after:.4f}" + (f"  ({1 - after / before:.0%} lower)" if before else ""),
        "of the saved model, loaded by from_pretrained": f"{loss:.4f}",
        "unigram entropy of the text": f"{unigram_entropy(heldout):.4f}  (the best that ignoring all context can do)",
    }
    if settings.recipe.training.teacher:
        from .train.loss.distillation import held_out_divergence

        rows["divergence from the teacher"] = f"{held_out_divergence(settings, model, heldout):.4f}"
    print(f"Held-out loss in nats per token, over {counted(len(heldout), 'held-out sample')}:")
    for name, figure in rows.items():
        print(f"  {name:<47}{figure}")
    asked = [
        sample_answers.question("", sequence)
        for sequence in heldout[: 3 if options.answers is None else options.answers]
    ]
    if options.exact is None:
        given = sample_answers.generate(model, tokenizer, asked, 0, 1, device, processor)
        shown = sample_answers.entries(tokenizer, asked, given, recorded["steps"], processor)
    else:
        named, score = settings.recipe.training.answer_score, answer_scores.score_of(settings)
        questions = sample_answers.choose(splits, settings.recipe.training.eval_answers if named else len(heldout))
        answering = (processor, sample_answers.TOGETHER, sample_answers.longest_scored(questions))
        answers = sample_answers.generate(model, tokenizer, questions, 0, 1, device, *answering)
        with untrained(settings, model, device) as base:
            first = sample_answers.generate(base, tokenizer, questions, 0, 1, device, *answering)
        references = [each.reference for each in questions]
        ours, theirs = (answer_scores.mean(score, tokenizer, references, each) for each in (answers, first))
        asked = questions[: len(asked)]
        shown = sample_answers.entries(tokenizer, asked, answers[: len(asked)], recorded["steps"], processor)
        earlier = sample_answers.entries(tokenizer, asked, first[: len(asked)], 0, processor)
        if shown and not settings.recipe.training.eval_answers:  # else the run has answers of its own
            try:
                sample_answers.store([*earlier, *shown], options.output)
                if settings.recipe.training.report_page:
                    page.write(options.output)
            except OSError as error:  # another user's run, or a full disk: the verdict needs no file
                print(f"warning: the answers are not kept in {options.output}: {error.strerror}", file=sys.stderr)
        shown = [entry | {"base": before["answer"]} for entry, before in zip(shown, earlier, strict=True)]
        if named:
            said = f"Score of {len(questions)} held-out answers ({named}): {ours:.4f}; {theirs:.4f} before training."
        else:
            said = f"Of {len(questions)} held-out answers {ours:.0%} are the reference's, word by word; {theirs:.0%} before "
            said += "training."
        print(f"\n{said}")
    print()
    sample_answers.show(shown)
    said = difference(options.output, prepared.folder, processor, tokenizer) if processor is not None else ""
    if said:
        print(f"\nImages are not read as in training: {said}.")
        return 1
    if not agree(loss, after, _in_half(settings, model)):
        print(f"\nThe loaded model's loss is not the run's: {loss:.6f} against {after:.6f}.")
        return 1
    if options.exact is not None and named and ours < options.exact:
        print(f"\nThe score should be {options.exact:.4f} at least.")
        return 1
    if options.exact is not None and not named and (ours < options.exact or theirs > FEW):
        print(
            f"\nThe model should answer {options.exact:.0%} word by word, and have answered at most {FEW:.0%} before."
        )
        return 1
    files = "the model in Hugging Face format, run.yaml (what was run), trainer_state.json (the log)"
    print(f"\nEverything lies in {options.output}: {files}, checkpoint-*, tensorboard/.")
    return 0


def _judge_preferences(
    options: argparse.Namespace,
    settings: Settings,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    splits: "Mapping[str, Samples]",
    recorded: Document,
) -> int:
    """Compare held-out answers by the model that was saved. Return 0 where that gives the loss which the run recorded."""
    from .train.loss.objective import held_out
    from .train.model.load_trained import reference
    from .train.step import sample_answers

    training = settings.recipe.training
    objective = objective_of(training)
    if options.exact is not None:
        raise UserError("flag --exact", f"{objective.title} teaches no answers word by word", "leave it out")
    before, after = float(recorded["held_out_loss_before"] or 0), float(recorded["held_out_loss"])
    sequences, pad = [sequence for split in splits.values() for sequence in split], tokenizer.pad_token_id
    ours = held_out.known_of(training, model, sequences, pad)
    with reference(settings, model, str(model.device)) as base:
        theirs = None if base is None else held_out.known_of(training, base, sequences, pad)
    found = held_out.judge(settings, sequences, ours, theirs)
    print(f"Held-out loss of {objective.title} over {counted(len(sequences), 'held-out sequence')}:")
    rows = {"before training": f"{before:.4f}" if before else "not measured", "after training": f"{after:.4f}"}
    rows["of the saved model, answer by answer"] = f"{found['loss']:.4f}"
    rows |= {name: f"{figure:.4f}" for name, figure in found.items() if name != "loss"}
    for name, shown in rows.items():
        print(f"  {name:<47}{shown}")
    if not objective.scores:
        asked = sample_answers.choose(splits, 3 if options.answers is None else options.answers)
        given = sample_answers.generate(model, tokenizer, asked, 0, 1, str(model.device))
        print()
        sample_answers.show(sample_answers.entries(tokenizer, asked, given, recorded["steps"]))
    if not agree(found["loss"], after, _in_half(settings, model)):
        print(f"\nThe loaded model's loss is not the run's: {found['loss']:.6f} against {after:.6f}.")
        return 1
    return 0


def _check_flags(options: argparse.Namespace) -> None:
    """Raise UserError for a flag that would not be read: --tasks evaluates only tasks."""
    given = options.tasks is not None
    for name in OF_HELD_OUT if given else OF_TASKS:
        value = getattr(options, name)
        if value is not None and value is not False:
            problem = (
                "it is about the held-out loss, and --tasks evaluates only tasks" if given else "it is about --tasks"
            )
            cure = "leave it out, or evaluate twice" if given else "leave it out, or name tasks: --tasks hellaswag"
            raise UserError(f"flag --{name}", problem, cure)


def _evaluate_tasks(options: argparse.Namespace, marker: Path) -> int:
    """Evaluate what the run saved on tasks; print the figures, and keep them in its directory and on its page."""
    import torch
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from .train.model.load_trained import load_trained, loading_from_run
    from .train.step import task_evaluation, task_loading

    place = "flag --tasks"
    task_loading.check_package(place)
    names = options.tasks.replace(",", " ").split()
    if not names:
        raise UserError(place, "it names no task", "name one: --tasks hellaswag, or a file: --tasks ./my_task.yaml")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    loaded = task_loading.load(names, place)
    settings = flags.of_run(options.output, options.trust_remote_code)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    code = settings.recipe.model.trust_remote_code
    tokenizer_trial.check(options.output, str(options.output))
    with loading_from_run(options.output):
        steps = json.loads(marker.read_text())["steps"]
        tokenizer = AutoTokenizer.from_pretrained(options.output, trust_remote_code=code)
        model = load_trained(settings, options.output).eval().to(device)
    if options.chat_template and not tokenizer.chat_template:
        raise UserError("flag --chat_template", "the saved tokenizer has no chat template", "leave the flag out")
    how = {"chat_template": options.chat_template, "limit": options.limit}
    found = task_evaluation.evaluate(model, tokenizer, loaded, options.batch_size or 8, device, **how)
    task_evaluation.show(found)
    if options.limit:
        print(f"Of each task only the first {options.limit} samples: these figures are no scores.")
    task_evaluation.store(found, steps, options.output)
    if settings.recipe.training.report_page:
        page.write(options.output)
    print(f"They are kept in {options.output / TASK_RESULTS}.")
    return 0


def held_out_loss(
    model: "PreTrainedModel", sequences: "list[TokenSequence]", pad_token_id: int, processor: "Processor | None" = None
) -> float:
    """Return the mean cross-entropy in nats per supervised token, by the model's own forward pass only. processor: of images"""
    import torch

    from .train.data.collate import ABOUT, Collate, Layout, on_device
    from .train.data.store import IGNORED
    from .train.model.images.tower import TOWER

    total, tokens = 0.0, 0
    collate = Collate(pad_token_id, Layout(processor=processor))
    with torch.inference_mode():
        for start in range(0, len(sequences), TOGETHER):
            batch = on_device(collate((sequences[start : start + TOGETHER], None)), model.device)
            labels = batch.pop("labels")[:, 1:]
            del batch[ABOUT]
            batch.pop(TOWER, None)
            logits = model(**batch).logits[:, :-1].float()
            total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
            tokens += int((labels != IGNORED).sum())
    return total / tokens


def unigram_entropy(sequences: "list[TokenSequence]") -> float:
    """Return the entropy in nats of the supervised tokens' frequencies: the best loss of a model that ignores all context."""
    from collections import Counter

    from .train.data.store import IGNORED

    counts = Counter(int(label) for sequence in sequences for label in sequence["labels"] if label != IGNORED)
    total = counts.total()
    return -sum(count / total * math.log(count / total) for count in counts.values())
