"""Methods of training: all weights, or adapters of one kind; what each is called, and which keys of a recipe ask for it."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .model_section import ModelSection


class Method(NamedTuple):
    """One method. title: its name for readers; keys: those under a recipe's `model:` that are true"""

    title: str
    keys: tuple[str, ...] = ()


# By the name that `plan --method` takes.
METHODS = {
    "full": Method("full fine-tuning"),
    "lora": Method("LoRA", ("use_peft",)),
    "rslora": Method("rsLoRA", ("use_peft", "use_rslora")),
    "dora": Method("DoRA", ("use_peft", "use_dora")),
    "qlora": Method("QLoRA", ("use_peft", "load_in_4bit")),
    "qdora": Method("QDoRA", ("use_peft", "load_in_4bit", "use_dora")),
}


def method_of(section: "ModelSection") -> str:
    """full, lora, dora, qlora or qdora. rsLoRA counts as LoRA: it scales adapters differently, and all else is the same."""
    if not section.use_peft:
        return "full"
    return ("q" if section.load_in_4bit else "") + ("dora" if section.use_dora else "lora")


def method_name(section: "ModelSection") -> str:
    """The method's name for readers."""
    return METHODS[method_of(section)].title
