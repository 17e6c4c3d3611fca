"""Say how many tokens a recipe reads of its own data, where that is known before anything is downloaded. No torch."""

from pathlib import Path

from ...errors.tables import table
from ...train.recipe.schema import Recipe

TOKENS = {name: entry["tokens"] for name, entry in table(Path(__file__).with_name("data_sets.yaml")).items()}


def own_tokens(recipe: Recipe) -> float | None:
    """Return about how many tokens the recipe's epochs have; None where data_sets.yaml does not name its data set."""
    data, training = recipe.data, recipe.training
    if training.max_steps > 0 or data.train_file or data.max_train_samples or data.dataset_name not in TOKENS:
        return None
    return training.num_train_epochs * TOKENS[data.dataset_name]


def million(tokens: float) -> str:
    """Return `18 million`, or from a billion on `1.5 billion`."""
    return f"{tokens / 1e9:,.3g} billion" if tokens >= 1e9 else f"{tokens / 1e6:,.3g} million"
