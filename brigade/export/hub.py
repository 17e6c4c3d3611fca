"""Put an exported directory on the Hub, with a model card that is made from the run."""

from fnmatch import fnmatchcase
from functools import partial
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from ..train.host.hub import endpoint, hub_is_away, refusal
from .card import CARD

if TYPE_CHECKING:
    from huggingface_hub import HfApi

PLACE = "flag --push"
# Of files that lie there and are not replaced: by these from_pretrained and servers choose what they load.
_STALE = (
    *("*.safetensors", "*.bin", "*.gguf", "*.index.json"),
    *("config.json", "adapter_config.json", "processor_config.json", "*preprocessor_config.json"),
)
_TOKEN = "`hf auth login`, or set HF_TOKEN to a token that may write ({hub}/settings/tokens)"


def check_push(name: str, private: bool) -> str:
    """Return the full name, OWNER/NAME, of a repository that may be written to. Nothing is written yet.

    Raises UserError where there is no network, no token or one that may not write, where a model card of someone else's stands
    there, and where it should be private and is public.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(PLACE, f"{name!r} is no name of a repository: {error}", "name it OWNER/NAME") from None
    away = hub_is_away()
    if away:
        raise UserError(PLACE, away.partition(",")[0], "push where there is a network: `hf upload NAME DEST`")
    cure = _TOKEN.format(hub=endpoint())
    if get_token() is None:
        raise UserError(PLACE, "there is no token for the Hub, and only its owner may write a model", cure)
    api = HfApi(endpoint=endpoint())
    try:
        owner = api.whoami()["name"]
        full = name if "/" in name else f"{owner}/{name}"
        there = _card_of(api, full)
        public = private and _is_public(api, full)
    except Exception as error:
        raise _refused(error, name) from None
    if there and CARD not in there:
        problem = f"{endpoint()}/{full} has a model card that export did not write, and it would be overwritten"
        raise UserError(PLACE, problem, "name another repository, or remove its README.md")
    if public:
        problem = f"{endpoint()}/{full} is there already, and everybody can read it"
        raise UserError("flag --private", problem, "make it private in its settings, or name another repository")
    return full


def _is_public(api: "HfApi", name: str) -> bool:
    """Whether a repository is there, and not private."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return not api.model_info(name).private
    except RepositoryNotFoundError:
        return False


def _card_of(api: "HfApi", name: str) -> str:
    """Return the text of a repository's README.md, "" where there is none."""
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(api.hf_hub_download(name, "README.md")).read_text()
    except (EntryNotFoundError, RepositoryNotFoundError):
        return ""


def push(folder: Path, name: str, private: bool) -> tuple[str, list[str]]:
    """Upload all files of a directory to a repository, which is created where it is missing, and remove in the same commit the
    weights and configs of an earlier model that they do not replace. Returns its address, and what was removed.

    Raises UserError where the Hub refuses; what was exported stays where it is.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint())
    try:
        api.create_repo(name, private=private or None, exist_ok=True)
        at_top = [path for path in api.list_repo_files(name) if "/" not in path and not (folder / path).exists()]
        stale = [path for path in at_top if any(map(partial(fnmatchcase, path), _STALE))]
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message="Upload a model trained with Brigade",
            delete_patterns=[escape(path) for path in stale] or None,
        )
    except Exception as error:
        refused = _refused(error, name)
        cure = f"{refused.cure}; then `hf upload {name} {folder}`, which is whole"
        raise UserError(PLACE, refused.problem, cure) from None
    return f"{endpoint()}/{name}", stale


def _refused(error: Exception, name: str) -> UserError:
    """What a user reads where the Hub takes nothing."""
    problem, cure = refusal(error, name)
    if getattr(getattr(error, "response", None), "status_code", None) == 403:
        problem, cure = f"the token's account may not write to {name} (403)", _TOKEN.format(hub=endpoint())
    return UserError(PLACE, problem, cure or "try again later: https://status.huggingface.co")
