"""The Gated DeltaNet kernels spelled in NumPy, float64, one row and head at a time.

Same calls and same packed rows as `DeltaKernels`, so that layers can run on them where there is no
GPU, and the kernels be compared with them where there is one.
"""

import mlx.core as mx
import numpy as np


class PlainKernels:
    """See `DeltaKernels`."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __deepcopy__(self, memo):
        return self

    def prepare(self, padded, projected, constants):
        """Packed rows [R, W]."""
        s = self.sizes
        taps, rate, dt_bias = (np.array(a, np.float64) for a in constants)
        window = np.array(padded.astype(mx.float32), np.float64)
        beside = np.array(projected.astype(mx.float32), np.float64)
        rows = beside.shape[0]
        packed = np.zeros((rows, s.packed))
        n_keys = s.key_heads * s.key_dim
        for row in range(rows):
            mixed = (window[row : row + s.taps] * taps).sum(0)
            mixed = mixed / (1 + np.exp(-mixed))
            q, k = mixed[:n_keys], mixed[n_keys : 2 * n_keys]
            q, k = (self._unit(a.reshape(s.key_heads, s.key_dim)) for a in (q, k))
            gates = np.zeros((s.value_heads, 4))
            at = s.channels + s.value_heads * s.value_dim
            b, a = beside[row, at : at + s.value_heads], beside[row, at + s.value_heads :]
            gates[:, 0] = np.exp(rate * np.logaddexp(0, a + dt_bias))
            gates[:, 1] = 1 / (1 + np.exp(-b))
            gates[:, 2] = np.repeat((q * k).sum(1), s.groups)
            packed[row] = np.concatenate([q.ravel(), k.ravel(), mixed[2 * n_keys :], gates.ravel()])
        return mx.array(packed.astype(np.float32))

    def run(self, fresh, old, keep, before, *, settles):
        """Outputs of the fresh rows and the state after the replayed ones, or after all."""
        s = self.sizes
        state = np.array(before, np.float64).reshape(s.value_heads, s.key_dim, s.value_dim)
        for row in np.array(old, np.float64)[:keep]:
            state, _ = self._step(state, row)
        after, outs = state, []
        for row in np.array(fresh, np.float64):
            state, out = self._step(state, row)
            outs.append(out)
        kept = (state if settles else after).reshape(before.shape)
        return mx.array(np.stack(outs).astype(np.float32)), mx.array(kept.astype(np.float32))

    def replay(self, old, keep, before):
        """The state after `keep` old rows."""
        return self.run(old[:1], old, keep, before, settles=False)[1]

    def finish(self, out, projected, norm):
        """Normed and gated rows."""
        s = self.sizes
        rows = out.shape[0]
        o = np.array(out, np.float64).reshape(rows, s.value_heads, s.value_dim)
        z = np.array(projected.astype(mx.float32), np.float64)[:, s.channels :]
        z = z[:, : s.value_heads * s.value_dim].reshape(o.shape)
        gate = 1 / (1 + np.exp(-z))
        o = o / np.sqrt((o**2).sum(-1, keepdims=True) + s.floor) * np.array(norm, np.float64)
        o = o * (z * gate if s.is_silu else gate)
        return mx.array(o.reshape(rows, -1).astype(np.float32)).astype(projected.dtype)

    def _unit(self, x):
        return x / np.sqrt((x**2).sum(-1, keepdims=True) + self.sizes.unit_eps)

    def _step(self, state, row):
        s = self.sizes
        n_keys = s.key_heads * s.key_dim
        q, k = (row[i * n_keys : (i + 1) * n_keys].reshape(s.key_heads, -1) for i in (0, 1))
        v = row[2 * n_keys : s.channels].reshape(s.value_heads, s.value_dim)
        gates = row[s.channels :].reshape(s.value_heads, 4)
        q, k = (np.repeat(a, s.groups, axis=0) for a in (q, k))
        state = state * gates[:, 0, None, None]
        error = (v - np.einsum("hkv,hk->hv", state, k)) * gates[:, 1, None]
        state = state + k[:, :, None] * error[:, None, :]
        return state, np.einsum("hkv,hk->hv", state, q).ravel()
