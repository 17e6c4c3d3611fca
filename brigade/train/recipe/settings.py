"""What one command asks for: a recipe with flags over it (flags.py), and where the run lies."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from ...errors.tables import Fields
from .objectives import MODEL
from .schema import SECTION_OF, Recipe
from .training_section import TrainingSection


@dataclass(frozen=True)
class Settings:
    """What one command asks for: a recipe with flags over it, and where the run lies.

    sources: where each key's value comes from, for messages ("recipes/tiny/full.yaml", "flag --bf16", "default")
    remote: the URL in object storage to which the output goes; output_dir is then where it lies on this host
    overridden: one line per recipe value that a flag replaced, or that another value makes void
    by_proof: keys for which the recipe says `auto`; `recipe` has their defaults, or what with_training() has put there
    by_memory: keys that say `auto`, and are not decided yet; `recipe` has the values of schema.BY_MEMORY
    decided: {key: why} of those that were
    argv: the flags as they were given, without what a launcher puts between them
    needs_code: whether the recipe's own trust_remote_code is true, which only the flag permits
    allowed: of files with Python code that the recipe may name (program.py), the digests that --allow_code gives
    """

    recipe: Recipe
    recipe_path: Path
    output_dir: Path | None = None
    resume_from_checkpoint: str | None = None
    fresh: bool = False
    rehearse: bool = False
    prepare: bool = False
    sources: dict[str, str] = field(default_factory=dict)
    overridden: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    by_proof: tuple[str, ...] = ()
    needs_code: bool = False
    remote: str = ""
    allowed: tuple[str, ...] = ()
    by_memory: tuple[str, ...] = ()
    decided: Fields = field(default_factory=dict)

    def with_training(self, **values: object) -> "Settings":
        """These settings with other values of keys of the recipe's training section."""
        training = self.recipe.training.model_copy(update=values)
        return replace(self, recipe=self.recipe.model_copy(update={"training": training}))

    def deciding(self, values: Fields, why: str) -> "Settings":
        """These settings with values for all of by_memory; those that `values` lacks stay as they are."""
        return replace(self.with_training(**values), by_memory=(), decided=dict.fromkeys(self.by_memory, why))

    def with_model(self, **values: object) -> "Settings":
        """These settings with other values of keys of the recipe's model section."""
        model = self.recipe.model.model_copy(update=values)
        return replace(self, recipe=self.recipe.model_copy(update={"model": model}))

    def of_second(self, named: str, key: str = "reference") -> "Settings":
        """These settings with the reference or the teacher as model and its own tokenizer, without adapters, and not in 4 bits.

        named: objectives.MODEL, a directory or a name on the Hub, whose errors then name the `key`
        """
        whole = self.with_model(use_peft=False, load_in_4bit=False)
        if named == MODEL:
            return whole
        sources = self.sources | dict.fromkeys(("model_name_or_path", "tokenizer_name_or_path"), self.place(key))
        own = {"model_name_or_path": named, "tokenizer_name_or_path": None, "revision": None, "from_scratch": False}
        return replace(whole.with_model(**own), sources=sources)

    @property
    def before_proofs(self) -> Recipe:
        """The recipe by which runs are told apart, whatever their GPUs have proven."""
        defaults = {key: TrainingSection.model_fields[key].default for key in self.by_proof}
        training = self.recipe.training.model_copy(update=defaults)
        return self.recipe.model_copy(update={"training": training})

    def document(self) -> Fields:
        """The recipe for a YAML file: with `auto` again where proofs decide."""
        document = self.recipe.model_dump(mode="json")
        document["training"] |= dict.fromkeys(self.by_proof, "auto")
        return document

    @property
    def name(self) -> str:
        """`qwen3-8b-full` for recipes/qwen3-8b/full.yaml; a run's own run.yaml keeps its directory's name."""
        if self.recipe_path.name == "run.yaml":
            return self.recipe_path.parent.name
        return f"{self.recipe_path.parent.name}-{self.recipe_path.stem}"

    def directory(self, strategy: str) -> Path:
        """Where the run lies: the directory that was named, or outputs/RECIPE-STRATEGY; a rehearsal beside it."""
        where = self.output_dir or Path("outputs") / f"{self.name}-{strategy}"
        return where.parent / f"rehearsal-{where.name}" / "run" if self.rehearse else where

    def place(self, key: str) -> str:
        """Where a key's value stands or would stand, for an error's first line."""
        return self.sources.get(key) or f"{self.recipe_path}: {SECTION_OF[key]}.{key}"
