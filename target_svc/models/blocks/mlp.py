"""A gated feed-forward network.

Knows rows [R, H]. Does not know residuals or norms.
"""

from dataclasses import dataclass

import mlx.core as mx

from target_svc.models.blocks.norms import silu


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """Weights of one layer, in the published orientation; without biases None."""

    gate: mx.array  # [W, H]
    up: mx.array  # [W, H]
    down: mx.array  # [H, W]
    gate_bias: mx.array | None = None  # [W]
    up_bias: mx.array | None = None  # [W]
    down_bias: mx.array | None = None  # [H]


class Mlp:
    """`down(silu(gate x) * up x)`."""

    def __init__(self, weights: MlpWeights) -> None:
        self._into = mx.contiguous(mx.concatenate([weights.gate, weights.up]).T)
        self._out = mx.contiguous(weights.down.T)
        both = (weights.gate_bias, weights.up_bias)
        biases = [bias for bias in both if bias is not None]
        self._bias = mx.concatenate(biases) if biases else None
        self._out_bias = weights.down_bias

    def __call__(self, x: mx.array) -> mx.array:
        """Apply to x [R, H]; out [R, H]."""
        gate, up = mx.split(affine(x, self._into, self._bias), 2, axis=-1)
        return affine(silu(gate) * up, self._out, self._out_bias)


def affine(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    """`x @ weight + bias`, weight [in, out]."""
    return x @ weight if bias is None else mx.addmm(bias, x, weight)
