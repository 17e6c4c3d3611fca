"""Rows, and samples as text."""

from brigade.train.data import report
from brigade.train.data.store import IGNORED
from brigade.train.recipe.batch import batch_arithmetic


def chats(name, count):
    return [
        {"messages": [{"role": "user", "content": f"{name} {i}?"}, {"role": "assistant", "content": f"{name} {i}."}]}
        for i in range(count)
    ]


def words(tokenizer, row):
    """What is supervised of a sample, as text."""
    return tokenizer.decode([label for label in row["labels"] if label != IGNORED])


def texts(tokenizer, samples):
    return [tokenizer.decode(row["input_ids"]) for row in samples]


def mixed(prepare, write, sizes, weights, **data):
    sources = [
        {
            "train_file": write(f"{name}.jsonl", chats(name, size)),
            "name": name,
            "weight": weight,
            "validation_file": write(f"held-{name}.jsonl", chats(f"held {name}", 2)),
        }
        for name, size, weight in zip("abc", sizes, weights, strict=False)
    ]
    return prepare(datasets=sources, **data)


def figures(load, prepared, **sections):
    settings = load(**sections)
    training = settings.recipe.training
    return report.figures(prepared, settings.recipe.data, training, batch_arithmetic(training, 1, ""))
