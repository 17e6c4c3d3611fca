"""Which method a recipe asks for: all weights, LoRA, DoRA, QLoRA or QDoRA."""

from typing import TYPE_CHECKING

from .schema import ModelSection

if TYPE_CHECKING:
    pass


# What `plan --method` calls a method, and the keys of a recipe that ask for it.
METHODS: dict[str, dict[str, bool]] = {
    "full": {},
    "lora": {"use_peft": True},
    "rslora": {"use_peft": True, "use_rslora": True},
    "dora": {"use_peft": True, "use_dora": True},
    "qlora": {"use_peft": True, "load_in_4bit": True},
    "qdora": {"use_peft": True, "load_in_4bit": True, "use_dora": True},
}


def method_of(section: ModelSection) -> str:
    """full, lora, dora, qlora or qdora."""
    if not section.use_peft:
        return "full"
    return ("q" if section.load_in_4bit else "") + ("dora" if section.use_dora else "lora")


def method_name(section: ModelSection) -> str:
    return {"lora": "LoRA", "dora": "DoRA", "qlora": "QLoRA", "qdora": "QDoRA"}.get(method_of(section), "all weights")
