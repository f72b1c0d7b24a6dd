"""Mixture of experts with one shared, gated expert.

Knows rows [R, H]. Does not know batches or devices' memory. Two ways of the same sum: chosen
experts one by one (`gather_mm`), or, where all experts together are small, every expert in one
product with weight exactly 0 for those not chosen.
"""

from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from target_svc.models.blocks.hyper_connection import WRITE_GAIN
from target_svc.models.blocks.norms import silu

_DENSE_LIMIT: Final = 4096  # experts x width up to which one product beats many small ones
_SORT_FROM: Final = 64  # chosen pairs from which sorting by expert pays


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of one layer, in the published orientation."""

    router: mx.array  # [E, H]
    gate_up: mx.array  # [E, 2 I, H], gate rows first
    down: mx.array  # [E, H, I]
    shared_gate_up: mx.array  # [2 J, H]
    shared_down: mx.array  # [H, J]
    shared_switch: mx.array  # [1, H]


class Experts:
    """Router, routed experts and shared expert of one layer.

    Args:
        weights: see `ExpertWeights`.
        n_chosen: experts per token.
        normalize: whether the chosen probabilities are scaled to sum 1.
    """

    def __init__(self, weights: ExpertWeights, n_chosen: int, *, normalize: bool) -> None:
        self._n_experts, self._inner = weights.down.shape[0], weights.down.shape[2]
        self._n_chosen = n_chosen
        self._normalize = normalize
        shared = weights.shared_down.shape[1]
        self._n_shared = shared
        self._always = mx.contiguous(
            mx.concatenate([weights.shared_gate_up, weights.router, weights.shared_switch]).T
        )
        self._shared_down = mx.contiguous(weights.shared_down.T) * WRITE_GAIN
        self._gate_up = mx.contiguous(weights.gate_up.swapaxes(1, 2))
        self._down = mx.contiguous(weights.down.swapaxes(1, 2)) * WRITE_GAIN
        self._dense = self._make_dense(weights)

    def __call__(self, x: mx.array) -> mx.array:
        """Apply to x [R, H]; the result [R, H] is times `WRITE_GAIN`."""
        if self._dense is not None and 2 * x.shape[0] * self._n_chosen > self._n_experts:
            return self._all_at_once(x, *self._dense)
        return self._one_by_one(x)

    # ------------------------------------------------------------------ routing

    def _choose(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Chosen ids [R, k] and weights [R, k] of router logits [R, E]; equal logits: lowest id."""
        logits = logits.astype(mx.float32)
        ids = mx.argsort(-logits, axis=-1)[:, : self._n_chosen]
        if self._normalize:
            return ids, mx.softmax(mx.take_along_axis(logits, ids, axis=-1), axis=-1)
        return ids, mx.take_along_axis(mx.softmax(logits, axis=-1), ids, axis=-1)

    # ------------------------------------------------------------------ chosen experts only

    def _one_by_one(self, x: mx.array) -> mx.array:
        always = x @ self._always
        at = 2 * self._n_shared
        ids, weights = self._choose(always[:, at : at + self._n_experts])
        switch = mx.sigmoid(always[:, at + self._n_experts :])
        shared = _swiglu(always[:, :at]) * switch
        routed = self._gathered(x, ids, weights.astype(x.dtype))
        return routed + shared @ self._shared_down

    def _gathered(self, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        if ids.size >= _SORT_FROM:
            return self._gathered_in_order(x, ids, weights)
        hidden = mx.gather_mm(x[:, None, None, :], self._gate_up, rhs_indices=ids)
        out = mx.gather_mm(_swiglu(hidden) * weights[..., None, None], self._down, rhs_indices=ids)
        return mx.sum(out.squeeze(-2), axis=1)

    def _gathered_in_order(self, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        order = mx.argsort(ids.flatten())
        chosen = ids.flatten()[order]
        rows = x[order // self._n_chosen][:, None, :]
        hidden = mx.gather_mm(rows, self._gate_up, rhs_indices=chosen, sorted_indices=True)
        out = mx.gather_mm(
            _swiglu(hidden) * weights.flatten()[order][:, None, None],
            self._down,
            rhs_indices=chosen,
            sorted_indices=True,
        )
        back = mx.argsort(order)
        return mx.sum(out.squeeze(-2)[back].reshape(*ids.shape, -1), axis=1)

    # ------------------------------------------------------------------ all experts in one product

    def _make_dense(self, weights: ExpertWeights) -> tuple[mx.array, mx.array] | None:
        """Products [H, 2 W + E + 1] and [W, H], W = E I + J; None where experts are too large."""
        if self._n_experts * self._inner > _DENSE_LIMIT or self._n_shared % self._inner:
            return None
        hidden = weights.router.shape[1]
        gate, up = mx.split(weights.gate_up, 2, axis=1)
        shared_gate, shared_up = mx.split(weights.shared_gate_up, 2)
        into = mx.concatenate(
            [
                gate.reshape(-1, hidden),
                shared_gate,
                up.reshape(-1, hidden),
                shared_up,
                weights.router,
                weights.shared_switch,
            ]
        )
        out = mx.concatenate([self._down.reshape(-1, hidden), self._shared_down])
        return mx.contiguous(into.T), out

    def _all_at_once(self, x: mx.array, into: mx.array, out: mx.array) -> mx.array:
        rows, width = x.shape[0], out.shape[0]
        both = x @ into
        at = 2 * width
        ids, chosen = self._choose(both[:, at : at + self._n_experts])
        weights = mx.zeros((rows, self._n_experts), dtype=chosen.dtype)
        weights = mx.put_along_axis(weights, ids, chosen, axis=-1)
        switch = mx.sigmoid(both[:, at + self._n_experts :])
        repeats = self._n_shared // self._inner
        weights = mx.concatenate([weights, *[switch] * repeats], axis=-1)[..., None]
        hidden = _swiglu(both[:, :at]).reshape(rows, -1, self._inner) * weights.astype(x.dtype)
        return hidden.reshape(rows, width) @ out


def _swiglu(both: mx.array) -> mx.array:
    """`silu(gate) * up` of [..., 2 W], gate first."""
    width = both.shape[-1] // 2
    return silu(both[..., :width]) * both[..., width:]
