"""Hyper-connections whose streams are mixed by a doubly stochastic matrix.

Knows streams [R, S, H]. Does not know which sub-layer it serves. A read is a weighted sum of the
raw streams; a write adds the sub-layer's output by shares to streams that a matrix C has mixed:

    X'_s = post_s y + sum over r of C[r, s] X_r

C is made row by row from the streams: a softmax, then alternating column and row normalizations
(Sinkhorn and Knopp), `iterations` of columns in all. Row i depends on row i only.

Source: Xie et al., mHC (arXiv 2512.24880), in the published form of GLM-5.3-Flash.
"""

import math
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from target_svc.models.blocks.norms import Tiled, inverse_length, is_cpu
from target_svc.models.blocks.sinkhorn_kernel import weigh_kernel


@dataclass(frozen=True, slots=True)
class StreamShape:
    """How streams are read and mixed."""

    streams: int  # S
    iterations: int  # column normalizations
    eps: float  # floor of a normalization, and of a read weight
    norm_eps: float  # inside the mean square of all streams


@dataclass(frozen=True, slots=True)
class Shares:
    """How a sub-layer's output returns to the streams."""

    post: mx.array  # [R, S, 1]
    mix: mx.array  # [R, S, S], C


class SinkhornConnection:
    """Read and write of one sub-layer.

    Args:
        fn: float32 [(2 + S) S, S * H]: rows of the read, of `post`, of C row by row.
        base: float32 [(2 + S) S].
        scale: float32 [3], of the three parts.
        shape: see `StreamShape`.
    """

    def __init__(self, fn: mx.array, base: mx.array, scale: mx.array, shape: StreamShape) -> None:
        count = shape.streams
        self._shape = shape
        self._width = fn.shape[1]
        self._eps = mx.array(shape.eps)
        parts = mx.concatenate(
            [mx.broadcast_to(scale[i], (n,)) for i, n in enumerate((count, count, count * count))]
        )
        # The norm has no weight: one factor per row, applied after the product.
        self._fn = mx.contiguous((fn * (parts * math.sqrt(self._width))[:, None]).T)
        self._base = Tiled(base)
        rounds = shape.iterations
        self._kernel = None if is_cpu() else weigh_kernel(count, rounds, shape.eps)
        self._gains = Tiled(mx.array([1.0] * count + [2.0] * count))
        self._floors = Tiled(mx.array([shape.eps] * count + [0.0] * count))

    def read(self, streams: mx.array) -> tuple[mx.array, Shares]:
        """Read streams [R, S, H]: the sub-layer's input [R, H], not normed, and the shares."""
        rows = streams.shape[0]
        flat = streams.reshape(rows, self._width).astype(mx.float32)
        length = inverse_length(flat, self._shape.norm_eps * self._width)
        logits = (flat @ self._fn) * length + self._base.rows(rows)
        vectors, mix = self._weigh(logits)
        pre, post = mx.split(vectors[:, :, None], 2, axis=1)
        x = pre.swapaxes(1, 2) @ flat.reshape(streams.shape)
        dtype = streams.dtype
        return x[:, 0].astype(dtype), Shares(post.astype(dtype), mix.astype(dtype))

    def _weigh(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Read weights and shares [R, 2 S], and C [R, S, S]."""
        if self._kernel is not None:
            return self._kernel(logits)
        rows, count = logits.shape[0], self._shape.streams
        vectors, matrix = mx.split(logits, [2 * count], axis=-1)
        vectors = mx.sigmoid(vectors) * self._gains.rows(rows) + self._floors.rows(rows)
        return vectors, self._balance(mx.softmax(matrix.reshape(rows, count, count), axis=-1))

    def _balance(self, mix: mx.array) -> mx.array:
        """Make positive matrices [R, S, S] nearly doubly stochastic."""
        mix = mix + self._shape.eps
        if is_cpu():
            return self._balance_flat(mix.reshape(mix.shape[0], -1)).reshape(mix.shape)
        mix = mix / (mx.sum(mix, axis=-2, keepdims=True) + self._shape.eps)
        for _ in range(self._shape.iterations - 1):
            mix = mix / (mx.sum(mix, axis=-1, keepdims=True) + self._shape.eps)
            mix = mix / (mx.sum(mix, axis=-2, keepdims=True) + self._shape.eps)
        return mix

    def _balance_flat(self, mix: mx.array) -> mx.array:
        """The same of [R, S * S] in two operations each: sums, spread, are a product."""
        rows, columns = _summing(self._shape.streams)
        mix = mix / mx.addmm(self._eps, mix, columns)
        for _ in range(self._shape.iterations - 1):
            mix = mix / mx.addmm(self._eps, mix, rows)
            mix = mix / mx.addmm(self._eps, mix, columns)
        return mix


def write(streams: mx.array, y: mx.array, shares: Shares) -> mx.array:
    """Mix streams [R, S, H] and add y [R, H] to them."""
    return mx.addmm(shares.post * y[:, None, :], shares.mix.swapaxes(1, 2), streams)


@cache
def _summing(count: int) -> tuple[mx.array, mx.array]:
    """Matrices [S * S, S * S] that replace each entry by the sum of its row, of its column."""
    unit, ones = np.eye(count, dtype=np.float32), np.ones((count, count), np.float32)
    return mx.array(np.kron(unit, ones)), mx.array(np.kron(ones, unit))
