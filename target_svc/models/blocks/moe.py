"""Mixture of experts, with or without a shared, gated expert.

Knows rows [R, H]. Does not know batches or devices' memory. The shared expert is one more expert
(or several, where it is wider) that every row chooses, weighted by its own gate; it stands apart
where it is packed in another way than the others. Two ways of the same sum: chosen experts one by
one, or, where all experts together are small, every expert in one product with weight exactly 0 for
those not chosen.
"""

from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from common.checkpoint.matrix import Matrix, Packed, can_join, join, stack, values_of
from common.errors import ModelMismatch
from target_svc.models.blocks.hyper_connection import WRITE_GAIN
from target_svc.models.blocks.linear import GatheredLinear, Linear
from target_svc.models.blocks.norms import Tiled, silu

_DENSE_LIMIT: Final = 4096  # experts x width up to which one product beats many small ones
_SORT_FROM: Final = 64  # chosen pairs from which sorting by expert pays


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of one layer, in the published orientation; without a shared expert None."""

    router: mx.array  # [E, H]
    gate_up: Matrix  # [E, 2 I, H], gate rows first
    down: Matrix  # [E, H, I]
    shared_gate_up: Matrix | None = None  # [2 J, H]
    shared_down: Matrix | None = None  # [H, J]
    shared_switch: mx.array | None = None  # [1, H]


class Experts:
    """Router, routed experts and shared expert of one layer.

    Args:
        weights: see `ExpertWeights`; J is a multiple of I.
        n_chosen: routed experts per token.
        normalize: whether the chosen probabilities are scaled to sum 1.
        gain: what the result is times, for writers that want it so.

    Raises:
        ModelMismatch: the shared expert's width is no multiple of the others'.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        n_chosen: int,
        *,
        normalize: bool,
        gain: float = WRITE_GAIN,
    ) -> None:
        self._n_experts, self._inner = weights.down.shape[0], weights.down.shape[2]
        self._n_chosen = n_chosen
        self._normalize = normalize
        shared = 0 if weights.shared_down is None else weights.shared_down.shape[1]
        if shared % self._inner:
            raise ModelMismatch(
                f"shared expert is {shared} wide; a multiple of the experts' {self._inner} is right"
            )
        gate_up, down, self._apart = _place_shared(weights, self._inner, gain)
        self._n_shared = 0 if self._apart is not None else shared // self._inner
        switches = [] if weights.shared_switch is None else [weights.shared_switch]
        n_switches = 1 if self._apart is not None else self._n_shared
        router = mx.concatenate([weights.router, *switches * n_switches])
        self._router = mx.contiguous(router.T)
        self._gate_up = GatheredLinear(gate_up)
        self._down = GatheredLinear(down, gain)
        total = self._n_experts + self._n_shared
        self._shared_ids = Tiled(mx.arange(self._n_experts, total).astype(mx.uint32))
        self._no_weights = Tiled(mx.zeros((self._n_experts,)))
        is_small = total * self._inner <= _DENSE_LIMIT and self._apart is None
        self._dense = self._make_dense(gate_up) if is_small else None

    def __call__(self, x: mx.array) -> mx.array:
        """Apply to x [R, H]; the result [R, H] is times `gain`."""
        # One by one costs by chosen pairs, all at once by experts; equal at 3 pairs to 4 experts.
        if self._dense is not None and 4 * x.shape[0] * self._n_chosen > 3 * self._n_experts:
            return self._all_at_once(x, self._dense)
        return self._one_by_one(x)

    def _choose(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Chosen ids [R, k] and weights [R, k] of router logits [R, E]; equal logits: lowest id."""
        logits = logits.astype(mx.float32)
        ids = mx.argsort(-logits, axis=-1)[:, : self._n_chosen]
        if self._normalize:
            return ids, mx.softmax(mx.take_along_axis(logits, ids, axis=-1), axis=-1)
        return ids, mx.take_along_axis(mx.softmax(logits, axis=-1), ids, axis=-1)

    # ------------------------------------------------------------------ chosen experts only

    def _one_by_one(self, x: mx.array) -> mx.array:
        rows = x.shape[0]
        logits, switch = mx.split(x @ self._router, [self._n_experts], axis=-1)
        ids, weights = self._choose(logits)
        weights = weights.astype(x.dtype)
        if self._n_shared:
            shared = mx.broadcast_to(self._shared_ids.rows(rows), (rows, self._n_shared))
            ids = mx.concatenate([ids, shared], axis=-1)
            weights = mx.concatenate([weights, mx.sigmoid(switch)], axis=-1)
        outs = self._gathered(x, ids)
        out = (weights[:, None, :] @ outs).squeeze(1)
        return out if self._apart is None else out + mx.sigmoid(switch) * self._apart(x)

    def _gathered(self, x: mx.array, ids: mx.array) -> mx.array:
        """Outputs [R, k, H] of the experts `ids` [R, k] for x [R, H]."""
        if ids.size >= _SORT_FROM:
            return self._gathered_in_order(x, ids)
        hidden = self._gate_up(x[:, None, None, :], ids)
        return self._down(_swiglu(hidden), ids).squeeze(-2)

    def _gathered_in_order(self, x: mx.array, ids: mx.array) -> mx.array:
        order = mx.argsort(ids.flatten())
        chosen = ids.flatten()[order]
        rows = x[order // ids.shape[1]][:, None, :]
        hidden = self._gate_up(rows, chosen, is_sorted=True)
        outs = self._down(_swiglu(hidden), chosen, is_sorted=True).squeeze(-2)
        return outs[mx.argsort(order)].reshape(*ids.shape, -1)

    # ------------------------------------------------------------------ all experts in one product

    def _make_dense(self, gate_up: Matrix) -> tuple[mx.array, mx.array] | None:
        """Products [H, 2 W + E + m] and [W, H], where W = (E + m) I covers all experts.

        None where experts are packed: those not chosen would be unpacked for nothing.
        """
        if isinstance(gate_up, Packed) or self._down.plain is None:
            return None
        hidden = gate_up.shape[2]
        gate, up = mx.split(gate_up, 2, axis=1)
        parts = [gate.reshape(-1, hidden), up.reshape(-1, hidden), self._router.T]
        return mx.contiguous(mx.concatenate(parts).T), self._down.plain.reshape(-1, hidden)

    def _all_at_once(self, x: mx.array, dense: tuple[mx.array, mx.array]) -> mx.array:
        into, out = dense
        rows, width = x.shape[0], out.shape[0]
        ends = [width, 2 * width, 2 * width + self._n_experts]
        gate, up, logits, switch = mx.split(x @ into, ends, axis=-1)
        ids, chosen = self._choose(logits)
        zeros = mx.broadcast_to(self._no_weights.rows(rows), (rows, self._n_experts))
        weights = mx.put_along_axis(zeros, ids, chosen, axis=-1)
        if self._n_shared:
            weights = mx.concatenate([weights, mx.sigmoid(switch)], axis=-1)
        hidden = (silu(gate) * up).reshape(rows, -1, self._inner)
        hidden = hidden * weights[..., None].astype(x.dtype)
        return hidden.reshape(rows, width) @ out


class _SharedExpert:
    """The shared expert by itself; its result is times `gain`, without its switch."""

    def __init__(self, gate_up: Matrix, down: Matrix, gain: float) -> None:
        self._into = Linear(gate_up)
        self._out = Linear(down, gain=gain)

    def __call__(self, x: mx.array) -> mx.array:
        return self._out(_swiglu(self._into(x)))


def _place_shared(
    weights: ExpertWeights, inner: int, gain: float
) -> tuple[Matrix, Matrix, _SharedExpert | None]:
    """Experts to choose from, and the shared expert where it cannot be one of them."""
    gate_up, down = weights.gate_up, weights.down
    shared_into, shared_out = weights.shared_gate_up, weights.shared_down
    if shared_into is None or shared_out is None:
        return gate_up, down, None
    if not any(isinstance(part, Packed) for part in (gate_up, down, shared_into, shared_out)):
        both = _cut(values_of(shared_into), values_of(shared_out), inner)
        return join([gate_up, both[0]], axis=0), join([down, both[1]], axis=0), None
    is_alike = can_join(gate_up, shared_into) and can_join(down, shared_out)
    if is_alike and shared_out.shape[1] == inner:
        into, out = stack([shared_into]), stack([shared_out])
        return join([gate_up, into], axis=0), join([down, out], axis=0), None
    return gate_up, down, _SharedExpert(shared_into, shared_out, gain)


def _cut(gate_up: mx.array, down: mx.array, inner: int) -> tuple[mx.array, mx.array]:
    """The shared expert [2 J, H], [H, J] as J / I experts [.., 2 I, H], [.., H, I]."""
    gate, up = mx.split(gate_up, 2)
    hidden = gate.shape[1]
    both = mx.concatenate([gate.reshape(-1, inner, hidden), up.reshape(-1, inner, hidden)], axis=1)
    return both, down.reshape(hidden, -1, inner).swapaxes(0, 1)


def _swiglu(both: mx.array) -> mx.array:
    """`silu(gate) * up` of [..., 2 W], gate first."""
    gate, up = mx.split(both, 2, axis=-1)
    return silu(gate) * up
