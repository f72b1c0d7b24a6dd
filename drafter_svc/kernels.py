"""What the drafter's network asks of an array library, and which library answers.

Owns the list of operations that have two forms: `host` (NumPy, for CPU) and `device` (MLX, for
Metal and CUDA). Does not know layers or sessions: everything that both libraries spell alike, such
as products and reshapes, stands in the network itself.
Invariant: both forms compute the same function; only speed differs. On CPU an MLX operation costs
4 us and one `exp` 17 ns, NumPy's 1 us and 1 ns, and a block is made of hundreds of small ones.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import mlx.core as mx
from numpy.typing import NDArray

from drafter_svc import device, host

Array: TypeAlias = Any  # mx.array on a device, a float32 or int NumPy array on the host


class Kernels(Protocol):
    """The operations; the modules `host` and `device` are its two implementations."""

    def kept(self, weight: mx.array) -> Array:
        """A weight, evaluated and contiguous."""

    def head(self, weight: mx.array) -> Array:
        """The head [V, H] as [H, V], for `scores`."""

    def blank(self, shape: tuple[int, ...], dtype: mx.Dtype) -> Array:
        """Zeros."""

    def joined(self, arrays: Sequence[Array], axis: int) -> Array:
        """Concatenate."""

    def taken_in(self, rows: NDArray[Any] | mx.array, dtype: mx.Dtype) -> Array:
        """Rows of either library, in the form and dtype that products want."""

    def submit(self, arrays: Sequence[Array]) -> None:
        """Start computing lazy arrays, without waiting."""

    def finished(self, *arrays: Array) -> tuple[NDArray[Any], ...]:
        """Wait for arrays and read them."""

    def looked_up(self, table: Array, ids: Sequence[int]) -> Array:
        """Rows [len(ids), H] of a table [V, H]."""

    def mask(self, bias: NDArray[Any], group_size: int, dtype: mx.Dtype) -> Array:
        """A bias float32 [B, C + B] of 0 and -inf for `group_size` query heads per key head."""

    def rotation(self, turns: NDArray[Any]) -> Array:
        """Rotations of `Rope.turns`, for `turned`."""

    def normed(self, rows: Array, weight: Array, eps: float) -> Array:
        """RMS norm over the last axis."""

    def turned(self, heads: Array, factors: Array, eps: float, turns: Array) -> Array:
        """RMS norm of heads [n, heads, hd], times float32 factors [heads, hd], then rotated.

        `turns` is complex64 [n, 1, hd / 2], of `rotation`; pairs lie side by side.
        """

    def mixed(self, rows: Array, coefficients: Array) -> Array:
        """Sum over taps of coefficients [B, k, groups, group], oldest first, times rows [B, H]."""

    def gated(self, gate_up: Array) -> Array:
        """SwiGLU of [B, 2 * I], gate first: [B, I]."""

    def attended(
        self, q: Array, keys: Array, values: Array, context: tuple[Array, Array], mask: Array
    ) -> Array:
        """Softmax over context and block.

        Args:
            q: [kv, group * B, hd], scaled.
            keys: [kv, B, hd] of the block; `values` likewise.
            values: see `keys`.
            context: keys and values [kv, C, hd].
            mask: of `mask`, added to the scores.

        Returns:
            [kv, group * B, hd].
        """

    def product(self, rows: Array, weight: Array) -> Array:
        """Product of rows [n, H] and weight [H, m] for an n that need not be the block's."""

    def scores(self, hidden: Array, weight: Array, multiplier: float, softcap: float) -> Array:
        """Logits float32 [n, V] of hidden [n, H] and `head` [H, V], scaled and capped (0: not)."""

    def top_ids(self, logits: Array, K: int) -> Array:
        """The K best ids of each row of [n, V], integers [n, K], ascending."""

    def along(self, logits: Array, ids: Array) -> Array:
        """Values [n, K] of logits [n, V] at ids [n, K]."""

    def best_ids(self, logits: Array) -> tuple[Array, Array]:
        """Argmax ids [n] of logits [n, V] and their probabilities float32 [n]."""


def kernels_of_device() -> Kernels:
    """The form for MLX's default device; choose the device before loading."""
    return host if mx.default_device().type == mx.DeviceType.cpu else device
