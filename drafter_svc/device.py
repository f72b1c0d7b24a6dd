"""The drafter's operations in MLX, for Metal and CUDA.

Owns the forms that a device is fast in. Does not know layers or sessions. Everything is lazy but
`finished`. Invariant: equal to `host` within rounding, name by name; meanings and shapes stand in
`kernels.Kernels`.
"""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

_STRIP: Final = 64  # ids per strip of the two-stage top-K; 16 strips of 64 hold the 16 best ids


def kept(weight: mx.array) -> mx.array:
    """Evaluate, contiguous."""
    weight = mx.contiguous(weight)
    mx.eval(weight)
    return weight


def head(weight: mx.array) -> mx.array:
    """A view, so that a tied head costs no memory."""
    return kept(weight).T


def blank(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Zeros."""
    return mx.zeros(shape, dtype)


def joined(arrays: Sequence[mx.array], axis: int) -> mx.array:
    """Concatenate."""
    return mx.concatenate(list(arrays), axis=axis)


def taken_in(rows: NDArray[Any] | mx.array, dtype: mx.Dtype) -> mx.array:
    """Rows in the weights' dtype."""
    return (rows if isinstance(rows, mx.array) else mx.array(rows)).astype(dtype)


def submit(arrays: Sequence[mx.array]) -> None:
    """Hand to the device."""
    mx.async_eval(list(arrays))


def finished(*arrays: mx.array) -> tuple[NDArray[Any], ...]:
    """Evaluate together and read."""
    mx.eval(arrays)
    return tuple(np.array(array) for array in arrays)


def looked_up(table: mx.array, ids: Sequence[int]) -> mx.array:
    """Rows of a table."""
    return table[mx.array(list(ids), mx.int32)]


def mask(bias: NDArray[np.float32], group_size: int, dtype: mx.Dtype) -> mx.array:
    """Repeated once per query head that shares a key head."""
    return mx.array(np.tile(bias, (group_size, 1))).astype(dtype)


def rotation(turns: NDArray[np.complex64]) -> mx.array:
    """Sent to the device."""
    return mx.array(turns)


def normed(rows: mx.array, weight: mx.array, eps: float) -> mx.array:
    """RMS norm over the last axis."""
    return mx.fast.rms_norm(rows, weight, eps)


def turned(heads: mx.array, factors: mx.array, eps: float, turns: mx.array) -> mx.array:
    """RMS norm of heads, factors, rotation, in float32 between."""
    even = mx.fast.rms_norm(heads, None, eps) * factors
    return (even.view(mx.complex64) * turns).view(mx.float32).astype(heads.dtype)


def mixed(rows: mx.array, coefficients: mx.array) -> mx.array:
    """Weighted sum over the taps of every row, which one strided view of padded rows meets."""
    B, k, groups, group = coefficients.shape
    H = rows.shape[1]
    padded = mx.pad(rows, [(k - 1, 0), (0, 0)])
    windows = mx.as_strided(padded, (B, k, groups, group), (H, H, group, 1))
    return (coefficients * windows).sum(axis=1).reshape(B, H)


def gated(gate_up: mx.array) -> mx.array:
    """SwiGLU."""
    gate, up = mx.split(gate_up, 2, axis=-1)
    return gate * mx.sigmoid(gate) * up


def attended(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    context: tuple[mx.array, mx.array],
    mask: mx.array,
) -> mx.array:
    """Softmax over context and block, in two products so that the store is not copied."""
    past_keys, past_values = context
    C = past_keys.shape[1]
    scores = mx.concatenate([q @ past_keys.swapaxes(1, 2), q @ keys.swapaxes(1, 2)], axis=-1)
    weights = mx.softmax(scores + mask, axis=-1, precise=True)
    return weights[:, :, :C] @ past_values + weights[:, :, C:] @ values


def product(rows: mx.array, weight: mx.array) -> mx.array:
    """Matrix product."""
    return rows @ weight


def scores(hidden: mx.array, weight: mx.array, multiplier: float, softcap: float) -> mx.array:
    """Logits, scaled and capped in float32."""
    logits = (hidden @ weight).astype(mx.float32)
    if multiplier != 1.0:
        logits = logits * multiplier
    if softcap:
        logits = mx.tanh(logits / softcap) * softcap
    return logits


def top_ids(logits: mx.array, K: int) -> mx.array:
    """The K best ids of each row, int32, ascending.

    In two stages, because a partition of a whole vocabulary costs more than the head: an id among
    the K best lies in one of the K strips with the best maxima.
    """
    n, V = logits.shape
    if V <= K * _STRIP:
        best = mx.argpartition(logits, V - K, axis=-1)[:, V - K :]
        return mx.sort(best, axis=-1).astype(mx.int32)
    if V % _STRIP:
        logits = mx.pad(logits, [(0, 0), (0, -V % _STRIP)], constant_values=-mx.inf)
    strips = logits.reshape(n, -1, _STRIP)
    n_strips = strips.shape[1]
    best = mx.argpartition(strips.max(axis=-1), n_strips - K, axis=-1)[:, n_strips - K :]
    values = mx.take_along_axis(strips, best[..., None], axis=1).reshape(n, K * _STRIP)
    inner = mx.argpartition(values, K * _STRIP - K, axis=-1)[:, K * _STRIP - K :]
    ids = mx.take_along_axis(best, inner // _STRIP, axis=-1) * _STRIP + inner % _STRIP
    return mx.sort(ids.astype(mx.int32), axis=-1)


def along(logits: mx.array, ids: mx.array) -> mx.array:
    """Logits at ids."""
    return mx.take_along_axis(logits, ids, axis=-1)


def best_ids(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Argmax and its probability."""
    peaks = logits.max(axis=-1)
    probabilities = mx.exp(peaks - mx.logsumexp(logits, axis=-1))
    return mx.argmax(logits, axis=-1).astype(mx.int32), probabilities
