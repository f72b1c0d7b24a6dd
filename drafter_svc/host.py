"""The drafter's operations in NumPy, for CPU.

Owns the forms that are fast on the host. Does not know layers, sessions or lazy arrays: every call
computes at once, in float32. Invariant: equal to `device` within rounding, name by name; meanings
and shapes stand in `kernels.Kernels`.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def kept(weight: mx.array) -> Floats:
    """Copy out of MLX."""
    return np.array(weight.astype(mx.float32), order="C")


def head(weight: mx.array) -> Floats:
    """Transposed in memory: the largest product of a block is a quarter faster so."""
    return kept(weight.T)


def blank(shape: tuple[int, ...], dtype: mx.Dtype) -> Floats:
    """Zeros; float32 whatever the weights are stored in."""
    return np.zeros(shape, np.float32)


def joined(arrays: Sequence[Floats], axis: int) -> Floats:
    """Concatenate."""
    return np.concatenate(arrays, axis=axis)


def taken_in(rows: NDArray[Any] | mx.array, dtype: mx.Dtype) -> Floats:
    """Rows as float32; an MLX array is waited for."""
    return rows.astype(np.float32, copy=False) if isinstance(rows, np.ndarray) else kept(rows)


def submit(arrays: Sequence[Floats]) -> None:
    """Nothing is lazy here."""


def finished(*arrays: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Nothing is lazy here."""
    return arrays


def looked_up(table: Floats, ids: Sequence[int]) -> Floats:
    """Rows of a table."""
    return table[list(ids)]


def mask(bias: Floats, group_size: int, dtype: mx.Dtype) -> Floats:
    """As it is; `attended` repeats it."""
    return bias


def rotation(turns: NDArray[np.complex64]) -> NDArray[np.complex64]:
    """As they are."""
    return turns


def normed(rows: Floats, weight: Floats, eps: float) -> Floats:
    """RMS norm over the last axis."""
    return rows * _inverse_length(rows, eps) * weight


def turned(heads: Floats, factors: Floats, eps: float, turns: NDArray[np.complex64]) -> Floats:
    """RMS norm of heads, factors, rotation."""
    even = np.multiply(heads, _inverse_length(heads, eps), order="C")
    even *= factors
    pairs = even.view(np.complex64)
    pairs *= turns
    return even


def mixed(rows: Floats, coefficients: Floats) -> Floats:
    """Weighted sum over the taps of every row."""
    B, k, groups, group = coefficients.shape
    parts = rows.reshape(B, groups, group)
    total = coefficients[:, -1] * parts
    for back in range(1, min(k, B)):
        total[back:] += coefficients[back:, k - 1 - back] * parts[:-back]
    return total.reshape(rows.shape)


def gated(gate_up: Floats) -> Floats:
    """SwiGLU."""
    half = gate_up.shape[-1] // 2
    gate = gate_up[:, :half]
    with np.errstate(over="ignore"):  # e^-gate may be infinite: the result is then 0, as it should
        weights = np.exp(-gate)
    weights += np.float32(1)
    np.divide(gate, weights, out=weights)
    weights *= gate_up[:, half:]
    return weights


def attended(
    q: Floats, keys: Floats, values: Floats, context: tuple[Floats, Floats], mask: Floats
) -> Floats:
    """Softmax over context and block, without copying either."""
    past_keys, past_values = context
    C = past_keys.shape[1]
    weights = np.empty((*q.shape[:2], C + keys.shape[1]), np.float32)
    np.matmul(q, past_keys.swapaxes(1, 2), out=weights[:, :, :C])
    np.matmul(q, keys.swapaxes(1, 2), out=weights[:, :, C:])
    each = weights.reshape(len(q), -1, *mask.shape)  # a view: one query head at a time
    each += mask
    weights -= weights.max(axis=-1, keepdims=True)
    np.exp(weights, out=weights)
    total = weights.sum(axis=-1, keepdims=True)
    result = weights[:, :, :C] @ past_values
    result += weights[:, :, C:] @ values
    result /= total
    return result


def product(rows: Floats, weight: Floats) -> Floats:
    """Matrix product, padded to a number of rows that OpenBLAS is fast at."""
    n = rows.shape[0]
    size = n if n == 1 else 4 if n <= 4 else -(-n // 8) * 8  # 7 rows cost 1.4 times 8, 3 rows 4
    if size == n:
        return rows @ weight
    padded = np.zeros((size, rows.shape[1]), np.float32)
    padded[:n] = rows
    return (padded @ weight)[:n]


def scores(hidden: Floats, weight: Floats, multiplier: float, softcap: float) -> Floats:
    """Logits, scaled and capped."""
    logits = product(hidden, weight)
    if multiplier != 1.0:
        logits *= multiplier
    if softcap:
        logits = np.tanh(logits / softcap) * softcap
    return logits


def top_ids(logits: Floats, K: int) -> NDArray[np.int64]:
    """The K best ids of each row, ascending.

    Values are partitioned rather than ids, which NumPy does with vector instructions, five times
    as fast. What reaches the K-th best value is the answer, unless there are ties or NaN.
    """
    n, V = logits.shape
    floor = np.partition(logits, V - K, axis=1)[:, V - K, None]
    found = np.flatnonzero(logits >= floor)
    if found.size == n * K:
        return found.reshape(n, K) % V
    return np.sort(np.argpartition(logits, V - K, axis=1)[:, V - K :], axis=1)


def along(logits: Floats, ids: NDArray[np.int64]) -> Floats:
    """Logits at ids."""
    return logits[np.arange(len(ids))[:, None], ids]


def best_ids(logits: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Argmax and its probability."""
    peaks = logits.max(axis=1, keepdims=True)
    return logits.argmax(axis=1), 1 / np.exp(logits - peaks).sum(axis=1)


def _inverse_length(rows: Floats, eps: float) -> Floats:
    """1 / sqrt(mean(x^2) + eps) over the last axis; one product is a faster sum than `sum`."""
    squares = np.multiply(rows, rows, order="C").reshape(-1, rows.shape[-1])
    means = squares @ _mean(rows.shape[-1])
    means += eps
    return np.power(means, -0.5, out=means).reshape(*rows.shape[:-1], 1)


@cache
def _mean(size: int) -> Floats:
    return np.full(size, 1 / size, np.float32)
