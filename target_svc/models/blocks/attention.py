"""Grouped-query attention over all rows before, with or without norms, a gate and biases.

Owns the softmax that every layer of this kind shares, dense or sparse. Knows one layer's rows and
its KV. Does not know sessions. Invariant: row i depends on rows 0..i only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import mlx.core as mx
import numpy as np

from common.checkpoint.matrix import Matrix, rows_of, scaled
from target_svc.models.blocks.linear import Linear
from target_svc.models.blocks.norms import INVERSE_E, RmsNorm, constant, gated, is_cpu
from target_svc.models.blocks.rope import RopeTable
from target_svc.models.states.rows import GrowingRows

_HOST_MASK_ROWS: Final = 32
_SAFE_EXPONENT: Final = 60.0  # e^60 times any row count stays finite in float32


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What all attention layers of one forward share."""

    base: int  # absolute position of row 0
    rows: int  # R
    cos: mx.array  # [R, 1, D]
    sin: mx.array  # [R, 1, D]
    causal: mx.array | None  # additive float32 [R, base + R]; None where nothing is hidden

    @property
    def end(self) -> int:
        """Rows visible to the last row."""
        return self.base + self.rows


def plan_rows(base: int, rows: int, rope: RopeTable) -> RowPlan:
    """Plan a forward of `rows` rows after `base` committed ones."""
    cos, sin = rope.rows(base, base + rows)
    causal = causal_mask(base, rows) if rows > 1 else None
    return RowPlan(base, rows, cos, sin, causal)


def causal_mask(base: int, rows: int) -> mx.array:
    """Additive [R, base + R]: row i sees columns 0..base + i.

    Few rows are made by the host at once; many are left to the device, and to whether they are
    read at all: 512 rows after 16,000 are 32 MiB, 49 ms of the host's time.
    """
    if is_cpu() and rows <= _HOST_MASK_ROWS:
        hidden = np.zeros((rows, base + rows), np.float32)
        hidden[:, base:] = np.triu(np.full((rows, rows), -np.inf, np.float32), 1)
        return mx.array(hidden)
    is_ahead = mx.arange(base + rows)[None, :] > mx.arange(base, base + rows)[:, None]
    return mx.where(is_ahead, -mx.inf, 0.0)


def is_bounded(q_factor: mx.array, k_factor: mx.array) -> bool:
    """Whether scores of heads normed to these factors [D] stay small enough for a bare `exp`."""
    largest = q_factor.size * mx.max(mx.abs(q_factor)) * mx.max(mx.abs(k_factor))
    return bool(largest <= _SAFE_EXPONENT)  # by Cauchy-Schwarz


def attend(
    negated_q: mx.array,
    keys: mx.array,
    values: mx.array,
    hidden: mx.array | None,
    *,
    needs_max: bool,
) -> mx.array:
    """Attend by products, for CPU: `power` of 1/e is twice as fast there as `exp`.

    Args:
        negated_q: queries [heads, R, D], times minus the scale.
        keys: [kv_heads, n, D]; query head h uses key head h // (heads / kv_heads).
        values: [kv_heads, n, D].
        hidden: additive [R, n], or None.
        needs_max: whether scores may be too large for `exp` as they are.

    Returns:
        [heads, R, D].
    """
    kv_heads, dim = keys.shape[0], keys.shape[2]
    groups = negated_q.shape[0] // kv_heads
    negated = negated_q.reshape(kv_heads, -1, dim) @ keys.swapaxes(1, 2)
    if hidden is not None:
        negated = negated - mx.concatenate([hidden] * groups)
    if needs_max:
        negated = negated - mx.min(negated, axis=-1, keepdims=True)
    weights = mx.power(constant(INVERSE_E, negated), negated)
    mixed = (weights @ values) / mx.sum(weights, axis=-1, keepdims=True)
    return mixed.reshape(negated_q.shape)


def attend_fused(
    q: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None, scale: float
) -> mx.array:
    """Attend through MLX's own kernel; "causal" beats a mask array there. Shapes as `attend`."""
    if isinstance(mask, mx.array):
        mask = mask.astype(q.dtype)
    return mx.fast.scaled_dot_product_attention(
        q[None], keys[None], values[None], scale=scale, mask=mask
    )[0]


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads and widths of one layer."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """Weights of one layer, in the published orientation; None where a network has none."""

    q: Matrix  # [heads * D, H], or [heads * 2 D, H] with a gate: per head q, then its gate
    k: Matrix  # [kv_heads * D, H]
    v: Matrix  # [kv_heads * D, H]
    out: Matrix  # [H, heads * D]
    q_norm: mx.array | None = None  # [D], the full factor
    k_norm: mx.array | None = None  # [D]
    q_bias: mx.array | None = None  # [heads * D]; not with a gate
    k_bias: mx.array | None = None  # [kv_heads * D]
    v_bias: mx.array | None = None  # [kv_heads * D]
    out_bias: mx.array | None = None  # [H]


class Attention:
    """One layer of dense, causal attention."""

    def __init__(self, weights: HeadWeights, shape: HeadShape, rope: RopeTable, eps: float) -> None:
        self._shape = shape
        self._rope = rope
        self._scale = shape.head_dim**-0.5
        q, gate = split_gate(weights.q, shape.heads, shape.head_dim)
        q_bias, own_scale = weights.q_bias, -self._scale if is_cpu() else 1.0
        self._qk_norm: Callable[[mx.array], mx.array] | None = None
        self._needs_max = True
        if weights.q_norm is not None and weights.k_norm is not None:
            q_factor = weights.q_norm * own_scale
            factors = [*[q_factor] * shape.heads, *[weights.k_norm] * shape.kv_heads]
            self._qk_norm = RmsNorm(mx.stack(factors), eps)
            self._needs_max = not is_bounded(q_factor, weights.k_norm)
        else:
            q = q if own_scale == 1.0 else scaled(q, own_scale)
            q_bias = None if q_bias is None else q_bias * own_scale
        self._has_gate = gate is not None
        into = [q, weights.k, weights.v, *([] if gate is None else [gate])]
        biases = [bias for bias in (q_bias, weights.k_bias, weights.v_bias) if bias is not None]
        self._into = Linear(*into, bias=mx.concatenate(biases) if biases else None)
        self._out = Linear(weights.out, bias=weights.out_bias)
        qk_width, kv_width = (shape.heads + shape.kv_heads), shape.kv_heads
        self._ends = [qk_width * shape.head_dim, (qk_width + kv_width) * shape.head_dim]

    def __call__(
        self, x: mx.array, plan: RowPlan, keys: GrowingRows, values: GrowingRows
    ) -> mx.array:
        """Mix x [R, H]; captures the rows' keys and values."""
        shape, rows = self._shape, plan.rows
        qk, v, gate = mx.split(self._into(x), self._ends, axis=-1)
        qk = qk.reshape(rows, -1, shape.head_dim)
        if self._qk_norm is not None:
            qk = self._qk_norm(qk)
        qk = self._rope.turn(qk, plan.cos, plan.sin).swapaxes(0, 1)
        all_keys = keys.append(qk[shape.heads :])
        all_values = values.append(v.reshape(rows, -1, shape.head_dim).swapaxes(0, 1))
        q = qk[: shape.heads]
        if is_cpu():
            mixed = attend(q, all_keys, all_values, plan.causal, needs_max=self._needs_max)
        else:
            mask = "causal" if rows > 1 else None
            mixed = attend_fused(q, all_keys, all_values, mask, self._scale)
        mixed = mixed.swapaxes(0, 1).reshape(rows, -1)
        return self._out(gated(mixed, gate) if self._has_gate else mixed)


def split_gate(q: Matrix, heads: int, head_dim: int) -> tuple[Matrix, Matrix | None]:
    """Query rows [heads * D, H], and the gate's rows where they stand with them, head by head."""
    if q.shape[0] == heads * head_dim:
        return q, None
    places = mx.arange(q.shape[0]).reshape(heads, 2, head_dim)
    return rows_of(q, places[:, 0].flatten()), rows_of(q, places[:, 1].flatten())
