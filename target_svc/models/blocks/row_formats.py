"""How the rows of a host table are stored, and the numbers they mean.

Knows float32, float16 and bfloat16 rows, FP8 rows under one scale, and affine groups. Does not know
which rows are wanted, caches or MLX. All arithmetic is NumPy's, on the host.
Invariant: a row's values depend on its stored bytes alone, and equal what the reference makes of
them bit by bit: `mx.dequantize` for groups, float8_e4m3fn times the scale for FP8.

NumPy has no bfloat16: values are float32, float16, or the bits of bfloat16 as uint16.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from common.errors import ModelMismatch
from target_svc.models.blocks.mapped_rows import MappedRows

FLOAT32: Final = np.dtype(np.float32)
FLOAT16: Final = np.dtype(np.float16)
BFLOAT16_BITS: Final = np.dtype(np.uint16)

#: Container spelling -> NumPy's.
STORED: Final[dict[str, np.dtype[Any]]] = {
    "F32": FLOAT32,
    "F16": FLOAT16,
    "BF16": BFLOAT16_BITS,
}
_CODES: Final = np.arange(256)
_BITS: Final = (2, 4, 8)  # a group's codes never straddle bytes


class RowFormat(Protocol):
    """Rows of one table, as numbers.

    Attributes:
        pieces: the stored tensors that a row is spread over.
        n_rows: valid ids are 0..n_rows-1.
        width: values of a row.
        values: NumPy dtype of what `read` returns; see the module.
        is_computed: whether a row takes arithmetic to make.
    """

    pieces: Sequence[MappedRows]
    n_rows: int
    width: int
    values: np.dtype[Any]
    is_computed: bool

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Values [N, width] of rows [N]."""


def to_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    """Values of any of the three dtypes as float32, exactly."""
    if values.dtype == BFLOAT16_BITS:
        wide = values.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return values.astype(np.float32, copy=False)


def from_float32(values: NDArray[np.float32], wanted: np.dtype[Any]) -> NDArray[Any]:
    """Round float32 to the nearest value of `wanted`, ties to even."""
    if wanted == BFLOAT16_BITS:
        bits = values.view(np.uint32)
        return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return values.astype(wanted, copy=False)


def convert(values: NDArray[Any], wanted: np.dtype[Any]) -> NDArray[Any]:
    """Values as `wanted`; unchanged where they are that already."""
    return values if values.dtype == wanted else from_float32(to_float32(values), wanted)


class PlainRows:
    """Floats as they are; see `RowFormat`."""

    is_computed = False

    def __init__(self, rows: MappedRows, values: np.dtype[Any]) -> None:
        if rows.dtype not in STORED:
            raise ModelMismatch(
                f"n-gram table has dtype {rows.dtype!r}; right are {sorted(STORED)}, F8_E4M3 with "
                "a weight_scale, or U32 with scales and biases"
            )
        self.pieces: Sequence[MappedRows] = (rows,)
        self.n_rows, self.width, self.values = rows.n_rows, rows.columns, values
        self._stored = STORED[rows.dtype]

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """See `RowFormat`."""
        return convert(self.pieces[0].read(rows).view(self._stored), self.values)


class Fp8Rows:
    """FP8 E4M3 under one scale; see `RowFormat`."""

    is_computed = True

    def __init__(self, rows: MappedRows, scale: np.float32, values: np.dtype[Any]) -> None:
        self.pieces: Sequence[MappedRows] = (rows,)
        self.n_rows, self.width, self.values = rows.n_rows, rows.columns, values
        self._value_of = from_float32(e4m3_values() * scale, values)

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """See `RowFormat`."""
        return self._value_of.take(self.pieces[0].read(rows))


def e4m3_values() -> NDArray[np.float32]:
    """What each FP8 E4M3 code means (no infinities; two codes are not numbers): float32 [256]."""
    exponent, fraction = (_CODES >> 3) & 15, _CODES & 7
    normal = np.ldexp(1 + fraction / 8, exponent - 7)
    size = np.where(exponent == 0, np.ldexp(fraction / 8, -6), normal)
    size[(_CODES & 127) == 127] = np.nan
    return np.where(_CODES < 128, size, -size).astype(np.float32)


class AffineRows:
    """Codes of a few bits, `code * scale + bias` group by group; see `RowFormat`.

    Args:
        codes: U32 [rows, width * bits / 32], the first code in the lowest bits.
        scales: [rows, groups] of one float dtype.
        biases: as scales.
        width: values of a row.
        values: float32 computes in float32, as MLX does with scales of float32; any other computes
            in the scales' own dtype and rounds after each of the two steps.
    """

    is_computed = True

    def __init__(
        self,
        codes: MappedRows,
        scales: MappedRows,
        biases: MappedRows,
        width: int,
        values: np.dtype[Any],
    ) -> None:
        self.pieces: Sequence[MappedRows] = (codes, scales, biases)
        self.n_rows, self.width, self.values = codes.n_rows, width, values
        bits, rest = divmod(codes.columns * 32, width)
        groups = scales.columns
        if codes.dtype != "U32" or rest or bits not in _BITS or width % groups:
            raise ModelMismatch(
                f"n-gram table has {codes.dtype} codes [.., {codes.columns}] and {groups} groups "
                f"for rows of {width} values; right is U32 with {list(_BITS)} bits a value"
            )
        if scales.dtype not in STORED or (scales.dtype, scales.columns, scales.n_rows) != (
            biases.dtype,
            biases.columns,
            codes.n_rows,
        ):
            raise ModelMismatch(
                f"n-gram table has {scales.dtype} scales [{scales.n_rows}, {groups}] and "
                f"{biases.dtype} biases [{biases.n_rows}, {biases.columns}]; right are two alike, "
                f"one row for each of {codes.n_rows}"
            )
        self.bits, self.group_size = bits, width // groups
        self._stored = STORED[scales.dtype]
        self._step = FLOAT32 if values == FLOAT32 else self._stored
        shifts = np.arange(0, 8, bits)
        self._codes_of = ((_CODES[:, None] >> shifts) & ((1 << bits) - 1)).astype(np.float32)

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """See `RowFormat`."""
        codes, scales, biases = (piece.read(rows) for piece in self.pieces)
        out = self._codes_of.take(codes, axis=0).reshape(len(rows), -1, self.group_size)
        with np.errstate(all="ignore"):  # a damaged scale shows in the scores, and is caught there
            out *= to_float32(scales.view(self._stored))[:, :, None]
            out = self._rounded(out)
            out += to_float32(biases.view(self._stored))[:, :, None]
        return from_float32(self._rounded(out).reshape(len(rows), self.width), self.values)

    def _rounded(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return values if self._step == FLOAT32 else to_float32(from_float32(values, self._step))
