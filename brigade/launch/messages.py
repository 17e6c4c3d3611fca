"""What a host may say to `launch`: kinds, fields and types. Whatever else it says ends the connection to it, and no control
character of it gets to a terminal or into a log. (The far end runs without pydantic: see agent.py.)"""

import ipaddress
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

# Escape sequences (colours, titles, links), then every other control character but tab and line feed.
_CONTROL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]P^_X][^\x07\x1b]*(?:\x07|\x1b\\))|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """`text` without what a terminal would obey."""
    return _CONTROL.sub("", text)


Text = Annotated[str, AfterValidator(printable)]
Address = Annotated[str, AfterValidator(lambda text: str(ipaddress.ip_address(text)))]
Interface = Annotated[str, Field(pattern=r"^([\w.][\w.:@-]{0,14})?$")]
Code = Annotated[int, Field(ge=-64, le=255)]  # of a process; negative for a signal


class _Message(BaseModel):
    model_config = ConfigDict(strict=True)


class _Hello(_Message):
    host: Text
    machine: Text
    versions: dict[Text, Text]
    project: Text
    gpus: Annotated[int, Field(ge=0)] | None
    addresses: dict[Address, Interface]


class _Rank(_Message):
    rank: int
    pid: int = 0
    out: Text = ""
    stage: Literal["waiting", "joined"] = "waiting"
    told: Text = ""
    code: Code = 0
    follows: bool = True
    marker: bool = True
    exit: Code = 0
    unwatched: bool = True


class _Answer(_Message):
    model_config = ConfigDict(strict=True, extra="allow")  # ANSWERS has the rest
    id: int


class _Output(_Message):
    out: Text


class _Ended(_Message):
    code: Code


class _Why(_Message):
    why: Text


KINDS: dict[str, type[_Message]] = {
    "hello": _Hello,
    "answer": _Answer,
    "rank": _Rank,
    "launcher": _Output,
    "ended": _Ended,
    "leaving": _Why,
    "beat": _Message,
    "stopped": _Message,
    "bye": _Message,
}


class _Way(_Message):
    """How another host reached one address of the first: its address as seen there and the interface, or the error."""

    peer: Address = ""
    interface: Interface = ""
    error: Text = ""


class _Missing(_Message):
    missing: list[Text]


class _Port(_Message):
    port: Annotated[int, Field(ge=1, le=65535)]


class _Taken(_Message):
    taken: Text = ""


class _Ways(_Message):
    ways: dict[Text, _Way]


class _There(_Message):
    there: bool


# order -> its answer
ANSWERS: dict[str, type[_Message]] = {
    "files": _Missing,
    "listen": _Port,
    "port": _Taken,
    "reach": _Ways,
    "start": _Message,
    "marker": _There,
}


def checked(model: type[_Message], message: Any) -> dict[str, Any]:
    """The fields of a message that were said, unknown ones left out. Raises ValueError, in one line."""
    try:
        return model.model_validate(message).model_dump(exclude_unset=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
