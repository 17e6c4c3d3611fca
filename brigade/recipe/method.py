"""Which method a recipe asks for: all weights, LoRA, DoRA, QLoRA or QDoRA."""

from typing import TYPE_CHECKING

from .schema import ModelSection

if TYPE_CHECKING:
    pass


def method(section: ModelSection) -> str:
    """full, lora, dora, qlora or qdora."""
    if not section.use_peft:
        return "full"
    return ("q" if section.load_in_4bit else "") + ("dora" if section.use_dora else "lora")


def name(section: ModelSection) -> str:
    return {"lora": "LoRA", "dora": "DoRA", "qlora": "QLoRA", "qdora": "QDoRA"}.get(method(section), "all weights")
