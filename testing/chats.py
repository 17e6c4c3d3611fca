"""Chats, and what of their samples is supervised."""

from brigade.train.data.chat_template import TEMPLATES
from brigade.train.data.store import IGNORED

CHATML = TEMPLATES / "chatml.jinja"


def chat(*contents, roles=("user", "assistant")):
    return {"messages": [{"role": roles[i % len(roles)], "content": text} for i, text in enumerate(contents)]}


class only:
    """A Prepared of one source, its held-out samples and facts by attribute."""

    def __init__(self, prepared):
        self.train, self.fingerprint = prepared.train, prepared.fingerprint
        self.stands_in = prepared.chat_format.stands_in
        (self.heldout,) = prepared.heldout.values()
        self.facts = prepared.facts
        self.cut, self.dropped = prepared.facts["cut"], prepared.facts["dropped"]


def same(some, others):
    return [row["input_ids"].tolist() for row in some] == [row["input_ids"].tolist() for row in others]


CHATS = [chat(f"What is {i}?", f"The number {i}.") for i in range(20)]

HELD = [chat(f"Which is {i}?", f"{i}.") for i in range(20)]


def words(tokenizer, samples):
    """What is supervised in each sample, as text."""
    return [tokenizer.decode([int(label) for label in row["labels"] if label != IGNORED]) for row in samples]


def said(*turns):
    return {"messages": [{"role": ("user", "assistant")[i % 2], **turn} for i, turn in enumerate(turns)]}
