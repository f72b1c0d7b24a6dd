"""Kimi Delta Attention: the delta rule with a decay per key channel, by matrix products.

Knows one layer's rows and its recurrent state. Does not know how many rows will be kept: it hands
out what a later commit needs. The state S [Dk, Dv] of a head follows

    S <- a_t * S (a row of S per channel);   u_t = b_t (v_t - S^T k_t);   S <- S + k_t u_t^T
    o_t = S^T q_t

With f_t = product of a_1..a_t inside a chunk of c rows, and K^ = K / f, this is

    (I + A) U = b (V - (f K) S)      A[i,j] = b_i (f_i k_i).k^_j   for j < i, else 0
    O         = (f Q) S + P U        P[i,j] =     (f_i q_i).k^_j   for j <= i, else 0
    S_keep    = f_keep * (S + sum over t <= keep of k^_t u_t^T)

Dividing by f is safe because the decay is bounded: log a >= `bound` per row, so a chunk has so few
rows that f stays above e^-80, and all products of f and 1/f stay finite in float32. f is counted
from the chunk's own start, never from a later row: row i depends on rows 0..i only, and later rows
enter as products with exact zeros. Prefill runs as many chunks as it has rows, a verify one or a
few; the form is the same.

Source: Kimi Team, Kimi Linear (arXiv 2510.26692); own derivation of the scaling and the commit.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Final

import mlx.core as mx
import numpy as np

from common.checkpoint.matrix import Matrix
from target_svc.models.blocks.linear import Linear
from target_svc.models.blocks.norms import Tiled, gated, inverse_length, is_cpu, silu
from target_svc.models.states.channel_recurrent import ChannelChunk, ChannelRows
from target_svc.models.states.rows import RowWindow

KEPT_ROWS: Final = 64  # longer forwards keep all of their rows or none
_CHUNK: Final = 16  # rows solved by one triangular inverse
_LARGEST_EXPONENT: Final = 80.0  # e^80 times 128 channels is finite in float32, e^-80 normal
_UNIT_EPS: Final = 1e-6  # inside the sum of squares of q and k


@dataclass(frozen=True, slots=True)
class KimiShape:
    """Heads and widths of one layer; q, k and v have the same."""

    heads: int
    dim: int
    kernel: int
    bound: float  # least log decay of a row, below 0 and at least -80

    @property
    def width(self) -> int:
        """Of q, of k and of v."""
        return self.heads * self.dim

    @property
    def channels(self) -> int:
        """Of the convolved rows: q, k, v."""
        return 3 * self.width

    @property
    def chunk_rows(self) -> int:
        """Most rows of a chunk that cannot overflow."""
        return max(1, min(_CHUNK, int(_LARGEST_EXPONENT / -self.bound)))


@dataclass(frozen=True, slots=True)
class KimiWeights:
    """Weights of one layer, in the published orientation; W = heads * dim."""

    q: Matrix  # [W, H]
    k: Matrix  # [W, H]
    v: Matrix  # [W, H]
    q_conv: mx.array  # [W, 1, K]
    k_conv: mx.array  # [W, 1, K]
    v_conv: mx.array  # [W, 1, K]
    decay_down: Matrix  # [dim, H]
    decay_up: Matrix  # [W, dim]
    a_log: mx.array  # [heads]
    dt_bias: mx.array  # [W]
    strength: Matrix  # [heads, H]
    gate_down: Matrix  # [dim, H]
    gate_up: Matrix  # [W, dim]
    norm: mx.array  # [dim], the full factor
    out: Matrix  # [H, W]


class KimiDelta:
    """One layer."""

    def __init__(self, weights: KimiWeights, shape: KimiShape, eps: float) -> None:
        self._shape = shape
        parts = [weights.q, weights.k, weights.v]
        parts += [weights.decay_down, weights.gate_down, weights.strength]
        self._into = Linear(*parts)
        self._decay_up = Linear(weights.decay_up)
        self._gate_up = Linear(weights.gate_up)
        taps = mx.concatenate([weights.q_conv, weights.k_conv, weights.v_conv])[:, 0, :]
        self._taps = Tiled(mx.contiguous(taps.T).astype(mx.float32))
        rate = mx.repeat(mx.exp(weights.a_log.astype(mx.float32)), shape.dim)
        self._rate = Tiled(rate)
        self._dt_bias = Tiled(weights.dt_bias.astype(mx.float32) * rate)
        # q is not scaled by 1/sqrt(Dk); the norm of the output takes that out again, eps included.
        self._floor = eps * shape.dim * shape.dim
        norm = weights.norm.astype(mx.float32) * math.sqrt(shape.dim)
        self._norm = Tiled(mx.tile(norm, shape.heads))
        self._out = Linear(weights.out)

    def __call__(self, x: mx.array, window: RowWindow, state: ChannelRows, layer: int) -> mx.array:
        """Mix x [R, H]; `state` captures the rows under the index `layer` among these layers."""
        shape, rows = self._shape, x.shape[0]
        ends = [shape.channels, shape.channels + shape.dim, shape.channels + 2 * shape.dim]
        mixed, decay, gate, strength = mx.split(self._into(x), ends, axis=-1)
        mixed = silu(self._convolve(window.extend(mixed), rows))
        decay = self._decay_up(decay).astype(mx.float32) * self._rate.rows(rows)
        decay = mx.sigmoid(decay + self._dt_bias.rows(rows)) * shape.bound
        strength = mx.sigmoid(strength.astype(mx.float32))
        out = self._scan(mixed, decay, strength, state, layer)
        out = (out * self._norm.rows(rows)).astype(x.dtype)
        return self._out(gated(out, self._gate_up(gate)))

    def _convolve(self, padded: mx.array, rows: int) -> mx.array:
        """Depthwise causal convolution of [K - 1 + R, C]; the last tap is the current row."""
        channels = padded.shape[1]
        seen = mx.as_strided(padded, (rows, self._shape.kernel, channels), (channels, channels, 1))
        return mx.sum(seen * self._taps.rows(rows), axis=1)

    # ------------------------------------------------------------------ the delta rule

    def _scan(
        self, mixed: mx.array, decay: mx.array, strength: mx.array, state: ChannelRows, layer: int
    ) -> mx.array:
        """Run the rule over mixed [R, C], log decay [R, W] and strength [R, heads].

        Returns:
            [R, W], normed without its weight.
        """
        rows, size = mixed.shape[0], self._shape.chunk_rows
        current, outs, chunks = state.layer_state(layer), list[mx.array](), list[ChannelChunk]()
        settles = rows > KEPT_ROWS
        for start, stop in _runs(rows, size):
            run = self._prepare(mixed[start:stop], decay[start:stop], strength[start:stop], size)
            for number in range(run.n_chunks):
                out, chunk = run.read(number, current)
                outs.append(out)
                is_last = start + (number + 1) * size >= rows
                if settles or not is_last:
                    current = chunk.after(chunk.rows, current)
                if not settles:
                    chunks.append(chunk)
        if settles:
            state.capture_settled(layer, current, rows)
        else:
            state.capture(layer, chunks)
        out = outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=1)
        out = out * inverse_length(out, self._floor)
        return out.swapaxes(0, 1).reshape(rows, -1)

    def _prepare(
        self, mixed: mx.array, decay: mx.array, strength: mx.array, size: int
    ) -> "ChunkRun":
        """All that does not need the state, for chunks of the same size at once."""
        shape = self._shape
        rows = min(mixed.shape[0], size)
        heads = mixed.reshape(-1, rows, 3, shape.heads, shape.dim).transpose(2, 0, 3, 1, 4)
        qk, v = heads[:2], heads[2]
        qk = qk * inverse_length(qk, _UNIT_EPS)
        decay = decay.reshape(-1, rows, shape.heads, shape.dim).swapaxes(1, 2)
        fade = mx.exp(mx.cumsum(decay, axis=2))
        strength = strength.reshape(-1, rows, shape.heads, 1).swapaxes(1, 2)
        faded = qk * fade
        raised = qk[1] / fade
        dots = faded @ raised.swapaxes(-1, -2)
        seen = dots[0] * _lower(rows, 0)
        solve = None if rows == 1 else _inverse(dots[1] * strength * _lower(rows, -1))
        return ChunkRun(faded[0], faded[1], v, strength, raised, fade, seen, solve)


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Chunks of c rows in a row; all float32 [chunks, heads, c, ..]."""

    q: mx.array  # f Q
    k: mx.array  # f K
    v: mx.array
    strength: mx.array  # [.., 1], b
    raised: mx.array  # K / f
    fade: mx.array  # f
    seen: mx.array  # [.., c], P
    solve: mx.array | None  # [.., c], (I + A)^-1; None for one row

    @property
    def n_chunks(self) -> int:
        """Chunks."""
        return self.v.shape[0]

    def read(self, number: int, current: mx.array) -> tuple[mx.array, ChannelChunk]:
        """Output [heads, c, Dv] of one chunk after the state `current`, and what it adds to it."""
        added = (self.v[number] - self.k[number] @ current) * self.strength[number]
        if self.solve is not None:
            added = self.solve[number] @ added
        out = self.q[number] @ current + self.seen[number] @ added
        return out, ChannelChunk(self.raised[number], added, self.fade[number])


def _runs(rows: int, size: int) -> list[tuple[int, int]]:
    """Cut rows into a run of full chunks and a rest shorter than a chunk."""
    full = rows // size * size
    return [(start, stop) for start, stop in ((0, full), (full, rows)) if start < stop]


def _inverse(lower: mx.array) -> mx.array:
    """(I + A)^-1 of strictly lower A [.., c, c]; row i depends on rows 0..i of A only."""
    rows = lower.shape[-1]
    unit = mx.eye(rows)
    if is_cpu():
        return mx.linalg.tri_inv(lower + unit, stream=mx.cpu)
    # The product of (I + (-A)^(2^n)): exact, since A^c = 0, and made of products.
    power, reach = -lower, 2
    inverse = power + unit
    while reach < rows:
        power = power @ power
        inverse = inverse + inverse @ power
        reach *= 2
    return inverse


@cache
def _lower(rows: int, diagonal: int) -> mx.array:
    """1 up to this diagonal, 0 above, [c, c]."""
    return mx.array(np.tri(rows, k=diagonal, dtype=np.float32))
