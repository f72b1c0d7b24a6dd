"""Launches of the Gated DeltaNet kernels on Metal and CUDA, or the word that there are none.

Knows sizes, grids and when a kernel serves. Does not know layers, projections or states' lives.
Invariant: `delta_kernels` hands out only what was compiled and run on this device. What fails is
logged; then MLX's own update serves on Metal, and the caller's matrix form on CUDA, where the
update of 512 rows took 58 ms a layer and a whole layer in matrix form 7 (H200).
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final, TypeVar

import mlx.core as mx

from target_svc.models.blocks.delta_library import LibraryDelta
from target_svc.models.blocks.delta_source import WARP, KernelSizes, kernel_source

logger = logging.getLogger(__name__)

_WARPS: Final = 4  # of a block of the kernels around the recurrence
_LANES: Final = (4, 8, 2, 1)  # threads per value column, best first
_THREADS: Final = 64  # of a block of the recurrence

Kernel = Callable[..., Sequence[mx.array]]


def fit_sizes(
    heads: tuple[int, int],
    dims: tuple[int, int],
    taps: int,
    *,
    is_silu: bool,
    floor: float,
    unit_eps: float,
) -> KernelSizes | None:
    """Sizes with the best thread layout, or None where the kernels do not serve these.

    Args:
        heads: Hk, and value heads per key head.
        dims: Dk, Dv.
        taps: rows of the convolution.
        is_silu: the output gate.
        floor: inside the sum of squares of an output.
        unit_eps: inside the sum of squares of q and k.
    """
    key_dim, value_dim = dims
    for lanes in _LANES:
        columns = _THREADS // lanes
        while columns > 1 and value_dim % columns:
            columns //= 2
        fits = key_dim % (4 * lanes) == 0 and value_dim % 4 == 0 and lanes * columns % WARP == 0
        if fits and heads[1] <= WARP:
            return KernelSizes(
                *heads, key_dim, value_dim, taps, lanes, columns, is_silu, unit_eps, floor
            )
    return None


@lru_cache(maxsize=4096)
def _counts(keep: int, rows: int, write_at: int) -> mx.array:
    counts = mx.array([keep, rows, write_at], dtype=mx.int32)
    mx.eval(counts)
    return counts


class DeltaKernels:
    """The three kernels of one shape of layer on one kind of device.

    Args:
        sizes: constants of the kernels.
        language: "cuda" or "metal".

    Attributes:
        sizes: as given.
    """

    def __init__(self, sizes: KernelSizes, language: str) -> None:
        self.sizes = sizes
        self._language = language
        self._prepare = self._make("prepare", ["padded", "projected", "taps", "rate", "dt_bias"])
        self._rows = self._make("rows", ["fresh", "old", "before", "counts"], ["out", "after"])
        self._finish = self._make("finish", ["out", "projected", "norm"], ["normed"])

    def prepare(
        self,
        padded: mx.array,
        projected: mx.array,
        constants: tuple[mx.array, mx.array, mx.array],
    ) -> mx.array:
        """Packed rows float32 [R, W].

        Args:
            padded: [taps - 1 + R, C], the window and the rows to convolve.
            projected: [R, C + Hv Dv + 2 Hv]: qkv, z, b, a.
            constants: float32 taps [K, C], rate [Hv] (below 0) and dt_bias [Hv].
        """
        sizes, rows = self.sizes, projected.shape[0]
        (packed,) = self._prepare(
            inputs=[padded, projected, *constants],
            **_warp_grid(sizes.key_heads + sizes.value_heads, rows),
            output_shapes=[(rows, sizes.packed)],
            output_dtypes=[mx.float32],
            template=[("T", projected.dtype)],
        )
        return packed

    def run(
        self, fresh: mx.array, old: mx.array, keep: int, before: mx.array, *, settles: bool
    ) -> tuple[mx.array, mx.array]:
        """Replay old rows, then go on with fresh ones.

        Args:
            fresh: packed rows [R, W].
            old: packed rows [Ro, W] of the round before.
            keep: how many of them are replayed, 0..Ro.
            before: state [Hk, G, Dk, Dv] before the old rows.
            settles: write the state after all rows rather than after the replayed ones.

        Returns:
            Outputs of the fresh rows, float32 [R, Hv Dv], and the state that was written.
        """
        rows = fresh.shape[0]
        counts = _counts(keep, rows, keep + rows if settles else keep)
        return self._launch_rows(fresh, old, before, counts, rows)

    def replay(self, old: mx.array, keep: int, before: mx.array) -> mx.array:
        """The state after `keep` old rows alone."""
        return self._launch_rows(old, old, before, _counts(keep, 0, keep), 1)[1]

    def finish(self, out: mx.array, projected: mx.array, norm: mx.array) -> mx.array:
        """Normed and gated rows [R, Hv Dv] in the dtype of `projected`.

        Args:
            out: float32 [R, Hv Dv].
            projected: as for `prepare`.
            norm: float32 [Dv], the full factor of an output of unit length.
        """
        sizes, rows = self.sizes, projected.shape[0]
        (normed,) = self._finish(
            inputs=[out, projected, norm],
            **_warp_grid(sizes.value_heads, rows),
            output_shapes=[(rows, sizes.value_heads * sizes.value_dim)],
            output_dtypes=[projected.dtype],
            template=[("T", projected.dtype)],
        )
        return normed

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeltaKernels":
        """Itself: kernels hold nothing of a sequence, whose state may be copied."""
        return self

    def _launch_rows(
        self, fresh: mx.array, old: mx.array, before: mx.array, counts: mx.array, rows: int
    ) -> tuple[mx.array, mx.array]:
        sizes = self.sizes
        threads = sizes.lanes * sizes.columns
        out, after = self._rows(
            inputs=[fresh, old, before, counts],
            grid=(sizes.value_dim // sizes.columns * threads, sizes.value_heads, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(rows, sizes.value_heads * sizes.value_dim), before.shape],
            output_dtypes=[mx.float32, mx.float32],
        )
        return out, after

    def _make(self, body: str, inputs: list[str], outputs: Sequence[str] = ("packed",)) -> Kernel:
        source = kernel_source(body, self.sizes, self._language, _WARPS)
        # MLX keeps compiled kernels by name, so the name stands for the text.
        digest = hashlib.sha256(source.encode()).hexdigest()[:12]
        make: Any = mx.fast.cuda_kernel if self._language == "cuda" else mx.fast.metal_kernel
        return make(
            name=f"delta_{body}_{digest}",
            input_names=inputs,
            output_names=list(outputs),
            source=source,
        )


Form = TypeVar("Form", DeltaKernels, LibraryDelta)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of a forward as the kernels replay them; see `Replayable`."""

    packed: mx.array  # float32 [R, W]
    kernels: DeltaKernels | LibraryDelta

    @property
    def rows(self) -> int:
        """How many."""
        return self.packed.shape[0]

    def after(self, keep: int, current: mx.array) -> mx.array:
        """The state [Hk, G, Dk, Dv] after `keep` rows, from the one before them."""
        return self.kernels.replay(self.packed, keep, current)


def _warp_grid(items: int, rows: int) -> dict[str, tuple[int, int, int]]:
    """One warp per item and row."""
    threads = _WARPS * WARP
    blocks = -(-items // _WARPS)
    return {"grid": (blocks * threads, rows, 1), "threadgroup": (threads, 1, 1)}


def device_language() -> str | None:
    """The kernel language of the default device, None on a CPU."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return None
    return "metal" if mx.metal.is_available() else "cuda"


@cache
def delta_kernels(sizes: KernelSizes | None) -> DeltaKernels | LibraryDelta | None:
    """Kernels of these sizes for the default device, tried once on two rows.

    Returns:
        None on a CPU, for sizes that do not fit, and where nothing runs; failures are logged.
    """
    language = device_language()
    if language is None or sizes is None:
        return None
    try:
        return _tried(DeltaKernels(sizes, language))
    except (RuntimeError, ValueError) as error:
        instead = "MLX's own update" if language == "metal" else "matrix form"
        logger.warning("no Gated DeltaNet kernel on this device, %s instead: %s", instead, error)
    if language != "metal":
        return None
    try:
        return _tried(LibraryDelta(sizes))
    except (RuntimeError, ValueError) as error:
        logger.warning("MLX's own update fails as well, matrix form instead: %s", error)
    return None


def _tried(kernels: Form) -> Form:
    """The same, after it has run two rows."""
    sizes = kernels.sizes
    constants = (
        mx.zeros((sizes.taps, sizes.channels)),
        mx.zeros((sizes.value_heads,)),
        mx.zeros((sizes.value_heads,)),
    )
    projected = mx.zeros((2, sizes.projected))
    packed = kernels.prepare(mx.zeros((sizes.taps + 1, sizes.channels)), projected, constants)
    before = mx.zeros((sizes.key_heads, sizes.groups, sizes.key_dim, sizes.value_dim))
    out, after = kernels.run(packed, packed, 1, before, settles=True)
    mx.eval(after, kernels.finish(out, projected, mx.zeros((sizes.value_dim,))))
    return kernels
