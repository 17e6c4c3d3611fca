"""Chats to token ids and labels: a template with generation marks says which tokens are the assistant's.

Encoded once per content (data, tokenizer, template, length) into a cache that all ranks of a host read.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from ..errors import UserError
from ..flags import Settings
from ..recipe import find
from . import sources
from .sampling import IGNORED

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

TEMPLATES = Path(__file__).with_name("templates")
_FORMAT = 1  # raise it when the same input would be encoded differently


def cache_directory() -> Path:
    """Where derived files lie: $BRIGADE_CACHE, or ~/.cache/brigade."""
    return Path(os.environ.get("BRIGADE_CACHE", "~/.cache/brigade")).expanduser()


@dataclass(frozen=True)
class Encoded:
    """Training and held-out samples ({"input_ids", "labels"} of equal length each), with their fingerprint.

    dropped: samples without a supervised token within max_length; cut: samples longer than max_length
    """

    train: "Dataset"
    heldout: "Dataset"
    fingerprint: str
    dropped: int
    cut: int


def load_template(settings: Settings, tokenizer: "PreTrainedTokenizerBase") -> str:
    """The chat template to use. Raises UserError when there is none or it lacks generation marks."""
    name = settings.recipe.data.chat_template
    place = settings.place("chat_template")
    known = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
    if name in known:
        template = (TEMPLATES / f"{name}.jinja").read_text()
    elif name:
        path = find(name, place, f"chat template (or one of: {', '.join(known)})")
        if not path.is_file():
            raise UserError(place, f"{name!r} is a directory, not a file", "name a .jinja file")
        template = path.read_text()
    else:
        template = tokenizer.chat_template or ""
    if "{% generation" not in template and "{%- generation" not in template:
        # The stock templates of Llama 3, Qwen 3 and Gemma 3 have none: every label would be masked (trl PR #4201).
        problem = "the chat template has no {% generation %} marks, so no token would be supervised"
        raise UserError(place, problem, f"set chat_template to one of: {', '.join(known)}, or to a .jinja file")
    return template


def prepare(settings: Settings, tokenizer: "PreTrainedTokenizerBase") -> Encoded:
    """Training and held-out samples of a recipe, from the cache where the same content was encoded before.

    Raises UserError for missing, empty or broken data and for data without any supervised token.
    """
    from datasets import load_from_disk
    from filelock import FileLock

    data, cache = settings.recipe.data, cache_directory()
    template = load_template(settings, tokenizer)
    train_file, heldout_file = sources.files(settings, cache)
    named = [train_file.read_bytes() if train_file else repr((data.dataset_name, data.dataset_config_name)).encode()]
    named += [heldout_file.read_bytes()] if heldout_file else []
    named += sources.local_digests(settings)
    options = [data.max_length, data.max_train_samples, data.max_eval_samples, data.validation_split]
    tokenizer_json = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab()))
    key = hashlib.sha256()
    for part in [
        str(_FORMAT).encode(),
        *named,
        tokenizer_json.encode(),
        template.encode(),
        json.dumps(options).encode(),
    ]:
        key.update(hashlib.sha256(part).digest())
    fingerprint = key.hexdigest()[:16]
    folder = cache / "encoded" / fingerprint
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # the first rank of the host encodes, the others wait and read
        if not (folder / "counts.json").exists():
            _encode_into(folder, settings, tokenizer, template, train_file, heldout_file)
    counts = json.loads((folder / "counts.json").read_text())
    train, heldout = (load_from_disk(str(folder / split)) for split in ("train", "heldout"))
    return Encoded(train, heldout, fingerprint, counts["dropped"], counts["cut"])


def encode_chat(tokenizer: "PreTrainedTokenizerBase", messages: list[Any], template: str) -> dict[str, list[int]]:
    """Token ids and labels of one chat; labels are IGNORED except on the assistant's own tokens."""
    encoded = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    labels = [token if own else IGNORED for token, own in zip(ids, mask, strict=True)]
    labels[0] = IGNORED  # nothing comes before it that could predict it
    return {"input_ids": ids, "labels": labels}


def _encode_into(folder: Path, settings: Settings, tokenizer: Any, template: str, train_file: Path | None,
                 heldout_file: Path | None) -> None:  # fmt: skip
    from datasets import Dataset

    data = settings.recipe.data
    if train_file:
        train: list[sources.Chat] = list(sources.read_jsonl(train_file))
        heldout = list(sources.read_jsonl(heldout_file)) if heldout_file else None
    else:
        train, heldout = sources.from_datasets(settings)
    if heldout_file and not train_file:
        heldout = list(sources.read_jsonl(heldout_file))
    if heldout is None:
        train, heldout = _split(train, data.validation_split)
    parts = {"train": train[: data.max_train_samples], "heldout": heldout[: data.max_eval_samples]}
    counts = {"dropped": 0, "cut": 0}
    for split, chats in parts.items():
        samples = list(_encode_all(chats, tokenizer, template, data.max_length, counts))
        if not samples:
            where = train_file if split == "train" else heldout_file or train_file
            raise UserError(
                str(where or data.dataset_name),
                f"none of its {len(chats)} {split} samples has a supervised token within {data.max_length} tokens",
                "check that chats have assistant turns, or raise max_length or the number of samples",
            )
        columns = {name: [sample[name] for sample in samples] for name in ("input_ids", "labels")}
        Dataset.from_dict(columns).save_to_disk(str(folder / split))
    (folder / "counts.json").write_text(json.dumps(counts))  # last: its presence says that the rest is whole


def _encode_all(chats: Iterable[sources.Chat], tokenizer: Any, template: str, max_length: int, counts: dict[str, int]):
    for chat in chats:
        try:
            sample = encode_chat(tokenizer, chat["messages"], template)
        except TemplateError as error:  # its syntax, or a chat that it refuses: roles that do not alternate, ...
            line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            raise UserError(f"the chat template{line}", f"{error} (at a chat that begins {str(chat['messages'])[:80]})",
                            "mend the template or the chat") from None  # fmt: skip
        counts["cut"] += len(sample["input_ids"]) > max_length
        sample = {name: ids[:max_length] for name, ids in sample.items()}
        if any(label != IGNORED for label in sample["labels"]):
            yield sample
        else:
            counts["dropped"] += 1


def _split(chats: list[sources.Chat], share: float) -> tuple[list[sources.Chat], list[sources.Chat]]:
    """Hold out a share of the chats, spread evenly, at least one of them where there are two."""
    held = max(1, round(len(chats) * share)) if len(chats) > 1 else 0
    chosen = set(np.linspace(0, len(chats) - 1, held, dtype=int).tolist())
    return (
        [c for i, c in enumerate(chats) if i not in chosen],
        [c for i, c in enumerate(chats) if i in chosen] or chats,
    )
