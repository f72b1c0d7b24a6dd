"""Attention over latent rows, without positions: keys and values are never expanded.

Knows one layer's rows and its latent cache. With the published `kv_b_proj` a head's keys are
W_k c and its values W_v c of one latent row c per token, so

    q . (W_k c) = (W_k^T q) . c          sum of p (W_v c) = W_v (sum of p c)

and all heads attend over the same cache [n, rank]. This costs less than expanding in decode, in a
verify and in chunks of fewer than `rank` rows; one form serves them all.
Invariant: row i depends on rows 0..i only.

Source: DeepSeek-AI, DeepSeek-V2 (arXiv 2405.04434), 2.1: the absorbed form.
"""

from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from common.checkpoint.matrix import Matrix, values_of
from target_svc.models.blocks.linear import Linear
from target_svc.models.blocks.norms import RmsNorm
from target_svc.models.blocks.pooled_index import PooledIndex, RowPlan
from target_svc.models.states.gated_pools import GatedPools
from target_svc.models.states.rows import GrowingRows

_MOST_SCORES: Final = 1 << 26  # that exist at a time: 256 MiB in float32


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Heads and widths of one layer."""

    heads: int
    key_dim: int  # of a head's expanded key
    value_dim: int
    rank: int  # of the cached latents
    q_rank: int


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Weights of one layer, in the published orientation."""

    q_down: Matrix  # [q_rank, H]
    q_norm: mx.array  # [q_rank], the full factor
    q_up: Matrix  # [heads * key_dim, q_rank]
    kv_down: Matrix  # [rank, H]
    kv_norm: mx.array  # [rank], the full factor
    kv_up: Matrix  # [heads * (key_dim + value_dim), rank], per head: key then value
    out: Matrix  # [H, heads * value_dim]


class LatentAttention:
    """One layer."""

    def __init__(
        self, weights: LatentWeights, index: PooledIndex, shape: LatentShape, eps: float
    ) -> None:
        self._shape = shape
        self.index = index
        self._into = Linear(weights.q_down, weights.kv_down, *index.into)
        self._q_norm = RmsNorm(weights.q_norm, eps)
        self._kv_norm = RmsNorm(weights.kv_norm, eps)
        self._q_up = Linear(weights.q_up)
        # By heads, so plain values: a seventh of the attention's weights in the published model.
        up = values_of(weights.kv_up)
        up = up.reshape(shape.heads, shape.key_dim + shape.value_dim, shape.rank)
        self._key_up = up[:, : shape.key_dim] * shape.key_dim**-0.5  # with the scores' scale
        self._value_up = mx.contiguous(up[:, shape.key_dim :].swapaxes(1, 2))
        self._out = Linear(weights.out)

    def __call__(
        self, x: mx.array, plan: RowPlan, latents: GrowingRows, pools: GatedPools
    ) -> mx.array:
        """Mix x [R, H]; captures the rows' latents and index keys."""
        shape, rows = self._shape, plan.rows
        ends = [shape.q_rank, shape.q_rank + shape.rank]
        q, kv, indexed = mx.split(self._into(x), ends, axis=-1)
        q = self._q_norm(q)
        hidden = self.index.hide(indexed, q, plan, pools)
        seen = latents.append(self._kv_norm(kv))
        q = self._q_up(q).reshape(rows, shape.heads, shape.key_dim).swapaxes(0, 1)
        mixed = self._attend(q @ self._key_up, seen, hidden) @ self._value_up
        return self._out(mixed.swapaxes(0, 1).reshape(rows, -1))

    def _attend(self, q: mx.array, seen: mx.array, hidden: mx.array | None) -> mx.array:
        """Attend q [heads, R, rank] over n latents, few enough rows at a time."""
        rows = q.shape[1]
        step = max(1, _MOST_SCORES // (self._shape.heads * seen.shape[0]))
        if rows <= step:
            return _attend_rows(q, seen, hidden)
        parts = []
        for start in range(0, rows, step):
            part = slice(start, start + step)
            parts.append(_attend_rows(q[:, part], seen, None if hidden is None else hidden[part]))
        return mx.concatenate(parts, axis=1)


def _attend_rows(q: mx.array, seen: mx.array, hidden: mx.array | None) -> mx.array:
    """Attend q [heads, R, rank] over n latents; `hidden` is additive [R, n].

    Heads and rows are one axis of two products, so that the cache is read once for all of them;
    MLX's fused attention knows no heads so wide and would read it once a head.
    """
    heads, rows, rank = q.shape
    scores = (q.reshape(-1, rank) @ seen.T).reshape(heads, rows, -1)
    if hidden is not None:
        scores = scores + hidden
    weights = mx.softmax(scores, axis=-1, precise=True).astype(q.dtype)
    return (weights.reshape(heads * rows, -1) @ seen).reshape(heads, rows, rank)
