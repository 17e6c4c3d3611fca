"""Which methods a strategy carries."""

from typing import TYPE_CHECKING

from ..errors import UserError
from ..recipe.flags import Settings
from ..recipe.method import method_name, method_of
from ..recipe.schema import ModelSection

if TYPE_CHECKING:
    from ..strategy import Strategy


# Keys that mean nothing without use_peft.
_KEYS = (
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_modules_to_save",
    "use_rslora",
    "use_dora",
    "load_in_4bit",
)


# Methods that a kind of strategy cannot carry, and why: seen running (docs/methods.md).
REFUSED = {
    (
        "qdora",
        "zero3",
    ): "DoRA measures every row of its base at the start, and PEFT asks ZeRO-3 for a 4-bit base before ZeRO-3 has it",
}


def check_keys(settings: Settings, strategy: "Strategy") -> None:
    """Hold the recipe's adapter keys against each other and against the strategy. Raises UserError."""
    section, defaults = settings.recipe.model, ModelSection.model_fields
    stray = next((key for key in _KEYS if getattr(section, key) != defaults[key].default), None)
    if stray and not section.use_peft:
        raise UserError(
            settings.place(stray),
            f"{stray} is set, but use_peft is false: all weights would be trained",
            "set use_peft: true, or leave the key out",
        )
    why = REFUSED.get((method_of(section), strategy.kind))
    if why:
        key = "use_dora" if section.use_dora else "load_in_4bit"
        raise UserError(
            settings.place(key),
            f"{method_name(section)} does not run under {strategy.name}: {why}",
            "use ZeRO-2, FSDP2 or DDP, or LoRA without the two together; docs/methods.md has them all",
        )
