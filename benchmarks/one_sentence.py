"""Whether a preference shows: what a run of recipes/smollm2-135m/dpo.yaml answers, and what its base does.

    python train.py --recipe recipes/smollm2-135m/dpo.yaml --output_dir OUTPUT
    python -m benchmarks.one_sentence OUTPUT     # prints the tables of docs/evidence/preferences.md

Both answer greedily the held-out questions of the recipe, and some about Python's library, of which the run saw nothing. An
answer is of one sentence if it ended by itself, and has one (one_sentence.py beside the recipe). Accuracy, margin and
log-probabilities are those that the run logged of held-out pairs.
"""

import json
import runpy
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.pages import REPOSITORY, Row, command_line, machine, markdown

RECIPE = REPOSITORY / "recipes/smollm2-135m/dpo.yaml"
PYTHON = REPOSITORY / "brigade/train/data/python_docs/heldout.jsonl"
OTHERS = 24  # questions about Python
LONGEST = 160  # new tokens of an answer
SHOWN = 3  # questions whose answers are printed
LOGGED = {
    "accuracy": "rewards/accuracies",
    "margin": "rewards/margins",
    "log-probability of the better answer": "logps/chosen",
    "of the worse answer": "logps/rejected",
}


class Answer(NamedTuple):
    """tokens: how many, without the one that ends it; cut: whether it had not ended at LONGEST"""

    question: str
    text: str
    tokens: int
    cut: bool


def questions() -> dict[str, list[str]]:
    """Return by their kind the held-out questions, and the first about Python that ask what a member does or how it works."""
    heldout = RECIPE.with_name("one_sentence") / "heldout.jsonl"
    asked = [json.loads(line)["messages"][0]["content"] for line in PYTHON.read_text().splitlines()]
    return {
        "held-out things": [json.loads(line)["prompt"] for line in heldout.read_text().splitlines()],
        "Python": [each for each in asked if each.startswith(("What does", "How does"))][:OTHERS],
    }


def answers(output: Path, asked: dict[str, list[str]]) -> dict[str, dict[str, list[Answer]]]:
    """Let the trained model and its base answer, each question by itself: {"before" or "after": {kind: [...]}}."""
    from transformers import AutoTokenizer

    from brigade.train.data.encode import LoadedEncoder
    from brigade.train.data.tokenise import encoder_of
    from brigade.train.model.load_trained import load_trained, untrained
    from brigade.train.recipe import flags
    from brigade.train.step.sample_answers import TOGETHER, Question, generate

    settings = flags.of_run(output, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(output)
    encoder = LoadedEncoder(encoder_of(settings, tokenizer))
    model = load_trained(settings, output).eval()

    def answered(by: Any, texts: list[str]) -> list[Answer]:
        questions = [Question("", encoder.prompt([{"role": "user", "content": text}]), []) for text in texts]
        given = generate(by, tokenizer, questions, 0, 1, "cpu", together=TOGETHER, longest=LONGEST)
        ended = [ids[-1] == tokenizer.eos_token_id for ids in given]
        said = tokenizer.batch_decode(given, skip_special_tokens=True)
        return [
            Answer(question, text.strip(), len(ids) - end, not end)
            for question, text, ids, end in zip(texts, said, given, ended, strict=True)
        ]

    after = {kind: answered(model, texts) for kind, texts in asked.items()}
    with untrained(settings, model, "cpu") as base:
        return {"before": {kind: answered(base, texts) for kind, texts in asked.items()}, "after": after}


def logged(output: Path) -> tuple[Row, Row]:
    """Return what the run logged of its held-out pairs before the first step and after the last."""
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    of_pairs = [entry for entry in history if "eval_rewards/accuracies" in entry]
    return of_pairs[0], of_pairs[-1]


def tables(given: dict[str, dict[str, list[Answer]]], first: Row, last: Row) -> str:
    """Return what changed, as a table, and the first answers of each kind, as another."""
    split = runpy.run_path(str(RECIPE.with_name("one_sentence.py")))["sentences"]

    def is_one(answer: Answer) -> bool:
        return not answer.cut and len(split(answer.text)) == 1

    before, after = given["before"], given["after"]
    lines: list[list[Any]] = []
    for kind, asked in before.items():
        both = (asked, after[kind])
        count = len(asked)
        lines += [
            [f"{kind}: answers of one sentence", *(f"{sum(map(is_one, each))} of {count}" for each in both)],
            [f"{kind}: tokens of an answer", *(f"{fmean(answer.tokens for answer in each):.0f}" for each in both)],
            [
                f"{kind}: not ended after {LONGEST} tokens",
                *(f"{sum(each.cut for each in answers)}" for answers in both),
            ],
        ]
        kept = sum(split(old.text)[:1] == split(new.text)[:1] for old, new in zip(*both, strict=True))
        lines.append([f"{kind}: first sentence as before", "", f"{kept} of {count}"])
    for name, key in LOGGED.items():
        lines.append([f"held-out pairs: {name}", *(f"{entry[f'eval_{key}']:.2f}" for entry in (first, last))])
    shown = [
        [old.question, *(" ".join(answer.text.split()) + (" ..." if answer.cut else "") for answer in (old, new))]
        for kind, asked in before.items()
        for old, new in list(zip(asked, after[kind], strict=True))[:SHOWN]
    ]
    return "\n\n".join((markdown(["", "before", "after"], lines), markdown(["question", "before", "after"], shown)))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("output", type=Path, help="output directory of a run of the recipe")
    output = parser.parse_args().output
    first, last = logged(output)
    given = answers(output, questions())
    (output / "one_sentence.json").write_text(json.dumps(given, indent=1))
    print(f"{machine()}\n\n{tables(given, first, last)}")


if __name__ == "__main__":
    main()
