"""What a host may say to `launch`: kinds, fields and types. Whatever else it says ends the connection to it, and no control
character of it gets to a terminal or into a log. (The far end runs without pydantic: see agent.py.)"""

import ipaddress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, create_model

from ..errors import Whose
from ..errors.console import printable
from ..errors.tables import Document, Fields
from ..train.distributed.heartbeat import Phase

Text = Annotated[str, AfterValidator(printable)]


def _all_printable(value: object) -> object:
    """A probe's facts, however deep, without what a terminal would obey."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_all_printable(part) for part in value]
    if isinstance(value, dict):
        return {printable(key): _all_printable(part) for key, part in value.items()}
    return value


Facts = Annotated[dict[str, Any], AfterValidator(_all_printable)]
Address = Annotated[str, AfterValidator(lambda text: str(ipaddress.ip_address(text)))]
Interface = Annotated[str, Field(pattern=r"^([\w.][\w.:@-]{0,14})?$")]
Code = Annotated[int, Field(ge=-64, le=255)]  # of a process; negative for a signal
Count = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=1, le=65535)]


def _message(required: Document, optional: Document | None = None, **config: str) -> type[BaseModel]:
    """A model of these fields: name -> type. An optional field that was not said has no value at all: see checked()."""
    fields: dict[str, Any] = {name: (kind, ...) for name, kind in required.items()}
    fields |= {name: (kind, None) for name, kind in (optional or {}).items()}
    options: Any = {"strict": True, **config}
    return create_model("Message", __config__=options, **fields)


_SILENT = _message({"phase": Phase, "step": Count, "seconds": float, "stopped": bool})
_WAITS = _message({}, {"collective": Text, "number": int, "group": Text})
# what a host says -> its fields
KINDS = {
    "hello": _message(
        {
            "host": Text,
            "machine": Text,
            "versions": dict[Text, Text],
            "project": Text,
            "gpus": Count | None,
            "addresses": dict[Address, Interface],
        }
    ),
    "rank": _message(
        {"rank": int},
        {
            "pid": int,
            "out": Text,
            "stage": Literal["waiting", "joined"],
            "told": Text,
            "whose": Whose,
            "hosts": list[Text],
            "code": Code,
            "follows": bool,
            "marker": bool | Literal["stopped"],
            "step": Count,
            "ended": Text,
            "asked": Text,
            "grace": float,
            "exit": Code,
            "within": Count,
            "unwatched": bool,
            "left": _SILENT,
            "silent": _SILENT | None,
            "waits": _WAITS,
            "records": Text,
        },
    ),
    "launcher": _message({"out": Text}),
    "ended": _message({"code": Code}),
    "leaving": _message({"why": Text}),
    "beat": _message({}),
    "stopped": _message({}),
    "answer": _message({"id": int}, extra="allow"),  # ANSWERS has the rest
}

# How another host reached one address of the first: the peer's address as seen there and the own interface, or the error.
_REACHED = _message({}, {"peer": Address, "interface": Interface, "error": Text})
# order -> the fields of its answer
ANSWERS = {
    "files": _message({"missing": list[Text]}),
    "progress": _message(
        {},
        {
            "checkpoint": Count,
            "step": Count,
            "started": Text,
            "first": Count,
            "stopped": Text,
            "stop": bool,
            "finished": Text,
        },
    ),
    "usage": _message({"facts": Facts}),
    "clean": _message({}),
    "check": _message({}, {"problem": Text}),
    "probe": _message({}, {"facts": Facts, "problem": Text}),
    "release": _message({}),
    "listen": _message({}, {"port": Port, "taken": Text}),
    "reach": _message({"reached": dict[Text, _REACHED]}),  # type: ignore[valid-type]
    "start": _message({}),
}


def checked(model: type[BaseModel], message: object) -> Fields:
    """The fields of a message that were said, unknown ones left out. Raises ValueError, in one line."""
    try:
        return model.model_validate(message).model_dump(exclude_unset=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
