"""The questions of the court, and their rows: data of questions.yaml and rows.yaml."""

from pathlib import Path
from typing import Any, NamedTuple

import yaml

HERE = Path(__file__).parent
Row = dict[str, Any]


class Question(NamedTuple):
    """One question. rows: a name of rows.yaml; kind: chat, text, image, dpo, kto or orpo; micro: rows of a micro-batch;
    tolerance: relative, of losses; of gradients' norms ten times as much, for on a CPU torch sums an embedding's squares in fp32,
    and of weights likewise, relative to how far they moved;
    dies_after: the step behind which the run is killed; keeps: whether all tensors of the model belong into what is saved"""

    name: str
    asks: str
    rows: str
    kind: str = "chat"
    model: str = "llama"
    ranks: int = 1
    strategy: str = ""
    micro: int = 4
    accumulation: int = 1
    steps: int = 3
    packing: bool = False
    lora: bool = False
    pad_is_eos: bool = False
    keeps: bool = False
    optim: str = "sgd"
    rate: float = 0.1
    schedule: str = "constant"
    warmup: int = 0
    dies_after: int = 0
    tolerance: float = 1e-5

    @property
    def learning_rate(self) -> float:
        return 0.01 if self.optim == "adamw" else self.rate


def read() -> dict[str, Question]:
    """Return all questions by name."""
    found = yaml.safe_load((HERE / "questions.yaml").read_text())
    return {name: Question(name, **keys) for name, keys in found.items()}


def rows_of(question: Question) -> list[Row]:
    """Return a question's rows in the field's form: messages (and tools), text, or the columns of preferences."""
    written = yaml.safe_load((HERE / "rows.yaml").read_text())
    rows = written[question.rows]
    if question.kind == "chat":
        return [_chat(turns, written["weather"]) for turns in rows]
    return [{"text": text} for text in rows] if question.kind == "text" else rows


def _chat(turns: list[list[Any]], tool: Row) -> Row:
    messages, calls = [], 0
    for role, said in turns:
        said = said if isinstance(said, dict) else {"text": said}
        message: Row = {"role": role, "content": said.get("text", "")}
        if "thought" in said:
            message["reasoning_content"] = said["thought"]
        if "call" in said:
            calls += 1
            function = {"name": "weather", "arguments": {"city": said["call"]}}
            message["tool_calls"] = [{"type": "function", "function": function}]
        messages.append(message)
    return {"messages": messages} | ({"tools": [tool]} if calls else {})
