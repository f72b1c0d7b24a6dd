"""Hashed n-gram memory: which table rows a token reads, reading and adding them to the streams.

Row ids are a pure integer function of token ids, so they are made on the host and the rows come
from a memory-mapped file; nothing of the table is ever on the device but the rows of one forward.
Invariant: row ids never come from a device array, so a forward has no wait at this layer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from target_svc.models.blocks.norms import RmsNorm, gated, silu
from target_svc.models.states.rows import RowWindow

_WORD: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15  # splitmix64's increment
_LAYER_STRIDE: Final = 10007  # apart the seeds of two such layers lie
_GATE_FLOOR: Final = 1e-6


# --------------------------------------------------------------------------- row ids


@dataclass(frozen=True, slots=True)
class NgramShape:
    """Sizes of one layer's table."""

    vocab_size: int
    separator_id: int  # the look-back stops at it, and everything before the start is it
    order: int  # longest n-gram, in tokens
    heads_per_order: int
    base_rows: int
    row_multiple: int
    seed: int
    layer_index: int  # among such layers

    @property
    def heads(self) -> int:
        """Table rows read per token."""
        return (self.order - 1) * self.heads_per_order


class NgramRows:
    """Which rows a token reads.

    Attributes:
        multipliers: int64 [order].
        sizes: int64 [heads], the primes that hashes are taken modulo.
        offsets: int64 [heads], where each head's rows begin.
        n_rows: rows of the whole table, padding included.
    """

    def __init__(self, shape: NgramShape) -> None:
        self._shape = shape
        self.multipliers = np.array(_multipliers(shape), np.int64)
        self.sizes = np.array(_primes(shape), np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(self.sizes)[:-1]]).astype(np.int64)
        total = int(self.sizes.sum())
        self.n_rows = -(-total // shape.row_multiple) * shape.row_multiple

    def rows(self, tokens: Sequence[int], count: int) -> NDArray[np.int64]:
        """Row ids of the last `count` tokens.

        Args:
            tokens: `order - 1` earlier ids, then the `count` ids.
            count: at least 1.

        Returns:
            int64 [count, heads].
        """
        ids = np.asarray(tokens, np.int64)
        start = len(ids) - count
        mixed = ids[start:] * self.multipliers[0]
        is_cut = np.zeros(count, bool)
        per_order = []
        for shift in range(1, self._shape.order):
            back = ids[start - shift : len(ids) - shift]
            is_cut = is_cut | (back == self._shape.separator_id)
            seen = np.where(is_cut, self._shape.separator_id, back)
            mixed = mixed ^ (seen * self.multipliers[shift])
            per_order.append(np.repeat(mixed[:, None], self._shape.heads_per_order, axis=1))
        rows: NDArray[np.int64] = np.concatenate(per_order, axis=1) % self.sizes + self.offsets
        return rows


def _multipliers(shape: NgramShape) -> list[int]:
    half = max(1, ((1 << 63) - 1) // shape.vocab_size // 2)
    start = shape.seed + _LAYER_STRIDE * shape.layer_index
    words = [_splitmix64(start + _GOLDEN * (shift + 1)) for shift in range(shape.order)]
    return [2 * (word % half) + 1 for word in words]


def _splitmix64(value: int) -> int:
    value = (value + _GOLDEN) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def _primes(shape: NgramShape) -> list[int]:
    """This layer's share of the consecutive primes from `base_rows` up."""
    first = shape.layer_index * shape.heads
    found: list[int] = []
    candidate = shape.base_rows
    while len(found) < first + shape.heads:
        if _is_prime(candidate):
            found.append(candidate)
        candidate += 1
    return found[first:]


def _is_prime(value: int) -> bool:
    return value > 1 and all(value % q for q in range(2, math.isqrt(value) + 1))


# --------------------------------------------------------------------------- the layer


@dataclass(frozen=True, slots=True)
class NgramWeights:
    """Weights of the layer, in the published orientation; norms zero-centred."""

    key: mx.array  # [S H, P]
    value: mx.array  # [H, P]
    conv: mx.array  # [S H, 1, K]
    norm_key: mx.array  # [S H]
    norm_query: mx.array  # [S H]
    norm_conv: mx.array  # [S H]


class NgramLayer:
    """Adds gated table rows, and a dilated convolution of them, to the streams."""

    def __init__(self, weights: NgramWeights, *, streams: int, dilation: int, eps: float) -> None:
        self._streams = streams
        self._dilation = dilation
        self._into = mx.contiguous(mx.concatenate([weights.key, weights.value]).T)
        self._taps = mx.contiguous(weights.conv[:, 0, :].T)
        self._norm_key = RmsNorm((1.0 + weights.norm_key).reshape(streams, -1), eps)
        self._norm_query = RmsNorm((1.0 + weights.norm_query).reshape(streams, -1), eps)
        self._norm_conv = RmsNorm((1.0 + weights.norm_conv).reshape(streams, -1), eps)

    def __call__(self, streams: mx.array, rows: mx.array, window: RowWindow) -> mx.array:
        """The sum to add to streams [R, S, H], from table rows [R, P]."""
        count, _, hidden = streams.shape
        projected = rows @ self._into
        width = self._streams * hidden
        key = self._norm_key(projected[:, :width].reshape(streams.shape))
        match = mx.sum(key * self._norm_query(streams), axis=-1, keepdims=True) / math.sqrt(hidden)
        match = mx.sign(match) * mx.sqrt(mx.maximum(mx.abs(match), _GATE_FLOOR))
        value = gated(projected[:, None, width:], match)
        padded = window.extend(self._norm_conv(value).reshape(count, width))
        mixed = silu(self._convolve(padded, count))
        return value + mixed.reshape(streams.shape)

    def _convolve(self, padded: mx.array, count: int) -> mx.array:
        """Depthwise causal convolution with gaps; the last tap is the current row."""
        taps, width = self._taps.shape
        strides = (width, width * self._dilation, 1)
        return mx.sum(mx.as_strided(padded, (count, taps, width), strides) * self._taps, axis=1)
