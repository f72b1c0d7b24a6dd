"""Norms and gates, in the form each kind of device is fast in.

Knows that MLX on CPU spends 15 ns on one `exp` and 6 ns on one `power`, has no fused norm there,
and has both on GPU. Does not know networks. Invariant: both forms compute the same function.
"""

import math
from typing import Final

import mlx.core as mx

LOG2_E: Final = math.log2(math.e)


def is_cpu() -> bool:
    """Whether the default device is the CPU."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def gate_scale() -> float:
    """Factor to fold into the weights that make the logits of `gated`."""
    return -LOG2_E if is_cpu() else 1.0


def gated(value: mx.array, logits: mx.array) -> mx.array:
    """`value * sigmoid(true logits)`, where `logits` are the true ones times `gate_scale()`."""
    if is_cpu():
        return value / (1.0 + mx.power(2.0, logits))
    return value * mx.sigmoid(logits)


def silu(x: mx.array) -> mx.array:
    """`x * sigmoid(x)`."""
    if is_cpu():
        return x / (1.0 + mx.power(2.0, x * -LOG2_E))
    return x * mx.sigmoid(x)


def inverse_length(x: mx.array, floor: float) -> mx.array:
    """`1 / sqrt(sum(x^2) + floor)` over the last axis, kept as size 1."""
    return mx.rsqrt(mx.sum(mx.square(x), axis=-1, keepdims=True) + floor)


class RmsNorm:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis.

    Args:
        weight: [..., H], the full factor (for zero-centred norms the caller has added 1); it may
            differ between groups, such as heads or streams.
        eps: inside the mean.
    """

    def __init__(self, weight: mx.array, eps: float) -> None:
        size = weight.shape[-1]
        self._eps = eps
        self._floor = eps * size
        self._weight = weight * math.sqrt(size) if is_cpu() else weight
        self._on_cpu = is_cpu()

    def __call__(self, x: mx.array) -> mx.array:
        """Normalize x [..., H]."""
        if self._on_cpu:
            return x * inverse_length(x, self._floor) * self._weight
        return mx.fast.rms_norm(x, None, self._eps) * self._weight
