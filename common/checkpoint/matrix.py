"""A matrix of a network: plain values, or packed as MLX multiplies with it.

Owns what may be done to either before it is used: rows taken, laid one under the other, stacked.
Does not know files, networks or products. Invariant: what is done to a packed matrix gives the
values that doing it to its values gives; where formats differ, values are what is left.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import mlx.core as mx

from common.checkpoint.packed import PackFormat


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix [.., out, in] in MLX's packed form.

    Attributes:
        weight: uint32 [.., out, in * bits / 32].
        scales: [.., out, in / group]; of mode "affine" in `dtype`, else uint8.
        biases: like scales, in mode "affine" only.
        form: proved by the shapes.
        dtype: of its values.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    form: PackFormat
    dtype: mx.Dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its values."""
        return (*self.weight.shape[:-1], self.scales.shape[-1] * self.form.group)

    def values(self) -> mx.array:
        """The values, rounded once; lazy."""
        form = self.form
        values = mx.dequantize(
            self.weight,
            self.scales,
            self.biases,
            group_size=form.group,
            bits=form.bits,
            mode=form.mode,
        )
        return values.astype(self.dtype)

    def of_parts(self, weight: mx.array, scales: mx.array, biases: mx.array | None) -> "Packed":
        """The same format with other parts."""
        return replace(self, weight=weight, scales=scales, biases=biases)


Matrix = mx.array | Packed


def values_of(matrix: Matrix) -> mx.array:
    """Plain values; lazy."""
    return matrix.values() if isinstance(matrix, Packed) else matrix


def rows_of(matrix: Matrix, index: slice | mx.array) -> Matrix:
    """Some rows of a matrix [out, in], by place."""
    if not isinstance(matrix, Packed):
        return matrix[index]
    biases = None if matrix.biases is None else matrix.biases[index]
    return matrix.of_parts(matrix.weight[index], matrix.scales[index], biases)


def can_join(one: Matrix, other: Matrix) -> bool:
    """Whether `join` leaves them as they are stored: both plain, or packed the same way."""
    if isinstance(one, Packed) and isinstance(other, Packed):
        return one.form == other.form and one.dtype == other.dtype
    return not isinstance(one, Packed) and not isinstance(other, Packed)


def join(parts: Sequence[Matrix], *, axis: int = -2) -> Matrix:
    """Lay matrices with the same columns one under the other.

    Args:
        parts: at least one; [.., out, in].
        axis: of the rows, or 0 for matrices that are stacked already.

    Returns:
        Packed where all parts are, the same way; else values.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if not isinstance(first, Packed) or not all(can_join(first, part) for part in parts):
        return mx.concatenate([values_of(part) for part in parts], axis=axis)
    packed = cast("Sequence[Packed]", parts)
    biases = [part.biases for part in packed if part.biases is not None]
    return first.of_parts(
        mx.concatenate([part.weight for part in packed], axis=axis),
        mx.concatenate([part.scales for part in packed], axis=axis),
        mx.concatenate(biases, axis=axis) if biases else None,
    )


def stack(parts: Sequence[Matrix]) -> Matrix:
    """Matrices [out, in] of one shape as one [n, out, in]; packed where all are, the same way."""
    return join([_lifted(part) for part in parts], axis=0)


def _lifted(matrix: Matrix) -> Matrix:
    if not isinstance(matrix, Packed):
        return matrix[None]
    biases = None if matrix.biases is None else matrix.biases[None]
    return matrix.of_parts(matrix.weight[None], matrix.scales[None], biases)


def scaled(matrix: Matrix, factor: float) -> Matrix:
    """A matrix times a number; packed where that leaves its format, so in mode "affine"."""
    if not isinstance(matrix, Packed):
        return matrix * factor
    if matrix.biases is None:  # scales of eight bits hold powers of two, or end at 448
        return matrix.values() * factor
    return matrix.of_parts(matrix.weight, matrix.scales * factor, matrix.biases * factor)
