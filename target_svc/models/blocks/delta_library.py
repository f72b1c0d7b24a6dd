"""Gated DeltaNet rows by MLX's own `mx.fast.gated_delta_update`, in the calls of `DeltaKernels`.

Knows the packed row and MLX's layout of states. Does not know when it is chosen. Serves where a
Metal device refuses the kernels of `delta_source`; replays what `DeltaKernels` replays, in a call
of its own, so a round costs one launch more per layer.
Invariant: computes the same function as the kernels, to float32 rounding.
"""

from typing import Any

import mlx.core as mx

from target_svc.models.blocks.delta_source import GATES, KernelSizes


class LibraryDelta:
    """See `DeltaKernels`, whose methods and shapes these are.

    Args:
        sizes: of the layer; the thread layout in it is not used.
    """

    def __init__(self, sizes: KernelSizes) -> None:
        self.sizes = sizes

    def __deepcopy__(self, memo: dict[int, Any]) -> "LibraryDelta":
        """Itself: nothing of a sequence is in it."""
        return self

    def prepare(
        self,
        padded: mx.array,
        projected: mx.array,
        constants: tuple[mx.array, mx.array, mx.array],
    ) -> mx.array:
        """Packed rows float32 [R, W]."""
        sizes, rows = self.sizes, projected.shape[0]
        taps, rate, dt_bias = constants
        shape, strides = (rows, sizes.taps, sizes.channels), (sizes.channels, sizes.channels, 1)
        mixed = mx.sum(mx.as_strided(padded, shape, strides).astype(mx.float32) * taps, axis=1)
        mixed = mixed * mx.sigmoid(mixed)
        keys = 2 * sizes.key_heads * sizes.key_dim
        qk = mixed[:, :keys].reshape(rows, 2, sizes.key_heads, sizes.key_dim)
        qk = qk * mx.rsqrt(mx.sum(mx.square(qk), axis=-1, keepdims=True) + sizes.unit_eps)
        gates = projected[:, sizes.channels + sizes.value_heads * sizes.value_dim :]
        strength, step = mx.split(gates.astype(mx.float32), 2, axis=-1)
        alpha = mx.exp(rate * mx.logaddexp(step + dt_bias, mx.array(0.0)))
        dots = mx.repeat(mx.sum(qk[:, 0] * qk[:, 1], axis=-1), sizes.groups, axis=-1)
        gates = mx.stack([alpha, mx.sigmoid(strength), dots, mx.zeros_like(dots)], axis=-1)
        return mx.concatenate([qk.reshape(rows, -1), mixed[:, keys:], gates.reshape(rows, -1)], 1)

    def run(
        self, fresh: mx.array, old: mx.array, keep: int, before: mx.array, *, settles: bool
    ) -> tuple[mx.array, mx.array]:
        """Outputs of the fresh rows, float32 [R, Hv Dv], and the state that is to be kept."""
        replayed = self.replay(old, keep, before) if keep else before
        out, after = self._update(fresh, replayed)
        return out, after if settles else replayed

    def replay(self, old: mx.array, keep: int, before: mx.array) -> mx.array:
        """The state after `keep` old rows alone."""
        return self._update(old[:keep], before)[1]

    def finish(self, out: mx.array, projected: mx.array, norm: mx.array) -> mx.array:
        """Normed and gated rows [R, Hv Dv] in the dtype of `projected`."""
        sizes, rows = self.sizes, projected.shape[0]
        out = out.reshape(rows, sizes.value_heads, sizes.value_dim)
        out = out * mx.rsqrt(mx.sum(mx.square(out), axis=-1, keepdims=True) + sizes.floor) * norm
        width = sizes.value_heads * sizes.value_dim
        z = projected[:, sizes.channels : sizes.channels + width].astype(mx.float32)
        gate = z * mx.sigmoid(z) if sizes.is_silu else mx.sigmoid(z)
        return (out.reshape(rows, width) * gate).astype(projected.dtype)

    def _update(self, packed: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
        """Outputs and the state [Hk, G, Dk, Dv] after all rows; MLX's is [1, Hv, Dv, Dk]."""
        sizes, rows = self.sizes, packed.shape[0]
        keys = sizes.key_heads * sizes.key_dim
        q, k, v, gates = mx.split(packed, [keys, 2 * keys, sizes.channels], axis=-1)
        gates = gates.reshape(1, rows, sizes.value_heads, GATES)
        heads = (1, sizes.value_heads, sizes.key_dim, sizes.value_dim)
        out, after = mx.fast.gated_delta_update(
            q.reshape(1, rows, sizes.key_heads, sizes.key_dim),
            k.reshape(1, rows, sizes.key_heads, sizes.key_dim),
            v.reshape(1, rows, sizes.value_heads, sizes.value_dim),
            gates[..., 0],
            gates[..., 1],
            state.reshape(heads).swapaxes(-1, -2),
        )
        return out.reshape(rows, -1), after.swapaxes(-1, -2).reshape(state.shape)
