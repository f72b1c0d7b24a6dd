"""Grouped dynamic causal convolution over the rows of draft blocks (DFlash2).

Owns the coefficients and how rows are mixed. Does not know attention or the MLP: it is put before
and after either. Invariant: an output row reads its own block only, itself and earlier rows; rows
before the block are zero.

Source: speculators `models/dflash2`; z-lab/dflash `GroupedDynamicCausalConv`.
"""

import mlx.core as mx
import numpy as np

from drafter_svc.kernels import Array, Kernels


class BlockConv:
    """One convolution around a sublayer: `prepare` on its input, `finish` on its output.

    Taps are held oldest first, as rows come.
    """

    def __init__(
        self, base_kernel: mx.array, kernel_projection: mx.array, group: int, kernels: Kernels
    ) -> None:
        """Reorder the published tensors.

        Args:
            base_kernel: float [2, k, H]; side 0 is the input's, tap 0 the row itself.
            kernel_projection: float [2 * k * (H / group), H], rows ordered side, tap, group.
            group: channels that share one dynamic coefficient; divides H.
            kernels: the form to compute in.
        """
        _, k, H = base_kernel.shape
        self._taps, self._groups = k, H // group
        newest_first = kernel_projection.reshape(2, k, self._groups, H)
        self._projection = kernels.kept(newest_first[:, ::-1].reshape(-1, H).T)
        self._base = kernels.kept(base_kernel[:, ::-1].reshape(2 * k, self._groups, group))
        self._kernels = kernels

    def prepare(self, rows: Array, n_blocks: int = 1) -> tuple[Array, Array]:
        """Mix a sublayer's normed input; float [n_blocks * B, H], blocks one after the other.

        Returns:
            The mixed rows, and the output side's coefficients for `finish`, which depend
            on this input.
        """
        k = self._taps
        dynamic = (rows @ self._projection).reshape(rows.shape[0], 2 * k, self._groups, 1)
        coefficients = dynamic + self._base
        if n_blocks > 1:
            coefficients = coefficients * self._within(rows.shape[0] // n_blocks, n_blocks)
        return self._kernels.mixed(rows, coefficients[:, :k]), coefficients[:, k:]

    def finish(self, rows: Array, coefficients: Array) -> Array:
        """Mix the sublayer's output, shaped as the input, with what `prepare` returned."""
        return self._kernels.mixed(rows, coefficients)

    def _within(self, B: int, n_blocks: int) -> Array:
        """[n_blocks * B, 2 * k, 1, 1]: 0 where a tap would read a row of the block before."""
        k = self._taps
        back = np.arange(k - 1, -1, -1)  # rows back of each tap, oldest first
        keep = (np.arange(B)[:, None] >= back).astype(np.float32)
        whole = np.tile(np.concatenate([keep, keep], axis=1), (n_blocks, 1))
        return self._kernels.kept(mx.array(whole.reshape(-1, 2 * k, 1, 1)))
