"""Experts chosen by sigmoid scores with a correction, and the clamped MLP they are made of.

Knows rows [R, H]. Does not know batches or devices' memory. The correction takes part in choosing
only; a chosen expert's weight is its raw score. The shared MLP is added for every row.
"""

from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from common.checkpoint.matrix import Matrix
from target_svc.models.blocks.linear import GatheredLinear, Linear
from target_svc.models.blocks.norms import silu

_SORT_FROM: Final = 64  # chosen pairs from which sorting by expert pays
_SUM_FLOOR: Final = 1e-20  # of the chosen scores


@dataclass(frozen=True, slots=True)
class Choice:
    """How a layer chooses its experts."""

    n_chosen: int
    normalize: bool  # whether the chosen scores are scaled to sum 1
    gain: float  # of the weights, after that
    limit: float  # gate at most this, up within it on both sides


@dataclass(frozen=True, slots=True)
class SigmoidExpertWeights:
    """Weights of the routed experts of one layer, in the published orientation."""

    router: mx.array  # [E, H]
    correction: mx.array  # [E]
    gate_up: Matrix  # [E, 2 I, H], gate rows first
    down: Matrix  # [E, H, I]


class ClampedMlp:
    """`down(silu(gate x) * up x)` with both factors clamped.

    Args:
        gate: [I, H].
        up: [I, H].
        down: [H, I].
        limit: see `Choice`.
    """

    def __init__(self, gate: Matrix, up: Matrix, down: Matrix, limit: float) -> None:
        self._into = Linear(gate, up)
        self._out = Linear(down)
        self._limit = limit

    def __call__(self, x: mx.array) -> mx.array:
        """Apply to x [R, H]."""
        return self._out(_clamped_swiglu(self._into(x), self._limit))


class SigmoidExperts:
    """Router, routed experts and shared MLP of one layer."""

    def __init__(self, weights: SigmoidExpertWeights, shared: ClampedMlp, choice: Choice) -> None:
        self._choice = choice
        self.shared = shared
        self._router = mx.contiguous(weights.router.T).astype(mx.float32)
        self._correction = weights.correction.astype(mx.float32)
        self._gate_up = GatheredLinear(weights.gate_up)
        self._down = GatheredLinear(weights.down)

    def __call__(self, x: mx.array) -> mx.array:
        """Apply to x [R, H]."""
        ids, weights = self._choose(x)
        outs = self._gathered(x, ids)
        routed = (weights.astype(x.dtype)[:, None, :] @ outs).squeeze(1)
        return routed + self.shared(x)

    def _choose(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Chosen ids [R, k] and weights [R, k]; equal scores: lowest id."""
        scores = mx.sigmoid(x.astype(mx.float32) @ self._router)
        order = mx.argsort(-(scores + self._correction), axis=-1)
        ids = order[:, : self._choice.n_chosen]
        weights = mx.take_along_axis(scores, ids, axis=-1)
        if self._choice.normalize:
            weights = weights / (mx.sum(weights, axis=-1, keepdims=True) + _SUM_FLOOR)
        return ids, weights * self._choice.gain

    def _gathered(self, x: mx.array, ids: mx.array) -> mx.array:
        """Outputs [R, k, H] of the experts `ids` [R, k] for x [R, H]."""
        if ids.size >= _SORT_FROM:
            return self._gathered_in_order(x, ids)
        hidden = self._gate_up(x[:, None, None, :], ids)
        return self._down(_clamped_swiglu(hidden, self._choice.limit), ids).squeeze(-2)

    def _gathered_in_order(self, x: mx.array, ids: mx.array) -> mx.array:
        order = mx.argsort(ids.flatten())
        chosen = ids.flatten()[order]
        rows = x[order // ids.shape[1]][:, None, :]
        hidden = self._gate_up(rows, chosen, is_sorted=True)
        outs = self._down(_clamped_swiglu(hidden, self._choice.limit), chosen, is_sorted=True)
        return outs.squeeze(-2)[mx.argsort(order)].reshape(*ids.shape, -1)


def _clamped_swiglu(both: mx.array, limit: float) -> mx.array:
    """`silu(gate) * up` of [.., 2 I], gate first, clamped before."""
    gate, up = mx.split(both, 2, axis=-1)
    return silu(mx.minimum(gate, limit)) * mx.clip(up, -limit, limit)
