"""Hyper-connections: a sub-layer reads a learned mixture of the streams and writes to all of them.

Knows streams [R, S, H]. Does not know which sub-layer it serves. No matrix mixes streams with each
other; a write adds to the raw streams.
"""

from typing import Final

import mlx.core as mx

from common.checkpoint.matrix import Matrix, Packed
from target_svc.models.blocks.linear import Linear
from target_svc.models.blocks.norms import RmsNorm, gated

WRITE_GAIN: Final = 2.0  # a share is 2 * sigmoid; sub-layers fold the 2 into their last product


class HyperConnection:
    """Read and write of one sub-layer; without `inject` a read only.

    Args:
        norm: [S * H], zero-centred.
        down: [r, S * H].
        up: [S * H, r].
        inject: [S, S * H] or None.
        streams: S.
    """

    def __init__(
        self,
        norm: mx.array,
        down: Matrix,
        up: Matrix,
        inject: Matrix | None,
        *,
        streams: int,
        eps: float,
    ) -> None:
        # The normed streams are used divided by S everywhere, so the division sits in the norm.
        scale = (1.0 + norm.astype(mx.float32)).reshape(streams, -1) / streams
        self._norm = RmsNorm(scale.astype(norm.dtype), eps)
        self._mix_in = Linear(down) if inject is None else Linear(down, inject)
        self._rank = down.shape[0]
        self._is_cut = isinstance(up, Packed) and inject is not None
        if inject is not None and not isinstance(up, Packed):
            # Columns of zeros for the shares: cheaper than cutting them off first.
            extra = mx.zeros((up.shape[0], inject.shape[0]), dtype=up.dtype)
            up = mx.concatenate([up, extra], axis=1)
        self._mix_out = Linear(up)

    def read(self, streams: mx.array) -> tuple[mx.array, mx.array]:
        """Read streams [R, S, H]: the sub-layer's input [R, H] and the write shares [R, S, 1].

        The shares are `sigmoid`, that is without the factor `WRITE_GAIN`.
        """
        rows = streams.shape[0]
        normed = self._norm(streams)
        mixed = self._mix_in(normed.reshape(rows, -1))
        opened = mx.sigmoid(mixed)
        mixed = mixed * opened
        mixed = mixed[:, : self._rank] if self._is_cut else mixed
        logits = self._mix_out(mixed).reshape(streams.shape)
        return mx.sum(gated(normed, logits), axis=1), opened[:, self._rank :, None]


def write(streams: mx.array, y: mx.array, shares: mx.array) -> mx.array:
    """Add y [R, H], already times `WRITE_GAIN`, to streams [R, S, H] by shares [R, S, 1]."""
    return mx.addmm(streams, shares, y[:, None, :])
