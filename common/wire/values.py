"""What one value inside a msgpack header may be: types, ranges, lengths.

Owns the checks and their refusals. Does not know messages or their fields.
A value that does not fit raises `Mismatch`, which knows its path below the message.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from common.wire.tensors import Tensor

Take = Callable[[Any], Any]  # returns the value, or raises Mismatch

MAX_BYTES: Final = 16 * 1024
MAX_MAP_ITEMS: Final = 64


class Mismatch(Exception):
    """A value that a field may not hold; `path` is relative to the message."""

    def __init__(self, expected: str, got: object, path: str = "") -> None:
        super().__init__(expected)
        self.expected = expected
        self.got = got
        self.path = path

    def below(self, name: str) -> "Mismatch":
        """The same fault, seen from the holder of the field `name`."""
        return Mismatch(self.expected, self.got, f".{name}{self.path}")

    def __str__(self) -> str:
        shown = repr(self.got)
        shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
        return f"{self.path}: expected {self.expected}, got {type(self.got).__name__} {shown}"


def whole(lo: int, hi: int) -> Take:
    """Exactly int (bool is not), lo..hi."""

    def take(value: Any) -> int:
        if type(value) is int and lo <= value <= hi:
            return value
        raise Mismatch(f"int {lo}..{hi}", value)

    return take


def real(lo: float, hi: float) -> Take:
    """A finite float lo..hi; an int is taken too, since some languages write 1.0 as 1."""

    def take(value: Any) -> float:
        if (type(value) is float or type(value) is int) and lo <= value <= hi:
            return float(value)
        raise Mismatch(f"finite float {lo:g}..{hi:g}", value)

    return take


def text(max_chars: int) -> Take:
    """Exactly str of at most max_chars characters."""

    def take(value: Any) -> str:
        if type(value) is str and len(value) <= max_chars:
            return value
        raise Mismatch(f"str of at most {max_chars} characters", value)

    return take


Quick = Callable[[tuple[Any, ...]], bool]  # True: every item certainly fits (no loop in Python)


def all_whole(lo: int, hi: int) -> Quick:
    """Whether a non-empty tuple holds only ints lo..hi."""
    return lambda items: {*map(type, items)} == {int} and min(items) >= lo and max(items) <= hi


def all_real(lo: float, hi: float) -> Quick:
    """Whether a non-empty tuple holds only floats lo..hi; a NaN shows in the sum."""
    return lambda items: (
        {*map(type, items)} == {float}
        and math.isfinite(sum(items))
        and min(items) >= lo
        and max(items) <= hi
    )


def all_text(max_chars: int) -> Quick:
    """Whether a non-empty tuple holds only str of at most max_chars characters."""
    return lambda items: {*map(type, items)} == {str} and max(map(len, items)) <= max_chars


def many(take_one: Take, max_items: int, all_fit: Quick) -> Take:
    """A tuple of at most max_items values; `all_fit` is the short cut for the usual case."""

    def take(value: Any) -> tuple[Any, ...]:
        if type(value) is not tuple or len(value) > max_items:
            raise Mismatch(f"array of at most {max_items} items", value)
        if not value or all_fit(value):
            return value
        try:
            return tuple([take_one(item) for item in value])
        except Mismatch:
            raise _locate(take_one, value) from None

    return take


def _locate(take_one: Take, items: tuple[Any, ...]) -> Mismatch:
    """Find which item was refused; only ever called after a refusal."""
    for index, item in enumerate(items):
        try:
            take_one(item)
        except Mismatch as fault:
            return Mismatch(fault.expected, fault.got, f"[{index}]{fault.path}")
    raise AssertionError("an item was refused, then taken")


def take_flag(value: Any) -> bool:
    """Exactly bool."""
    if type(value) is bool:
        return value
    raise Mismatch("bool", value)


def take_bytes(value: Any) -> bytes:
    """Exactly bytes, at most MAX_BYTES."""
    if type(value) is bytes and len(value) <= MAX_BYTES:
        return value
    raise Mismatch(f"bytes of at most {MAX_BYTES}", value)


def take_tensor(value: Any) -> Tensor:
    """A Tensor; its inside is checked with its frame, by the codec."""
    if type(value) is Tensor:
        return value
    raise Mismatch("Tensor", value)


_SCALARS: Final = frozenset((bool, int, str))


def take_map(value: Any) -> dict[str, Any]:
    """A flat map from str to bool, int, finite float or str."""
    if not isinstance(value, Mapping) or len(value) > MAX_MAP_ITEMS:
        raise Mismatch(f"map of at most {MAX_MAP_ITEMS} items", value)
    for key, item in value.items():
        if type(key) is not str:
            raise Mismatch("str keys", key)
        if type(item) not in _SCALARS and not (type(item) is float and math.isfinite(item)):
            raise Mismatch("bool, int, finite float or str", item, f"[{key!r:.40}]")
    return dict(value)
