"""A gated feed-forward network.

Knows rows [R, H]. Does not know residuals or norms.
"""

from dataclasses import dataclass

import mlx.core as mx

from common.checkpoint.matrix import Matrix
from target_svc.models.blocks.linear import Linear
from target_svc.models.blocks.norms import silu


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """Weights of one layer, in the published orientation; without biases None."""

    gate: Matrix  # [W, H]
    up: Matrix  # [W, H]
    down: Matrix  # [H, W]
    gate_bias: mx.array | None = None  # [W]
    up_bias: mx.array | None = None  # [W]
    down_bias: mx.array | None = None  # [H]


class Mlp:
    """`down(silu(gate x) * up x)`."""

    def __init__(self, weights: MlpWeights) -> None:
        both = (weights.gate_bias, weights.up_bias)
        biases = [bias for bias in both if bias is not None]
        bias = mx.concatenate(biases) if biases else None
        self._into = Linear(weights.gate, weights.up, bias=bias)
        self._out = Linear(weights.down, bias=weights.down_bias)

    def __call__(self, x: mx.array) -> mx.array:
        """Apply to x [R, H]; out [R, H]."""
        gate, up = mx.split(self._into(x), 2, axis=-1)
        return self._out(silu(gate) * up)
