"""A recipe's data for a run: read from the cache, or prepared (build.py) where it is not there yet.

What decides the samples (data, tokenizer, template, length, packing, splits) is the cache's key: changing any of it
makes a new cache, changing none reads the old one.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UserError
from ..host import cache
from ..recipe.data_section import DataSection, Source
from ..recipe.files import find
from ..recipe.objectives import objective_of
from ..recipe.settings import Settings
from .build import build
from .builtin import BUILT_IN, HELDOUT, TRAIN
from .data_files import paths_of
from .images import ImageProcessor
from .layout import ENCODING, FORMAT, META, NONE, TEMPLATES, ChatFormat, folder_of, outdated
from .store import Samples
from .stream import Stream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Held-out samples of each source that are evaluated where nobody said how many: 2 % of a million rows would be 20,000, before the
# first step and at every eval_steps. The mean loss of 2,000 has a standard error of about 0.01.
MOST_EVALUATED = 2000


@dataclass(frozen=True)
class Prepared:
    """A recipe's data.

    train: Samples, or a Stream; heldout: by the source's name; facts: figures for report.py; folder: where they lie
    images: the processor that reads the images of its rows; None: they have none
    """

    train: Any
    heldout: dict[str, Samples]
    fingerprint: str
    facts: dict[str, Any]
    chat_format: ChatFormat
    folder: Path = Path()
    images: Any = None

    def close(self) -> None:
        """Remove what only this run needs."""
        if self.train.streamed:
            self.train.close()


def prepare(settings: Settings, tokenizer: "PreTrainedTokenizerBase", images: ImageProcessor | None = None) -> Prepared:
    """Return the training and held-out samples of a recipe, from the cache where the same was prepared before.

    images: the model's processor, of a recipe with data.images (brigade/train/model/images/processor.py)

    Raises UserError for missing, empty or broken data and for data without any supervised token.
    """

    def built() -> str:
        return json.dumps(build(settings, tokenizer, images))

    key, data = _inputs(settings, tokenizer), settings.recipe.data
    rows = objective_of(settings.recipe.training).rows
    known = json.loads(cache.remembered(key, built, _is_there) if key else built())
    folder = folder_of(known["folder"])
    facts = json.loads((folder / META).read_text())
    heldout = {
        name: Samples(folder, f"heldout-{number}", _most_evaluated(data, source), rows, data.max_length)
        for number, (name, source) in enumerate(zip(known["sources"], data.sources, strict=True))
    }
    train: Any
    if data.streaming:
        train = Stream.of_recipe(settings, tokenizer, facts["begins"])
    else:
        train = Samples(folder, "train", None, rows, data.max_length)
    return Prepared(train, heldout, known["fingerprint"], facts, ChatFormat(**known["chat_format"]), folder, images)


def _most_evaluated(data: DataSection, source: Source) -> int | None:
    """Return how many of a source's held-out samples are evaluated; None: all, for the recipe says how many or which."""
    share = data.validation_split != DataSection.model_fields["validation_split"].default
    said = data.max_eval_samples != "auto" or share or source.validation_file or source.dataset_test_split
    return None if said else MOST_EVALUATED


def _is_there(known: str) -> bool:
    folder = folder_of(json.loads(known)["folder"])
    return not cache.flaw(folder) and not outdated(folder)


def _inputs(settings: Settings, tokenizer: "PreTrainedTokenizerBase") -> tuple[object, ...] | None:
    """Return what decides the outcome of build(), as a glance tells it: equal inputs give equal data, and files need not be read.
    None where a glance is not enough: for a stream, a set of the datasets library, or images, which only the rows name."""
    import tokenizers
    import transformers

    data, model = settings.recipe.data, settings.recipe.model
    if data.streaming or data.images or any(source.dataset_name not in (None, BUILT_IN) for source in data.sources):
        return None
    names = [name for source in data.sources for name in (source.train_file, source.validation_file) if name]
    ours = data.chat_template == NONE or (TEMPLATES / f"{data.chat_template}.jinja").is_file()
    try:
        files = [cache.stamp(path) for name in names for path in paths_of(name)]
        files += [cache.stamp(path) for path in (TRAIN, HELDOUT) if any(source.dataset_name for source in data.sources)]
        files += [cache.stamp(path) for path in TEMPLATES.glob("*.jinja")]
        files += [cache.stamp(find(data.chat_template, "", ""))] if data.chat_template and not ours else []
        backend = tokenizer.backend_tokenizer.to_str()
    except (UserError, OSError, AttributeError):  # whoever builds says what is missing
        return None
    return (
        (ENCODING, FORMAT, tokenizers.__version__, transformers.__version__),
        (data.model_dump(), settings.recipe.training.seed, files, objective_of(settings.recipe.training).rows),
        (backend, tokenizer.special_tokens_map, tokenizer.eos_token_id, tokenizer.chat_template),
        (model.add_tokens, model.add_special_tokens),  # which are meant in all roles, also where the tokenizer has them
    )
