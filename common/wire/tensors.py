"""Tensors as the wire sees them: a dtype name, a shape and a flat little-endian buffer.

Owns the dtype whitelist, the caps and the conversions from and to NumPy. Does not know MLX or
messages. Invariant: in a checked tensor, `prod(shape) * itemsize` is the byte length of `data`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from common.errors import BadTensor, TooLarge

ITEM_SIZES: Final[dict[str, int]] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint8": 1,
}
MAX_RANK: Final = 3
MAX_TENSOR_BYTES: Final = 64 * 1024 * 1024  # 8k rows of a 4096-wide bfloat16 feature

# NumPy has no bfloat16: its bits travel as uint16.
_NUMPY_TYPES: Final[dict[str, str]] = {
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "int32": "<i4",
    "uint8": "|u1",
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One array in a message; its bytes are a frame of their own.

    Building one checks nothing: `check` does, and the codec calls it in both directions.
    """

    dtype: str  # a key of ITEM_SIZES
    shape: tuple[int, ...]  # at most MAX_RANK extents, each >= 0
    data: bytes | memoryview  # C order, little-endian

    @property
    def nbytes(self) -> int:
        """Length of `data` in bytes (of a memoryview: not its `len`)."""
        return self.data.nbytes if isinstance(self.data, memoryview) else len(self.data)


def expected_bytes(dtype: object, shape: object) -> int:
    """Byte count that a dtype and a shape promise; looks at no data.

    Raises:
        BadTensor: dtype not on the whitelist, or no proper shape.
        TooLarge: over MAX_TENSOR_BYTES.
    """
    if type(dtype) is not str or dtype not in ITEM_SIZES:
        raise BadTensor(f"dtype: expected one of {', '.join(ITEM_SIZES)}, got {dtype!r:.40}")
    if type(shape) is not tuple or len(shape) > MAX_RANK:
        raise BadTensor(f"shape: expected at most {MAX_RANK} extents, got {shape!r:.40}")
    for extent in shape:
        if type(extent) is not int or extent < 0:
            raise BadTensor(f"shape: expected ints >= 0, got {shape!r:.40}")
    n_bytes = math.prod(shape) * ITEM_SIZES[dtype]
    if n_bytes > MAX_TENSOR_BYTES:
        raise TooLarge(f"tensor: expected at most {MAX_TENSOR_BYTES} bytes, got {n_bytes}")
    return n_bytes


def check(tensor: Tensor) -> None:
    """Refuse a tensor whose dtype, shape and data do not fit each other.

    Raises:
        BadTensor: wrong dtype, shape or byte count.
        TooLarge: over MAX_TENSOR_BYTES.
    """
    n_bytes = expected_bytes(tensor.dtype, tensor.shape)
    if tensor.nbytes != n_bytes:
        raise BadTensor(
            f"data: expected {n_bytes} bytes for {tensor.dtype} {list(tensor.shape)}, "
            f"got {tensor.nbytes}"
        )
    if isinstance(tensor.data, memoryview) and not tensor.data.c_contiguous:
        raise BadTensor("data: expected a C-contiguous buffer, got one with strides")


def from_numpy(array: NDArray[Any], dtype: str = "") -> Tensor:
    """Make a tensor of a NumPy array; copies only if it is not C-contiguous.

    Args:
        array: float32, float16, int32, uint8, or the bits of bfloat16 as uint16.
        dtype: wire name; needed for bfloat16 only.

    Raises:
        BadTensor: the array's type has no wire name, or is not the one that `dtype` asks for.
    """
    name = dtype or array.dtype.name
    held = _NUMPY_TYPES.get(name)
    if held is None or np.dtype(held) != array.dtype:
        raise BadTensor(
            f"dtype: expected one of {', '.join(ITEM_SIZES)}, got {array.dtype} as {name!r}"
        )
    flat = np.ascontiguousarray(array).reshape(-1)
    return Tensor(name, tuple(array.shape), flat.view(np.uint8).data)


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """View a checked tensor as a read-only NumPy array; bfloat16 comes as uint16 bits."""
    array = np.frombuffer(tensor.data, dtype=_NUMPY_TYPES[tensor.dtype]).reshape(tensor.shape)
    array.flags.writeable = False
    return array


def from_text(text: str) -> Tensor:
    """UTF-8 text as a uint8 tensor."""
    data = text.encode()
    return Tensor("uint8", (len(data),), data)


def to_text(tensor: Tensor) -> str:
    """Text of a uint8 tensor.

    Raises:
        BadTensor: not a uint8 vector of valid UTF-8.
    """
    if tensor.dtype != "uint8" or len(tensor.shape) != 1:
        raise BadTensor(f"text: expected uint8 [bytes], got {tensor.dtype} {list(tensor.shape)}")
    try:
        return str(tensor.data, "utf-8")
    except UnicodeDecodeError as fault:
        raise BadTensor(f"text: expected valid UTF-8, got {fault.reason}") from fault


def from_ids(ids: Sequence[int]) -> Tensor:
    """Token ids as an int32 tensor [N]."""
    return from_numpy(np.asarray(ids, dtype=np.int32).reshape(-1))


def to_ids(tensor: Tensor) -> list[int]:
    """Token ids of an int32 tensor [N].

    Raises:
        BadTensor: not an int32 vector, or an id is negative.
    """
    if tensor.dtype != "int32" or len(tensor.shape) != 1:
        raise BadTensor(f"ids: expected int32 [N], got {tensor.dtype} {list(tensor.shape)}")
    ids: list[int] = to_numpy(tensor).tolist()
    if ids and min(ids) < 0:
        raise BadTensor(f"ids: expected ids >= 0, got {min(ids)}")
    return ids
