"""Read typed values out of a parsed `config.json`.

Owns the checks of single fields. Does not know what the fields mean. Every reader raises
`ModelMismatch` with the field's name, its value and what would be right.
"""

from collections.abc import Mapping
from typing import Any

from common.errors import ModelMismatch


def read_whole(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number; absent and null take the default, where there is one."""
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int:
        raise refuse(name, value, "a whole number")
    return value


def read_count(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number of at least 1."""
    value = read_whole(fields, name, default)
    if value < 1:
        raise refuse(name, value, "at least 1")
    return value


def read_number(fields: Mapping[str, Any], name: str, default: float) -> float:
    """A number; absent and null take the default."""
    value = fields.get(name)
    if value is None:
        return default
    if type(value) not in (int, float):
        raise refuse(name, value, "a number")
    return float(value)


def refuse(name: str, value: object, right: str) -> ModelMismatch:
    """The error for a field that is wrong: what, the value, what would be right."""
    return ModelMismatch(f"drafter config: {name} is {value!r}; it must be {right}")
