"""Norms, gates and small constants, in the form each kind of device is fast in.

Knows what MLX costs on CPU: 4 us for any operation, 15 ns for one `exp` (6 ns for one `power`), a
node more for every broadcast, and no fused norm. Does not know networks.
Invariant: all forms compute the same function.
"""

import math
from functools import cache, lru_cache
from typing import Final

import mlx.core as mx

INVERSE_E: Final = math.exp(-1.0)  # in float32 off by 2.5e-8: e^-10 by 2.5e-7 of itself
_POWER_FROM: Final = 600  # elements from which `power` beats `sigmoid` on CPU
_CONSTANT_LIMIT: Final = 32_768  # elements; larger constants are broadcast instead of kept
_TILED_ROWS: Final = 16  # forwards of so many rows get constants of their own


@cache
def is_cpu() -> bool:
    """Whether the default device is the CPU; asked once, so choose the device before loading."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


@lru_cache(maxsize=1024)
def _kept(value: float, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.full(shape, value, dtype=dtype)


def constant(value: float, like: mx.array) -> mx.array | float:
    """`value` in the shape of `like` where that is small, so that nothing is broadcast."""
    return _kept(value, like.shape, like.dtype) if like.size <= _CONSTANT_LIMIT else value


class Tiled:
    """A constant that is the same for every row, kept in full for small forwards.

    Args:
        value: [..] without the axis of rows.
        axis: where rows are inserted.
    """

    def __init__(self, value: mx.array, axis: int = 0) -> None:
        self._value = mx.expand_dims(value, axis)
        self._axis = axis if axis >= 0 else self._value.ndim + axis
        self._tiles: dict[int, mx.array] = {}

    def rows(self, count: int) -> mx.array:
        """The constant for `count` rows; broadcastable where they are many."""
        if count > _TILED_ROWS:
            return self._value
        if count not in self._tiles:
            shape = list(self._value.shape)
            shape[self._axis] = count
            self._tiles[count] = mx.contiguous(mx.broadcast_to(self._value, shape))
        return self._tiles[count]


def gated(value: mx.array, logits: mx.array) -> mx.array:
    """`value * sigmoid(logits)`."""
    if is_cpu() and logits.size >= _POWER_FROM:
        return value / (constant(1.0, logits) + mx.power(constant(INVERSE_E, logits), logits))
    return value * mx.sigmoid(logits)


def silu(x: mx.array) -> mx.array:
    """`x * sigmoid(x)`."""
    return gated(x, x)


def inverse_length(x: mx.array, floor: float) -> mx.array:
    """`1 / sqrt(sum(x^2) + floor)` over the last axis, kept as size 1."""
    total = mx.sum(mx.square(x), axis=-1, keepdims=True)
    return mx.rsqrt(total + constant(floor, total))


class RmsNorm:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis of x [R, .., H].

    Args:
        weight: [.., H], one row's full factor (for zero-centred norms the caller has added 1); it
            may differ between groups, such as heads or streams.
        eps: inside the mean.
    """

    def __init__(self, weight: mx.array, eps: float) -> None:
        size = weight.shape[-1]
        self._eps = eps
        self._floor = eps * size
        self._on_cpu = is_cpu()
        self._weight = Tiled(weight * math.sqrt(size) if self._on_cpu else weight)

    def __call__(self, x: mx.array) -> mx.array:
        """Normalize x."""
        weight = self._weight.rows(x.shape[0])
        if self._on_cpu:
            return x * inverse_length(x, self._floor) * weight
        return mx.fast.rms_norm(x, None, self._eps) * weight
