"""Keys of a recipe that a run reads only where others have certain values."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ...errors import UserError
from ...errors.tables import Fields
from ..recipe.schema import SECTION_OF, Recipe
from ..recipe.settings import Settings


class ReadWith(NamedTuple):
    """keys: how they begin; are_read: by the values of all keys; why, cure: of a key that is set where it is not read
    switches: of the others, those by which a flag may make void what a recipe says; the run's table tells of such a key
    """

    keys: tuple[str, ...]
    switches: tuple[str, ...]
    are_read: Callable[[Fields], object]
    why: str
    cure: str


_OF_ADAPTERS = ("adapter_name_or_path", "lora", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "load_in_4bit",
                "trainable_token_indices")  # fmt: skip
_WITHOUT_MOMENTS = ("sgd", "adafactor", "lars")  # as Adam has them: no betas, and an epsilon of its own or none
READ_WITH = (
    ReadWith(_OF_ADAPTERS, (), lambda of: of["use_peft"],
             "use_peft is false: all weights would be trained", "set use_peft: true"),
    ReadWith(("bnb_4bit_", "use_bnb_"), ("load_in_4bit", "teacher_load_in_4bit"),
             lambda of: of["load_in_4bit"] or of["teacher_load_in_4bit"],
             "load_in_4bit is false: no weight would be in 4 bits", "set load_in_4bit: true"),
    # A flag's global_batch_size puts the recipe's own here (recipe/flags.py).
    ReadWith(("reference_batch_size",), ("learning_rate_scaling", "global_batch_size"),
             lambda of: of["learning_rate_scaling"] != "none",
             "learning_rate_scaling is none: the rate would stay as it is", "set learning_rate_scaling: linear or sqrt"),
    ReadWith(("nonfinite_limit",), ("nonfinite", "loss_spike"), lambda of: of["nonfinite"] != "stop" or of["loss_spike"],
             "nonfinite is stop and loss_spike null: no step would be left out", "set nonfinite: skip"),
    ReadWith(("eval_tasks_chat_template",), ("eval_tasks",), lambda of: of["eval_tasks"],
             "eval_tasks names none", "set eval_tasks"),
    ReadWith(("adam_",), ("optim",), lambda of: of["optim"] not in _WITHOUT_MOMENTS,
             "{optim} reads nothing of Adam's", "take an optim that does"),
    ReadWith(("adam_epsilon",), ("optim",), lambda of: "lion" not in of["optim"],
             "{optim} does not read it", "take an optim that does"),
)  # fmt: skip


def unread(recipe: Recipe) -> Iterator[tuple[ReadWith, list[str], str]]:
    """Yield the rows of which a recipe sets keys that nothing reads, with those keys, and why that is."""
    sections = (recipe.model, recipe.training)
    values = {key: value for section in sections for key, value in section}
    defaults = {key: info.default for section in sections for key, info in type(section).model_fields.items()}
    for row in READ_WITH:
        keys = [key for key in values if key.startswith(row.keys) and values[key] != defaults[key]]
        if keys and not row.are_read(values):
            yield row, keys, row.why.format(**values)


def void_keys(recipe: Recipe) -> tuple[str, ...]:
    """Return a line for each key that nothing reads, of a recipe that refuse_unread() lets pass."""
    return tuple(f"{key}, which nothing reads: {why}" for _, keys, why in unread(recipe) for key in keys)


def without_unread(settings: Settings) -> Fields:
    """Return a document of the recipe that is read as these settings are, but without their flags, which may make keys void."""
    document = settings.document()
    for _, keys, _ in unread(settings.recipe):
        for key in keys:
            del document[SECTION_OF[key]][key]
    return document


def refuse_unread(settings: Settings) -> None:
    """Raise UserError for keys that are set, and that nothing reads as other keys are.

    A run's own run.yaml may have some: it was written before they were refused, and the run goes on as it was.
    """
    by_flag = {key for key, source in settings.sources.items() if source.startswith("flag")}
    for row, keys, why in unread(settings.recipe):
        # A recipe's are void where a flag has switched off what reads them.
        may_be_void = settings.recipe_path.name == "run.yaml" or by_flag.intersection(row.switches)
        found = [key for key in keys if key in by_flag] if row.switches and may_be_void else keys
        if found:
            problem = f"{' and '.join(found)} {'is' if len(found) == 1 else 'are'} set, but {why}"
            cure = f"{row.cure}, or leave {'the key' if len(found) == 1 else 'these keys'} out"
            raise UserError(settings.place(found[0]), problem, cure)
