"""Where prepared data lies, in which versions, and how its chats are written: what its reader and its writer both know."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..host import cache

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

ENCODING = 9  # raise it when the same input would be encoded differently: an unfinished run then has other data
FORMAT = 15  # of the cache: raise it when it would be stored differently, or only rare rows encoded differently
META = "meta.json"
NONE = "none"  # a recipe's chat_template where there is none: prompts and completions are joined as they are
TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class ChatFormat:
    """How chats are written.

    template: "" where there is none; stands_in: the name of the template of ours that is used for the tokenizer's own
    stops: ids of the special tokens that end the assistant's turns; own: whether the tokenizer's own template renders the same
    turn_by_turn: whether it is the tokenizer's own that is rendered, turn by turn, for want of generation marks
    own_refuses: what the tokenizer's own refuses, and the template that stands in for it renders, in words; or ""
    """

    template: str
    stands_in: str
    stops: list[int]
    own: bool
    turn_by_turn: bool = False
    own_refuses: str = ""

    def record(self, tokenizer: "PreTrainedTokenizerBase", generation: "GenerationConfig | None" = None) -> None:
        """Write down, for a model that is saved, how its chats are written and where an answer ends.

        The tokenizer gets the template that the recipe names; where it names none, the tokenizer's own stays, even if one of ours
        stood in for it. The generation config's eos_token_id gets the stops.
        """
        if self.template and not self.own:
            tokenizer.chat_template = self.template
        if self.template and generation is not None:
            there = generation.eos_token_id
            ends = [*(there if isinstance(there, list) else [there]), tokenizer.eos_token_id, *self.stops]
            stops = list(dict.fromkeys(token for token in ends if token is not None))
            if stops:
                generation.eos_token_id = stops if len(stops) > 1 else stops[0]


def folder_of(fingerprint: str) -> Path:
    """The directory of the prepared data with this fingerprint, whether it exists or not."""
    return cache.cache_directory("prepared") / fingerprint


def outdated(folder: Path) -> str:
    """Return why prepared data in a directory, where it is what was written, is not this version's, in words; "" where it is."""
    there = json.loads((folder / META).read_text())["format"]
    return "" if there == FORMAT else f"another version of Brigade wrote it (format {there}, now {FORMAT})"
