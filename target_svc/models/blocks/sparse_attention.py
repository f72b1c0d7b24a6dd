"""Gated grouped-query attention over the blocks an indexer keeps.

Knows one layer's rows and its KV and index keys. Does not know positions' meaning beyond counting
blocks of `ratio` tokens from 0. While no more complete blocks exist than the budget keeps, this is
dense causal attention and nothing is scored.
Invariants: blocks are kept by score, then lowest block, in every kind of forward; row i depends on
rows 0..i only.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from common.checkpoint.matrix import Matrix
from target_svc.models.blocks.attention import (
    RowPlan,
    attend,
    attend_fused,
    is_bounded,
    split_gate,
)
from target_svc.models.blocks.hyper_connection import WRITE_GAIN
from target_svc.models.blocks.linear import Linear
from target_svc.models.blocks.norms import RmsNorm, gated, is_cpu
from target_svc.models.blocks.rope import RopeTable
from target_svc.models.states.index_keys import PooledKeys
from target_svc.models.states.rows import GrowingRows


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads and widths of one layer."""

    heads: int
    kv_heads: int
    head_dim: int
    index_heads: int
    index_dim: int
    ratio: int  # tokens in a block
    kept_blocks: int  # budget in blocks


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Weights of one layer, in the published orientation; norms zero-centred."""

    q: Matrix  # [heads * (D + D), H], per head: q then gate
    k: Matrix  # [kv_heads * D, H]
    v: Matrix  # [kv_heads * D, H]
    out: Matrix  # [H, heads * D]
    q_norm: mx.array  # [D]
    k_norm: mx.array  # [D]
    index_qk: Matrix  # [(index_heads + 1) * d, H], queries then the key
    index_q_norm: mx.array  # [d]
    index_k_norm: mx.array  # [d]


class SparseAttention:
    """One layer."""

    def __init__(
        self, weights: AttentionWeights, shape: AttentionShape, rope: RopeTable, eps: float
    ) -> None:
        self._shape = shape
        self._rope = rope
        q, gate = split_gate(weights.q, shape.heads, shape.head_dim)
        gates = [] if gate is None else [gate]
        self._into = Linear(q, weights.k, weights.v, *gates, weights.index_qk)
        self._out = Linear(weights.out, gain=WRITE_GAIN)
        q_factor, k_factor = 1.0 + weights.q_norm, 1.0 + weights.k_norm
        self._scale = shape.head_dim**-0.5
        if is_cpu():  # scores come out scaled, and negative for `power` of 1/e
            q_factor = q_factor * -self._scale
        factors = [*[q_factor] * shape.heads, *[k_factor] * shape.kv_heads]
        self._qk_norm = RmsNorm(mx.stack(factors), eps)
        index_factor = (1.0 + weights.index_q_norm).astype(mx.float32)
        self._index_q_norm = RmsNorm(mx.stack([index_factor] * shape.index_heads), eps)
        self._index_k_norm = RmsNorm((1.0 + weights.index_k_norm).astype(mx.float32), eps)
        self._needs_max = not is_bounded(q_factor, k_factor)

    def __call__(
        self, x: mx.array, plan: RowPlan, keys: GrowingRows, values: GrowingRows, index: PooledKeys
    ) -> mx.array:
        """Mix x [R, H]; captures the rows' keys, values and raw index keys."""
        shape, rows = self._shape, plan.rows
        projected = self._into(x)
        ends = np.cumsum(
            [
                (shape.heads + shape.kv_heads) * shape.head_dim,
                shape.kv_heads * shape.head_dim,
                shape.heads * shape.head_dim,
            ]
        ).tolist()
        qk, v, gate, index_qk = mx.split(projected, ends, axis=-1)
        qk = self._qk_norm(qk.reshape(rows, -1, shape.head_dim))
        qk = self._rope.turn(qk, plan.cos, plan.sin).swapaxes(0, 1)
        all_keys = keys.append(qk[shape.heads :])
        v = v.reshape(rows, shape.kv_heads, shape.head_dim).swapaxes(0, 1)
        all_values = values.append(v)
        split = shape.index_heads * shape.index_dim
        raw = index.raw.append(index_qk[:, split:])
        hidden = plan.causal
        if plan.end // shape.ratio > shape.kept_blocks:
            hidden = self._hide_dropped(index_qk[:, :split], raw, plan, index)
        q = qk[: shape.heads]
        if is_cpu():
            mixed = attend(q, all_keys, all_values, hidden, needs_max=self._needs_max)
        else:
            mask = "causal" if hidden is plan.causal and rows > 1 else hidden
            mixed = attend_fused(q, all_keys, all_values, mask, self._scale)
        mixed = mixed.swapaxes(0, 1).reshape(rows, -1)
        return self._out(gated(mixed, gate))

    # ------------------------------------------------------------------ the indexer

    def _hide_dropped(
        self, queries: mx.array, raw: mx.array, plan: RowPlan, index: PooledKeys
    ) -> mx.array:
        """Additive mask [R, n]: the causal one, and -inf on every block that was not kept."""
        ratio, rows = self._shape.ratio, plan.rows
        self._pool(raw, plan.end // ratio, index)
        blocks = -(-plan.end // ratio)
        complete = mx.array((plan.base + 1 + np.arange(rows, dtype=np.int32)) // ratio)[:, None]
        is_candidate = mx.arange(blocks)[None, :] < complete
        scores = self._score(queries, plan, index.pooled(plan.end // ratio))
        if blocks > scores.shape[1]:
            scores = mx.pad(scores, [(0, 0), (0, blocks - scores.shape[1])])
        scores = mx.where(is_candidate, scores, -mx.inf)
        kept = keep_best(scores, self._shape.kept_blocks) | ~is_candidate
        bias = mx.where(kept, 0.0, -mx.inf)
        bias = mx.repeat(bias, ratio, axis=1)[:, : plan.end]
        return bias if plan.causal is None else bias + plan.causal

    def _pool(self, raw: mx.array, blocks: int, index: PooledKeys) -> None:
        """Make the pooled keys of complete blocks that have none yet."""
        start, ratio = index.n_pooled, self._shape.ratio
        if start >= blocks:
            return
        new = raw[start * ratio : blocks * ratio].astype(mx.float32)
        means = mx.mean(new.reshape(blocks - start, ratio, -1), axis=1).astype(raw.dtype)
        normed = self._index_k_norm(means.astype(mx.float32))[:, None]
        cos, sin = self._rope.rows(start * ratio, blocks * ratio, ratio)
        turned = self._rope.turn(normed, cos.astype(mx.float32), sin.astype(mx.float32))
        index.add_pooled(turned[:, 0])

    def _score(self, queries: mx.array, plan: RowPlan, pooled: mx.array) -> mx.array:
        """Scores [R, blocks], without the positive constant that orders nothing."""
        shape = self._shape
        q = queries.reshape(plan.rows, shape.index_heads, shape.index_dim).astype(mx.float32)
        q = self._index_q_norm(q)
        q = self._rope.turn(q, plan.cos.astype(mx.float32), plan.sin.astype(mx.float32))
        dots = q.reshape(-1, shape.index_dim) @ pooled.T
        return mx.sum(mx.maximum(dots, 0.0).reshape(plan.rows, shape.index_heads, -1), axis=1)


def keep_best(scores: mx.array, count: int) -> mx.array:
    """Mark the `count` best of each row; equal scores: lowest index first.

    Args:
        scores: float32 [R, n], n > count; -inf marks what may not be kept.
        count: at least 1.

    Returns:
        bool [R, n] with exactly `count` marks per row (some on -inf where too few are finite).
    """
    cut = -mx.partition(-scores, count - 1, axis=-1)[:, count - 1 : count]
    above = scores > cut
    level = scores == cut
    left = count - mx.sum(above.astype(mx.int32), axis=-1, keepdims=True)
    return above | (level & (mx.cumsum(level.astype(mx.int32), axis=-1) <= left))
