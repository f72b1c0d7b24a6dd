"""The indexer over pools of tokens: which pools a query attends to.

Knows one layer's index keys and how they are pooled and scored. Does not know attention. A pool is
`pool` consecutive tokens counted from 0; its key is a mean of its tokens' keys, weighted per
channel by a softmax of learned gates. Tokens after the last full pool are always attended to.
Invariants: pools are kept by score, then lowest pool, in every kind of forward; row i depends on
rows 0..i only; while no more full pools exist than the budget keeps, nothing is scored.
"""

from dataclasses import dataclass
from typing import Final

import mlx.core as mx
import numpy as np

from common.checkpoint.matrix import Matrix
from target_svc.models.blocks.linear import Linear
from target_svc.models.blocks.sparse_attention import keep_best
from target_svc.models.states.gated_pools import GatedPools

_KEY_EPS: Final = 1e-6  # of the keys' layer norm


@dataclass(frozen=True, slots=True)
class IndexShape:
    """Heads, widths and budget."""

    heads: int
    dim: int
    pool: int  # tokens in a pool
    kept_pools: int  # budget in pools

    @property
    def width(self) -> int:
        """Of the projected rows: key, pool gate, head weights."""
        return 2 * self.dim + self.heads


@dataclass(frozen=True, slots=True)
class IndexWeights:
    """Weights of one layer, in the published orientation; d = dim."""

    q: Matrix  # [heads * d, q rank], of the normed query latents
    k: Matrix  # [d, H]
    k_norm: mx.array  # [d]
    k_norm_bias: mx.array  # [d]
    head_weights: Matrix  # [heads, H]
    gate: mx.array  # [d, H]
    offsets: mx.array  # [pool, d], added to the gates by place in the pool


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What all attention layers of one forward share."""

    base: int  # absolute position of row 0
    rows: int  # R
    causal: mx.array | None  # additive float32 [R, base + R]; None where nothing is hidden

    @property
    def end(self) -> int:
        """Rows visible to the last row."""
        return self.base + self.rows


def plan_rows(base: int, rows: int) -> RowPlan:
    """Plan a forward of `rows` rows after `base` committed ones."""
    if rows == 1:
        return RowPlan(base, rows, None)
    hidden = np.zeros((rows, base + rows), np.float32)
    hidden[:, base:] = np.triu(np.full((rows, rows), -np.inf, np.float32), 1)
    return RowPlan(base, rows, mx.array(hidden))


class PooledIndex:
    """The indexer of one layer.

    Attributes:
        into: [.., H] each, `width` rows in all, that attention joins to its own projection.
    """

    def __init__(self, weights: IndexWeights, shape: IndexShape) -> None:
        self._shape = shape
        self.into = (weights.k, weights.gate, weights.head_weights)
        self._q = Linear(weights.q)
        self._k_norm = weights.k_norm.astype(mx.float32)
        self._k_norm_bias = weights.k_norm_bias.astype(mx.float32)
        self._offsets = weights.offsets.astype(mx.float32)

    def hide(
        self, projected: mx.array, latents: mx.array, plan: RowPlan, pools: GatedPools
    ) -> mx.array | None:
        """Capture the rows' index keys and say what each row may not see.

        Args:
            projected: [R, width], the layer's input through `into`.
            latents: [R, q rank], normed.
            plan: of this forward.
            pools: of this layer.

        Returns:
            Additive float32 [R, n]: the causal mask, and -inf on every pool that was not kept.
            None where nothing is hidden.
        """
        shape = self._shape
        keys, gates, head_weights = mx.split(projected, [shape.dim, 2 * shape.dim], axis=-1)
        keys = mx.fast.layer_norm(
            keys.astype(mx.float32), self._k_norm, self._k_norm_bias, _KEY_EPS
        ).astype(gates.dtype)
        full = pools.extend(mx.concatenate([keys, gates], axis=-1))
        if full.shape[0]:
            pools.add(self._pool(full))
        if plan.end // shape.pool <= shape.kept_pools:
            return plan.causal
        return self._hide_dropped(self._score(latents, head_weights, pools.keys), plan)

    def _pool(self, raw: mx.array) -> mx.array:
        """Keys [n, d] of n full pools' raw rows [n * pool, 2 d]."""
        grouped = raw.astype(mx.float32).reshape(-1, self._shape.pool, raw.shape[1])
        keys, gates = mx.split(grouped, 2, axis=-1)
        return mx.sum(mx.softmax(gates + self._offsets, axis=1) * keys, axis=1)

    def _score(self, latents: mx.array, head_weights: mx.array, keys: mx.array) -> mx.array:
        """Scores [R, pools], without the positive constants that order nothing."""
        shape, rows = self._shape, latents.shape[0]
        q = self._q(latents).astype(mx.float32).reshape(-1, shape.dim)
        dots = mx.maximum(q @ keys.T, 0.0).reshape(rows, shape.heads, -1)
        return (head_weights.astype(mx.float32)[:, None, :] @ dots)[:, 0]

    def _hide_dropped(self, scores: mx.array, plan: RowPlan) -> mx.array:
        pool = self._shape.pool
        full = (plan.base + 1 + np.arange(plan.rows, dtype=np.int32)) // pool
        is_candidate = mx.arange(scores.shape[1])[None, :] < mx.array(full)[:, None]
        ranked = mx.where(is_candidate, scores, -mx.inf)
        kept = keep_best(ranked, self._shape.kept_pools) | ~is_candidate
        hidden = mx.repeat(mx.where(kept, 0.0, -mx.inf), pool, axis=1)
        tail = plan.end - hidden.shape[1]
        if tail:
            hidden = mx.pad(hidden, [(0, 0), (0, tail)])
        return hidden if plan.causal is None else hidden + plan.causal
