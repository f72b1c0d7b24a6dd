"""Gated DeltaNet, for prefill and verify alike: kernels on a GPU, else matrix products.

Knows one layer's rows and its recurrent state. Does not know how many rows will be kept: it hands
out, per row, what a later commit needs. Kernels (`delta_kernel`) run row after row and replay kept
rows with the next forward. Without them, with per-row decay a, writing strength b, and g =
cumulative log decay inside a chunk, the delta rule over n rows is

    (I + A) U = b (V - e^g K S)     A[i,j] = b_i e^(g_i - g_j) k_i.k_j   for j < i, else 0
    O         = e^g Q S + P U       P[i,j] =     e^(g_i - g_j) q_i.k_j   for j <= i, else 0
    S_keep    = e^(g_keep) S + sum over t <= keep of e^(g_keep - g_t) k_t (outer) u_t

so S after any number of kept rows is one product, without running the rows again.
Invariant: row i depends on rows 0..i only; later rows enter as products with exact zeros.

Source: Yang et al., Gated Delta Networks (arXiv 2412.06464), the chunked form; own derivation of
the commit.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Final

import mlx.core as mx
import numpy as np

from common.checkpoint.matrix import Matrix, Packed, values_of
from target_svc.models.blocks.delta_kernel import DeltaKernels, PackedRows, delta_kernels, fit_sizes
from target_svc.models.blocks.delta_library import LibraryDelta
from target_svc.models.blocks.hyper_connection import WRITE_GAIN
from target_svc.models.blocks.linear import Linear
from target_svc.models.blocks.norms import (
    Tiled,
    constant,
    gated,
    inverse_length,
    is_cpu,
    silu,
)
from target_svc.models.states.recurrent import DeltaChunk, RecurrentRows
from target_svc.models.states.rows import RowWindow

CHUNK: Final = 64  # rows solved by one triangular inverse; longer forwards keep all rows or none
_UNIT_EPS: Final = 1e-6  # inside the sum of squares of q and k


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Heads and widths of one layer; value head h uses key head h // (value_heads / key_heads)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    gate: str  # "sigmoid" or "silu"

    @property
    def groups(self) -> int:
        """Value heads per key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """Width of the convolved rows: q, k, v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Weights of one layer, in the published orientation."""

    qkv: Matrix  # [C, H]
    z: Matrix  # [Hv Dv, H]
    b: Matrix  # [Hv, H]
    a: Matrix  # [Hv, H]
    conv: mx.array  # [C, 1, K]
    a_log: mx.array  # [Hv]
    dt_bias: mx.array  # [Hv]
    norm: mx.array  # [Dv], the full factor
    out: Matrix  # [H, Hv Dv]


class GatedDelta:
    """One layer; its result is times `gain`, for writers that want it so."""

    def __init__(
        self, weights: DeltaWeights, shape: DeltaShape, eps: float, gain: float = WRITE_GAIN
    ) -> None:
        self._shape = shape
        dtype = weights.qkv.dtype
        # q is not scaled by 1/sqrt(Dk); the norm of the output takes that out again, eps included.
        self._floor = eps * shape.key_dim * shape.value_dim
        self._kernels = _kernels_for(shape, self._floor)
        taps = mx.contiguous(weights.conv[:, 0, :].T)
        rate = -mx.exp(weights.a_log.astype(mx.float32))
        dt_bias = weights.dt_bias.astype(mx.float32)
        norm = weights.norm.astype(mx.float32) * math.sqrt(shape.value_dim)
        if self._kernels is not None:
            self._into = Linear(weights.qkv, weights.z, weights.b, weights.a)
            self._constants = (taps.astype(mx.float32), rate, dt_bias)
            self._norm = norm
            self._out = Linear(weights.out, gain=gain)
            return
        self._into = Linear(weights.qkv, weights.z)
        self._gates = mx.concatenate([values_of(weights.b), values_of(weights.a)])
        self._taps = Tiled(taps)
        self._rate = Tiled(rate, axis=1)
        self._dt_bias = Tiled(dt_bias, axis=1)
        norm = mx.tile(norm, shape.value_heads)
        self._norm = norm.astype(dtype)
        self._folds_norm = is_cpu() and not isinstance(weights.out, Packed)
        out = values_of(weights.out) * norm if self._folds_norm else weights.out
        self._out = Linear(out, gain=gain)

    def __call__(
        self, x: mx.array, window: RowWindow, state: RecurrentRows, layer: int
    ) -> mx.array:
        """Mix x [R, H]; `state` captures the rows under the index `layer` among GDN layers."""
        if self._kernels is not None:
            return self._launch(self._kernels, x, window, state, layer)
        mixed, z = mx.split(self._into(x), [self._shape.channels], axis=-1)
        mixed = silu(self._convolve(window.extend(mixed), x.shape[0]))
        gates = (self._gates @ x.T).astype(mx.float32)
        out = self._scan(mixed.astype(mx.float32), gates, state, layer)
        if not self._folds_norm:
            out = out.astype(x.dtype) * self._norm
        out = gated(out, z) if self._shape.gate == "sigmoid" else out * silu(z)
        return self._out(out)

    def _launch(
        self,
        kernels: DeltaKernels | LibraryDelta,
        x: mx.array,
        window: RowWindow,
        state: RecurrentRows,
        layer: int,
    ) -> mx.array:
        """The same by kernels; rows kept of the forward before are replayed on the way."""
        rows = x.shape[0]
        projected = self._into(x)
        padded = window.extend(projected[:, : self._shape.channels])
        fresh = PackedRows(kernels.prepare(padded, projected, self._constants), kernels)
        before, old, keep = state.replay_from(layer)
        old_rows = old.packed if isinstance(old, PackedRows) else fresh.packed
        settles = rows > CHUNK
        out, after = kernels.run(fresh.packed, old_rows, keep, before, settles=settles)
        if settles:
            state.capture_settled(layer, after, rows)
        else:
            state.capture_replayable(layer, after, fresh)
        return self._out(kernels.finish(out, projected, self._norm))

    def _convolve(self, padded: mx.array, rows: int) -> mx.array:
        """Depthwise causal convolution of [K - 1 + R, C]; the last tap is the current row."""
        channels = padded.shape[1]
        seen = mx.as_strided(padded, (rows, self._shape.kernel, channels), (channels, channels, 1))
        return mx.sum(seen * self._taps.rows(rows), axis=1)

    # ------------------------------------------------------------------ the delta rule

    def _scan(self, mixed: mx.array, gates: mx.array, state: RecurrentRows, layer: int) -> mx.array:
        """Run the rule over mixed [R, C] and gates [2 Hv, R]; normed out [R, Hv Dv]."""
        rows = mixed.shape[0]
        if rows <= CHUNK:
            out, chunk = self._chunk(mixed, gates, state.layer_state(layer))
            state.capture(layer, chunk)
            return out
        outs, current = [], state.layer_state(layer)
        for start in range(0, rows, CHUNK):
            stop = min(start + CHUNK, rows)
            out, chunk = self._chunk(mixed[start:stop], gates[:, start:stop], current)
            current = chunk.after(stop - start, current)
            outs.append(out)
        state.capture_settled(layer, current, rows)
        return mx.concatenate(outs)

    def _chunk(
        self, mixed: mx.array, gates: mx.array, current: mx.array
    ) -> tuple[mx.array, DeltaChunk]:
        shape, rows = self._shape, mixed.shape[0]
        qk, v = mx.split(mixed, [2 * shape.key_heads * shape.key_dim], axis=-1)
        qk = qk.reshape(rows, 2, shape.key_heads, shape.key_dim)
        qk = (qk * inverse_length(qk, _UNIT_EPS)).transpose(2, 1, 0, 3)
        qk = qk.reshape(shape.key_heads, 1, 2 * rows, shape.key_dim)
        k = qk[:, :, rows:]
        v = v.reshape(rows, shape.key_heads, shape.groups, shape.value_dim).transpose(1, 2, 0, 3)
        strength, decay = self._rates(gates)

        dots_q, dots_k = mx.split(qk @ k.swapaxes(-1, -2), 2, axis=-2)
        read_q, read_k = mx.split(self._read(qk, decay, current), 2, axis=-2)
        wanted = (v - read_k) * strength
        fade = mx.exp(decay[..., None] - decay[..., None, :] + _causal(rows))
        if rows == 1:
            solved = wanted
            out = read_q + dots_q * wanted
        else:
            solved = _solve(dots_k * fade * strength, wanted)
            out = read_q + (dots_q * fade) @ solved
        out = out * inverse_length(out, self._floor)
        out = out.transpose(2, 0, 1, 3).reshape(rows, -1)
        return out, DeltaChunk(k, solved, decay)

    def _rates(self, gates: mx.array) -> tuple[mx.array, mx.array]:
        """Writing strength [Hk, G, R, 1] and cumulative log decay [Hk, G, R] of [2 Hv, R]."""
        shape, rows = self._shape, gates.shape[1]
        strength, step = mx.split(gates, 2)
        step = step + self._dt_bias.rows(rows)
        step = mx.logaddexp(step, constant(0.0, step)) * self._rate.rows(rows)
        decay = mx.cumsum(step.reshape(shape.key_heads, shape.groups, rows), axis=-1)
        strength = mx.sigmoid(strength).reshape(shape.key_heads, shape.groups, rows, 1)
        return strength, decay

    def _read(self, qk: mx.array, decay: mx.array, current: mx.array) -> mx.array:
        """What q and k read from the state before the rows, [Hk, G, 2 R, Dv]."""
        faded = mx.exp(mx.concatenate([decay, decay], axis=-1))
        return (qk @ current) * faded[..., None]


def _kernels_for(shape: DeltaShape, floor: float) -> DeltaKernels | LibraryDelta | None:
    sizes = fit_sizes(
        (shape.key_heads, shape.groups),
        (shape.key_dim, shape.value_dim),
        shape.kernel,
        is_silu=shape.gate == "silu",
        floor=floor,
        unit_eps=_UNIT_EPS,
    )
    return delta_kernels(sizes)


def _solve(weights: mx.array, wanted: mx.array) -> mx.array:
    """Solve (I + strictly lower part of `weights`) U = wanted, all [.., R, ..]."""
    rows = weights.shape[-1]
    if is_cpu():
        unit = weights * _strictly_lower(rows) + _identity(rows)
        return mx.linalg.tri_inv(unit, stream=mx.cpu) @ wanted
    # (I + A)^-1 is the product of (I + (-A)^(2^k)): exact, since A^R = 0, and made of products.
    power = weights * -_strictly_lower(rows)
    inverse = power + _identity(rows)
    reach = 2
    while reach < rows:
        power = power @ power
        inverse = inverse + inverse @ power
        reach *= 2
    return inverse @ wanted


@cache
def _causal(rows: int) -> mx.array:
    """Additive [R, R]: 0 on and below the diagonal, -inf above."""
    return mx.array(np.triu(np.full((rows, rows), -np.inf, np.float32), 1))


@cache
def _strictly_lower(rows: int) -> mx.array:
    return mx.array(np.tri(rows, k=-1, dtype=np.float32))


@cache
def _identity(rows: int) -> mx.array:
    return mx.eye(rows)
