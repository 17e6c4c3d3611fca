"""The keys of a recipe's data: where samples come from, and how they become sequences of tokens. This module imports no torch."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from .section import Section
from .value_types import Columns, Positive, not_empty

# Keys that say which part or version of a data set is meant; files have none.
OF_DATASETS = ("dataset_config_name", "dataset_revision", "dataset_train_split", "dataset_test_split")


class Source(Section):
    """One place that samples come from: chats, pairs of prompt and completion, or texts."""

    dataset_name: str | None = None
    """A name on the Hub, a directory of datasets.save_to_disk or one laid out as on the Hub, or `python-docs` (built in,
    nothing downloaded)."""
    dataset_config_name: str | None = None
    """Which configuration, for a data set that has several."""
    dataset_revision: str | None = None
    """A branch, tag or commit of the data set on the Hub. (`revision` is the model's.)"""
    dataset_train_split: str = "train"
    dataset_test_split: str | None = None
    """Which split is held out; default: validation, else test, where the set has one of them."""
    train_file: str | None = None
    """A .jsonl, .parquet or .csv file, or a pattern for several: `chats/*.jsonl`."""
    validation_file: str | None = None
    """Held out instead of a part of the training data; written like train_file."""
    columns: Columns = {}
    """What the columns are called in this source where it is not messages, prompt, completion, text, tools, system, input,
    history, functions, chat_template_kwargs, chosen, rejected, label, images or image. weight: the column with the weight of each
    row's loss. ignore: columns to leave out on purpose (docs/data.md)."""
    image_folder: str | None = None
    """Where relative paths of images begin; default: the folder of the file with the rows."""


class WeightedSource(Source):
    """One of several sources, in `datasets`."""

    name: str | None = None
    """What its held-out loss is logged under; default: the file's or data set's own name."""
    weight: float | None = Field(None, gt=0, le=1)
    """Its share of the training samples. Either all sources have one and they add up to 1, or none has one."""


class DataSection(Source):
    """Where samples come from, and how they become sequences of tokens."""

    datasets: Annotated[list[WeightedSource], not_empty] | None = None
    """Several sources, instead of dataset_name or train_file."""
    streaming: bool = False
    """Read and tokenise while training, a window at a time: for sets larger than the disk. Needs max_steps."""
    validation_split: float = Field(0.02, gt=0, lt=1)
    """The share held out where the data has no validation part of its own."""
    chat_template: str | None = None
    """Default: the tokenizer's own, or the one in brigade/train/data/templates/ that renders the same and has generation marks;
    if there is neither, its own is rendered turn by turn (docs/data.md). A name of one in there, or a .jinja file with generation
    marks. none: there is none, and prompt and completion are joined as they are."""
    images: bool = False
    """Rows may have images, for a model that reads them (docs/images.md). false: a row with an image is an error."""
    max_pixels: Positive | None = None
    """Scale an image with more pixels down to so many, its sides' ratio kept, before the model's own processor sees it. null:
    only the processor's own rules."""
    min_pixels: Positive | None = None
    """Scale an image with fewer pixels up to so many, likewise."""
    fetch_images: bool = False
    """Fetch images that are given by http(s) addresses, once, while data is prepared. false: such a row is an error."""
    max_length: int = Field(2048, ge=8)
    """The longest sequence, in tokens."""
    truncation: bool = True
    """Cut longer samples (texts: into several). false: a longer sample is an error."""
    packing: bool = False
    """Fill sequences of max_length with several samples that do not see each other. A sequence then counts as one in
    global_batch_size."""
    train_on_last_turn_only: bool = False
    """Learn of a chat what the assistant writes after the last user's turn, and not its earlier turns (docs/data.md)."""
    thinking: Literal["template", "cut", "keep"] = "template"
    """The assistant's thoughts (reasoning_content, or <think> before an answer). template: shown or left out as the chat template
    does when it serves; cut: removed first, so that answers without them are learned; keep: those of earlier turns stay, by the
    template's own switch."""
    skip_bad_rows: bool = False
    """Leave out samples that cannot be used, and count them. false: they are listed, and the run ends."""
    dataset_num_proc: Positive | None = None
    """Processes that tokenise; default: as many as there are cores for them, 64 at most. Their number changes no result."""
    max_train_samples: Positive | None = None
    """Train on at most so many, from all sources together."""
    max_eval_samples: Positive | Literal["auto"] | None = "auto"
    """Hold out at most so many from each source. auto: 2000 of the held-out samples are evaluated, spread evenly, where the
    recipe names none and validation_split has its default. null: all."""

    @property
    def weighs_samples(self) -> bool:
        """Whether rows of some source say how much they weigh."""
        return any("weight" in source.columns for source in [self, *(self.datasets or [])])

    @property
    def sources(self) -> Sequence[Source]:
        """Where rows come from: the sources that datasets lists, or the one that the section itself names."""
        return self.datasets or [self]

    @property
    def most_held_out(self) -> int | None:
        """How many samples of each source may be held out; None: any number."""
        return None if self.max_eval_samples == "auto" else self.max_eval_samples
