"""Messages to frames and back: `[b"DF1"][msgpack header][tensor frame]*`.

Owns the byte form and its caps. Does not know sockets, routing ids or who may send what.
The header is one array: `[type number, sender's minor version, field, field, ..]`; a part within
a message is an array, a tensor field is `[dtype, shape]` and its bytes are the next frame.

Invariant: `unpack` returns a fully checked message or raises `WireError`, whatever the bytes;
`pack` refuses what `unpack` would refuse, so a slip is found on the side that made it.
Work before the first refusal is bounded by MAX_HEADER_BYTES.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgpack

from common.errors import TooLarge, WireError
from common.wire.fields import Record
from common.wire.messages import (
    TYPE_NUMBERS,
    Block,
    Features,
    Message,
    Open,
    Opened,
    Submit,
    Tokens,
    Verified,
)
from common.wire.tensors import MAX_TENSOR_BYTES, Tensor, check
from common.wire.values import MAX_MAP_ITEMS, Mismatch
from common.wire.version import MINOR

MAGIC: Final = b"DF1"
MAX_HEADER_BYTES: Final = 64 * 1024  # the worst 60 KiB header unpacks in about 5 ms
MAX_FRAMES: Final = 4  # magic, header, tensors
MAX_FRAME_BYTES: Final = MAX_TENSOR_BYTES  # what a socket should refuse by itself

Frame = bytes | memoryview

_RECORDS: Final[dict[type, tuple[int, Record]]] = {
    kind: (number, Record(kind)) for kind, number in TYPE_NUMBERS.items()
}
_BY_NUMBER: Final[dict[int, Record]] = dict(_RECORDS.values())
_PROMPT: Final = frozenset({("uint8", 1), ("int32", 1)})
_TENSOR_KINDS: Final[dict[type, frozenset[tuple[str, int]]]] = {  # (dtype, rank) by message
    Submit: _PROMPT,
    Open: _PROMPT,
    Opened: frozenset({("int32", 1)}),
    Features: frozenset({("bfloat16", 2), ("float32", 2)}),
}


def _check_block(block: Block) -> str:
    if len(block.ids) != len(block.confidences):
        return "one confidence per id"
    if len(block.q_ids) != len(block.q_probs):
        return "one probability per candidate"
    fits = not block.q_ids or (block.ids and len(block.q_ids) % len(block.ids) == 0)
    return "" if fits else "as many candidates for every id"


def _check_tokens(tokens: Tokens) -> str:
    if len(tokens.ids) != len(tokens.pieces):
        return "one piece per id"
    return "" if tokens.n_accepted <= len(tokens.ids) else "n_accepted at most the number of ids"


def _check_verified(verified: Verified) -> str:
    if len(verified.ids) != len(verified.pieces):
        return "one piece per id"
    if verified.n_accepted >= verified.rows_run:
        return "n_accepted below rows_run"
    fits = len(verified.ids) <= verified.n_accepted + 1
    return "" if fits else "at most n_accepted + 1 ids"


# Rules between the fields of one message; "" means it holds.
_RULES: Final[dict[type, Callable[[Any], str]]] = {
    Block: _check_block,
    Tokens: _check_tokens,
    Verified: _check_verified,
}


def pack(message: Message) -> list[Frame]:
    """Turn a message into frames.

    Raises:
        WireError: a field holds what its receiver would refuse; names path, expected and got.
        TooLarge: the header is over MAX_HEADER_BYTES.
    """
    kind = type(message)
    if kind not in _RECORDS:
        raise WireError(f"message: expected a class of TYPE_NUMBERS, got {kind.__name__}")
    number, record = _RECORDS[kind]
    try:
        values = record.write(message)
    except Mismatch as fault:
        raise WireError(f"{kind.__name__}{fault}") from None
    _check_rules(message)
    tensors: list[Frame] = []
    for index in record.tensor_fields:
        tensor = values[index]
        _check_tensor(kind, record.names[index], tensor)
        values[index] = (tensor.dtype, tensor.shape)
        tensors.append(tensor.data)
    try:
        header: bytes = msgpack.packb([number, MINOR, *values])
    except (ValueError, OverflowError) as fault:  # lone surrogates, ints over 64 bits in a map
        raise WireError(f"{kind.__name__}: expected packable values, got {fault}") from fault
    if len(header) > MAX_HEADER_BYTES:
        raise TooLarge(
            f"{kind.__name__}: expected a header of at most {MAX_HEADER_BYTES} bytes, "
            f"got {len(header)}"
        )
    return [MAGIC, header, *tensors]


def unpack(frames: Sequence[Frame]) -> Message:
    """Turn frames into a checked message.

    Raises:
        WireError: anything that is not exactly one message of this protocol.
        TooLarge: a frame, header or count is over its cap.
        BadTensor: a tensor's dtype, shape and frame do not fit.
    """
    number, minor, values = _unpack_header(frames)
    record = _BY_NUMBER.get(number)
    if record is None:
        raise WireError(f"type: expected a number of PROTOCOL.md, got {number}")
    name, n_fields = record.kind.__name__, len(record.names)
    if len(values) > n_fields and minor > MINOR:
        values = values[:n_fields]  # fields that a newer minor added at the end
    if len(values) != n_fields and not (minor < MINOR and record.required <= len(values)):
        raise WireError(f"{name}: expected {n_fields} fields, got {len(values)}")
    tensors = frames[2:]
    if len(tensors) != len(record.tensor_fields):
        raise WireError(
            f"{name}: expected {len(record.tensor_fields)} tensor frames, got {len(tensors)}"
        )
    if tensors:
        values = _with_tensors(record, values, tensors)
    try:
        message: Message = record.read(values)
    except Mismatch as fault:
        raise WireError(f"{name}{fault}") from None
    _check_rules(message)
    return message


def _unpack_header(frames: Sequence[Frame]) -> tuple[int, int, tuple[Any, ...]]:
    """Check the outer form, then parse; returns type number, sender's minor, field values."""
    if not 2 <= len(frames) <= MAX_FRAMES:
        raise WireError(f"frames: expected 2..{MAX_FRAMES}, got {len(frames)}")
    if frames[0] != MAGIC:
        raise WireError(f"magic: expected {MAGIC!r}, got {bytes(frames[0][:8])!r}")
    header = frames[1]
    if len(header) > MAX_HEADER_BYTES:
        raise TooLarge(f"header: expected at most {MAX_HEADER_BYTES} bytes, got {len(header)}")
    try:
        values = msgpack.unpackb(
            header,
            raw=False,
            use_list=False,
            strict_map_key=True,
            object_pairs_hook=_flat_map,
            ext_hook=_refuse_ext,
            max_ext_len=0,
            max_map_len=MAX_MAP_ITEMS,
            max_array_len=8192,
        )
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as fault:
        raise WireError(
            f"header: expected one msgpack array, got {type(fault).__name__}: {fault!s:.80}"
        ) from None
    if type(values) is not tuple or len(values) < 2:
        raise WireError(f"header: expected an array, got {type(values).__name__}")
    number, minor = values[:2]
    if type(number) is not int or type(minor) is not int or minor < 0:
        raise WireError(
            "header: expected type number and minor version, "
            f"got {type(number).__name__} and {type(minor).__name__}"
        )
    return number, minor, values[2:]


def _flat_map(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a map key occurs twice")
    return found


def _refuse_ext(code: int, _data: bytes) -> Any:
    raise ValueError(f"ext type {code}")


def _with_tensors(
    record: Record, values: tuple[Any, ...], tensors: Sequence[Frame]
) -> tuple[Any, ...]:
    """Put a checked Tensor in the place of each `[dtype, shape]`."""
    filled = list(values)
    for index, data in zip(record.tensor_fields, tensors, strict=True):
        described = filled[index]
        name = record.names[index]
        if type(described) is not tuple or len(described) != 2:
            raise WireError(f"{record.kind.__name__}.{name}: expected [dtype, shape]")
        filled[index] = tensor = Tensor(described[0], described[1], data)
        _check_tensor(record.kind, name, tensor)
    return tuple(filled)


def _check_tensor(kind: type, name: str, tensor: Tensor) -> None:
    try:
        check(tensor)
    except WireError as fault:
        raise type(fault)(f"{kind.__name__}.{name}.{fault}") from None
    if (tensor.dtype, len(tensor.shape)) not in _TENSOR_KINDS[kind]:
        allowed = " or ".join(sorted(f"{d} of rank {r}" for d, r in _TENSOR_KINDS[kind]))
        raise WireError(
            f"{kind.__name__}.{name}: expected {allowed}, "
            f"got {tensor.dtype} of rank {len(tensor.shape)}"
        )


def _check_rules(message: Message) -> None:
    rule = _RULES.get(type(message))
    broken = rule(message) if rule else ""
    if broken:
        raise WireError(f"{type(message).__name__}: expected {broken}, got {message!r:.120}")
