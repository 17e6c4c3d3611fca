"""What a run and the code that builds its data both know: versions, where files lie, and how chats are written."""

import glob
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import cache
from ..recipe.files import find

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENCODING = 8  # raise it when the same input would be encoded differently: an unfinished run then has other data
FORMAT = 10  # of the cache: raise it when it would be stored differently, or rare rows alone encoded differently
META = "meta.json"
NONE = "none"  # as chat_template: there is none, and prompts and completions are joined as they are
TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class ChatFormat:
    """How chats are written. template: "" where there is none; stands_in: the name of the template of ours that is used
    for the tokenizer's own; stops: ids of the special tokens with which it ends the assistant's turns; own: whether the
    tokenizer has a template already that renders so"""

    template: str
    stands_in: str
    stops: list[int]
    own: bool

    def record(self, tokenizer: "PreTrainedTokenizerBase", generation: Any = None) -> None:
        """Have what is saved say how its chats are written and where an answer ends: the tokenizer gets the template that
        the recipe names (where it names none, the tokenizer's own stays, also if one of ours stood in for it), and the
        generation config's eos_token_id the stops."""
        if self.template and not self.own:
            tokenizer.chat_template = self.template
        if self.template and generation is not None:
            there = generation.eos_token_id
            ends = [*(there if isinstance(there, list) else [there]), tokenizer.eos_token_id, *self.stops]
            if found := list(dict.fromkeys(token for token in ends if token is not None)):
                generation.eos_token_id = found if len(found) > 1 else found[0]


def folder_of(fingerprint: str) -> Path:
    return cache.cache_directory("prepared") / fingerprint


def is_whole(folder: Path) -> bool:
    try:
        return json.loads((folder / META).read_text())["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        return False


def paths_of(name: str, place: str = "") -> list[Path]:
    """The files of a recipe's pattern or name, in the order of their names. Raises UserError at `place` where there are
    none."""
    found = sorted(glob.glob(str(Path(name).expanduser()), recursive=True))  # noqa: PTH207
    return [Path(path) for path in found] or [find(name, place, "data file")]
