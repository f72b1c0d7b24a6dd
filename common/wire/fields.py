"""What a field of a message may hold, and how it looks inside a msgpack header.

Owns which check each field has. Does not know frames, type numbers or versions.
Readers and writers are made once, at import; no message is looked at by reflection.
"""

import dataclasses
import typing
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Final

from common.sampling import MAX_STOP_CHARS, MAX_STOPS, MAX_TOKEN_ID, MAX_TOP_LOGPROBS
from common.wire.messages import MAX_DRAFTS, MAX_SESSION_CHARS, ModelCard, RoundKey, Sampling
from common.wire.tensors import Tensor
from common.wire.values import (
    Mismatch,
    Take,
    all_real,
    all_text,
    all_whole,
    many,
    real,
    take_bytes,
    take_flag,
    take_map,
    take_tensor,
    text,
    whole,
)

MAX_STR_CHARS: Final = 48 * 1024  # the header's byte cap is the real bound
MAX_ITEMS: Final = 1024
MAX_COUNT: Final = 2**53 - 1  # what every language holds exactly
MAX_ROWS: Final = MAX_DRAFTS + 1


_COUNT: Final = whole(0, MAX_COUNT)
_TOKEN: Final = whole(0, MAX_TOKEN_ID)
_MS: Final = real(0.0, 1e12)
_SHARE: Final = real(0.0, 1.0)


def _tokens(max_items: int) -> Take:
    return many(_TOKEN, max_items, all_whole(0, MAX_TOKEN_ID))


def _shares(max_items: int) -> Take:
    return many(_SHARE, max_items, all_real(0.0, 1.0))


def _reals(lo: float, hi: float) -> Take:
    return many(real(lo, hi), MAX_ITEMS, all_real(lo, hi))


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
    "Verified.certainty": _SHARE,
    "Verified.n_accepted": whole(0, MAX_DRAFTS),
    "Verify.copy_ids": _tokens(MAX_DRAFTS),
    "Block.ids": _tokens(MAX_DRAFTS),
    "Block.confidences": _shares(MAX_DRAFTS),
    "Block.q_ids": _tokens(MAX_ITEMS),
    "Block.q_probs": _shares(MAX_ITEMS),
    "Drafted.confidences": _shares(MAX_DRAFTS),
    "Verified.ids": _tokens(MAX_ROWS),
    "Verified.pieces": _texts(MAX_ROWS),
    "Tokens.ids": _tokens(MAX_ITEMS),
    "Sampling.min_p": _SHARE,
    "Sampling.repetition_penalty": real(1e-3, 1e3),
    "Sampling.bias_ids": _tokens(MAX_ITEMS),
    "Sampling.bias_values": _reals(-100.0, 100.0),
    "Sampling.stop_ids": _tokens(MAX_STOPS),
    "Sampling.stop": many(text(MAX_STOP_CHARS), MAX_STOPS, all_text(MAX_STOP_CHARS)),
    "Sampling.logprobs": whole(-1, MAX_TOP_LOGPROBS),
    "Sampling.cascade_alpha": _SHARE,
    "Submit.claim": text(MAX_SESSION_CHARS),
    "Submit.share_scope": text(MAX_SESSION_CHARS),
    "logprobs": _reals(-1e12, 0.0),
    "top_logprobs": _reals(-1e12, 0.0),
    "top_ids": _tokens(MAX_ITEMS),
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
