"""Grouped dynamic causal convolution over the rows of one draft block (DFlash2).

Owns the coefficients and how rows are mixed. Does not know attention or the MLP: it is put before
and after either. Invariant: an output row reads its own block only, itself and earlier rows; rows
before the block are zero.

Source: speculators `models/dflash2`; z-lab/dflash `GroupedDynamicCausalConv`.
"""

import mlx.core as mx

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
        self._mixed = kernels.mixed

    def prepare(self, rows: Array) -> tuple[Array, Array]:
        """Mix a sublayer's normed input; float [B, H].

        Returns:
            The mixed rows [B, H], and the output side's coefficients for `finish`, which depend
            on this input.
        """
        k = self._taps
        dynamic = (rows @ self._projection).reshape(rows.shape[0], 2 * k, self._groups, 1)
        coefficients = dynamic + self._base
        return self._mixed(rows, coefficients[:, :k]), coefficients[:, k:]

    def finish(self, rows: Array, coefficients: Array) -> Array:
        """Mix the sublayer's output [B, H] with what `prepare` returned."""
        return self._mixed(rows, coefficients)
