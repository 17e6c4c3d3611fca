"""What the sections of a recipe have in common. This module imports no torch."""

import typing
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

MEANS_NONE = ("chat_template",)  # keys for which none is a value, and null leaves the choice to the run


class Section(BaseModel):
    """A section of a recipe. It is frozen, refuses unknown keys, and a string below a key says what the key means."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # --help shows them
    )

    @field_validator("*", mode="before")
    @classmethod
    def _none_is_null(cls, value: object, info: Any) -> object:
        # Python writes None, YAML null, and some keys name a choice none: each may stand where one of them does.
        choices = typing.get_args(cls.model_fields[info.field_name].annotation)
        if value is None and "none" in choices:
            return "none"
        says_none = isinstance(value, str) and value.lower() == "none"
        return None if says_none and type(None) in choices and info.field_name not in MEANS_NONE else value

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: Any) -> object:
        # pydantic takes true for 1: `eval_steps: true` would evaluate at every step. A bare object fits no type.
        annotation = cls.model_fields[info.field_name].annotation
        truth = isinstance(value, bool) and bool not in (annotation, *typing.get_args(annotation))
        return object() if truth else value
