"""Grouped dynamic causal convolution over the rows of one draft block (DFlash2).

Owns the coefficients and how rows are mixed. Does not know attention or the MLP: it is put before
and after either. Invariant: an output row reads its own block only, itself and earlier rows; rows
before the block are zero.

Source: speculators `models/dflash2`; z-lab/dflash `GroupedDynamicCausalConv`.
"""

import mlx.core as mx


class BlockConv:
    """One convolution around a sublayer: `prepare` on its input, `finish` on its output.

    Taps are held oldest first, so that one strided view of the padded rows meets them in order.
    """

    def __init__(self, base_kernel: mx.array, kernel_projection: mx.array, group: int) -> None:
        """Reorder the published tensors.

        Args:
            base_kernel: float [2, k, H]; side 0 is the input's, tap 0 the row itself.
            kernel_projection: float [2 * k * (H / group), H], rows ordered side, tap, group.
            group: channels that share one dynamic coefficient; divides H.
        """
        _, k, H = base_kernel.shape
        self._taps, self._groups, self._group = k, H // group, group
        newest_first = kernel_projection.reshape(2, k, self._groups, H)
        self._projection = newest_first[:, ::-1].reshape(-1, H).T
        self._base = base_kernel[:, ::-1].reshape(2 * k, self._groups, group)
        mx.eval(self._projection, self._base)

    def prepare(self, rows: mx.array) -> tuple[mx.array, mx.array]:
        """Mix a sublayer's normed input; float [B, H].

        Returns:
            The mixed rows [B, H], and the output side's coefficients for `finish`, which depend
            on this input.
        """
        B, k = rows.shape[0], self._taps
        dynamic = (rows @ self._projection).reshape(B, 2 * k, self._groups, 1)
        coefficients = dynamic + self._base
        return self._mix(rows, coefficients[:, :k]), coefficients[:, k:]

    def finish(self, rows: mx.array, coefficients: mx.array) -> mx.array:
        """Mix the sublayer's output [B, H] with what `prepare` returned."""
        return self._mix(rows, coefficients)

    def _mix(self, rows: mx.array, coefficients: mx.array) -> mx.array:
        B, H = rows.shape
        padded = mx.pad(rows, [(self._taps - 1, 0), (0, 0)])
        shape = (B, self._taps, self._groups, self._group)
        windows = mx.as_strided(padded, shape, (H, H, self._group, 1))
        return (coefficients * windows).sum(axis=1).reshape(B, H)
