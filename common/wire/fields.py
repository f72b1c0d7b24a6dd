"""What a field of a message may hold, and how it looks inside a msgpack header.

Owns types, ranges and lengths of fields. Does not know frames, type numbers or versions.
Readers and writers are made once, at import; no message is looked at by reflection.
A value that does not fit raises `Mismatch`, which knows its path below the message.
"""

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final

from common.wire.messages import MAX_DRAFTS, MAX_SESSION_CHARS, ModelCard, RoundKey, Sampling
from common.wire.tensors import Tensor

Take = Callable[[Any], Any]  # returns the value, or raises Mismatch

MAX_STR_CHARS: Final = 48 * 1024  # the header's byte cap is the real bound
MAX_BYTES: Final = 16 * 1024
MAX_ITEMS: Final = 1024
MAX_MAP_ITEMS: Final = 64
MAX_COUNT: Final = 2**53 - 1  # what every language holds exactly
MAX_TOKEN_ID: Final = 2**31 - 1
MAX_ROWS: Final = MAX_DRAFTS + 1


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


_COUNT: Final = whole(0, MAX_COUNT)
_TOKEN: Final = whole(0, MAX_TOKEN_ID)
_MS: Final = real(0.0, 1e12)
_SHARE: Final = real(0.0, 1.0)


def _tokens(max_items: int) -> Take:
    return many(_TOKEN, max_items, all_whole(0, MAX_TOKEN_ID))


def _shares(max_items: int) -> Take:
    return many(_SHARE, max_items, all_real(0.0, 1.0))


def _texts(max_items: int) -> Take:
    return many(text(MAX_STR_CHARS), max_items, all_text(MAX_STR_CHARS))


_BY_TYPE: Final[dict[Any, Take]] = {
    bool: take_flag,
    int: _COUNT,
    float: real(-1e300, 1e300),
    str: text(MAX_STR_CHARS),
    bytes: take_bytes,
    tuple[int, ...]: many(_COUNT, MAX_ITEMS, all_whole(0, MAX_COUNT)),
    tuple[float, ...]: many(_MS, MAX_ITEMS, all_real(0.0, 1e12)),
    tuple[str, ...]: _texts(MAX_ITEMS),
    Tensor: take_tensor,
}
_BY_NAME: Final[dict[str, Take]] = {
    "session": text(MAX_SESSION_CHARS),
    "anchor_id": _TOKEN,
    "seed": whole(0, 2**64 - 1),
    "temperature": real(0.0, 1e6),
    "top_p": _SHARE,
    "retry_after_s": _MS,
    "ms": _MS,
    "wait_ms": _MS,
    "deadline_ms": _MS,
    "block_deadline_ms": _MS,
    "progress_age_ms": _MS,
    "Submit.deadline_ms": _COUNT,
    "Progress.done": _SHARE,
    "Draft.n_drafts": whole(1, MAX_DRAFTS),
    "Verify.rows": whole(1, MAX_ROWS),
    "Verified.rows_run": whole(1, MAX_ROWS),
    "Verified.n_accepted": whole(0, MAX_DRAFTS),
    "Verify.copy_ids": _tokens(MAX_DRAFTS),
    "Block.ids": _tokens(MAX_DRAFTS),
    "Block.confidences": _shares(MAX_DRAFTS),
    "Drafted.confidences": _shares(MAX_DRAFTS),
    "Verified.ids": _tokens(MAX_ROWS),
    "Verified.pieces": _texts(MAX_ROWS),
    "Tokens.ids": _tokens(MAX_ITEMS),
}


class Record:
    """One dataclass as a msgpack array: its fields in order, parts as arrays within.

    Attributes:
        names: the fields.
        required: how many at the start have no default.
        tensor_fields: indices of the fields that travel as frames.
    """

    def __init__(self, kind: type) -> None:
        hints = typing.get_type_hints(kind)
        fields = dataclasses.fields(kind)
        self.kind = kind
        self.names = tuple(field.name for field in fields)
        self.required = sum(
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            for field in fields
        )
        self.tensor_fields = tuple(
            index for index, name in enumerate(self.names) if hints[name] is Tensor
        )
        pairs = [_reader_and_writer(kind.__name__, name, hints[name]) for name in self.names]
        self._reads = tuple(read for read, _ in pairs)
        self._writes = tuple(write for _, write in pairs)
        getter = attrgetter(*self.names)
        self._values: Take = getter if len(self.names) > 1 else lambda record: (getter(record),)

    def read(self, values: Any) -> Any:
        """Build the dataclass from its unpacked array; absent trailing defaults are filled in."""
        if type(values) is not tuple or not self.required <= len(values) <= len(self.names):
            raise Mismatch(f"array of {len(self.names)} fields", values)
        try:
            arguments = [read(value) for read, value in zip(self._reads, values, strict=False)]
        except Mismatch:
            raise self._locate(self._reads, values) from None
        return self.kind(*arguments)

    def write(self, record: Any) -> list[Any]:
        """The array of a dataclass's fields, every one checked as if it were read."""
        if type(record) is not self.kind:
            raise Mismatch(self.kind.__name__, record)
        values = self._values(record)
        try:
            return [write(value) for write, value in zip(self._writes, values, strict=True)]
        except Mismatch:
            raise self._locate(self._writes, values) from None

    def _locate(self, takes: tuple[Take, ...], values: tuple[Any, ...]) -> Mismatch:
        for name, take, value in zip(self.names, takes, values, strict=False):
            try:
                take(value)
            except Mismatch as fault:
                return fault.below(name)
        raise AssertionError("a field was refused, then taken")


def _optional(take_one: Take) -> Take:
    return lambda value: None if value is None else take_one(value)


def _reader_and_writer(owner: str, name: str, hint: Any) -> tuple[Take, Take]:
    """The checks of one field: an entry under `Owner.field`, then `field`, then its type."""
    if hint in PARTS:
        return PARTS[hint].read, PARTS[hint].write
    if typing.get_origin(hint) is Mapping:
        return take_map, take_map
    inner = [part for part in typing.get_args(hint) if part in PARTS]
    if inner:  # `ModelCard | None`
        part = PARTS[inner[0]]
        return _optional(part.read), _optional(part.write)
    take = _BY_NAME.get(f"{owner}.{name}") or _BY_NAME.get(name) or _BY_TYPE[hint]
    return take, take


PARTS: Final[dict[Any, Record]] = {}
PARTS.update({part: Record(part) for part in (RoundKey, Sampling, ModelCard)})
