"""Hold the context of one session: keys and values of committed positions, by absolute position.

Owns where rows are stored and which of them a query may see. Does not know weights or blocks: rows
come projected and rotated. Block keys never enter, so nothing is ever rolled back.
Invariant: visibility is computed from the stored position of a slot, never from the slot's index;
`end` is the position of the next row, whatever the window has dropped.

Source: z-lab/dflash `model_mlx.py` (rows and window); speculators (window per query).
"""

from collections.abc import Callable
from typing import Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from common.errors import EngineError
from drafter_svc.kernels import Array, Kernels

_STEP: Final = 64  # slots are read in steps, so that shapes repeat while a context fills
_NEVER: Final = np.iinfo(np.int32).max  # position of a slot without a row: after any anchor
_GROWTH: Final = 256  # fewest slots added to a store without a window

#: Projects rows [S, H] that begin at a position, for one store: keys and values [G * kv, S, hd].
Project = Callable[[int, Array, int], tuple[Array, Array]]


class ContextGap(EngineError):
    """Rows arrived that do not continue the context; nothing changed.

    Attributes:
        wanted_pos: the position the context needs next.
    """

    code = "context_gap"

    def __init__(self, message: str, wanted_pos: int) -> None:
        super().__init__(message)
        self.wanted_pos = wanted_pos


class ContextStore:
    """Keys and values of all layers of one kind: with one window, or with none.

    A window of W needs W - 1 slots, used in turn; without a window the store grows.
    """

    def __init__(
        self,
        n_planes: int,
        head_dim: int,
        window: int,
        max_context: int,
        dtype: mx.Dtype,
        kernels: Kernels,
    ) -> None:
        """Allocate the store.

        Args:
            n_planes: layers of this kind times key heads.
            head_dim: width of one key.
            window: W, or 0 for none.
            max_context: most positions a session may hold.
            dtype: of keys and values.
            kernels: the form they are held in.
        """
        self.window = window
        self._limit = min(window - 1, max_context) if window else max_context
        slots = self._limit if window else min(_GROWTH, max_context)
        self._shape = (n_planes, slots, head_dim)
        self._dtype = dtype
        self._kernels = kernels
        self.reset(0)

    def reset(self, first_pos: int) -> None:
        """Forget all rows; the next one has position `first_pos`."""
        self.keys = self._kernels.blank(self._shape, self._dtype)
        self.values = self._kernels.blank(self._shape, self._dtype)
        self.positions = np.full(self._shape[1], _NEVER, np.int32)
        self._origin = first_pos
        self._n_used = 0

    @property
    def n_read(self) -> int:
        """Slots that a query has to look at."""
        return min(len(self.positions), -(-self._n_used // _STEP) * _STEP)

    def n_kept(self, n_rows: int) -> int:
        """How many of `n_rows` new rows are worth writing: the last ones, as many as fit."""
        return min(n_rows, self._limit)

    def write(self, keys: Array, values: Array, first_pos: int) -> None:
        """Store rows [planes, S, hd] of positions first_pos .. first_pos + S - 1; does not wait."""
        S = keys.shape[1]
        start = first_pos - self._origin
        if not self.window:
            self._grow(start + S)
        slots = len(self.positions)
        slot = start % slots
        head = min(S, slots - slot)
        self._put(slot, keys[:, :head], values[:, :head])
        if head < S:
            self._put(0, keys[:, head:], values[:, head:])
        self.positions[(np.arange(S) + slot) % slots] = np.arange(first_pos, first_pos + S)
        self._n_used = slots if start + S > slots else max(self._n_used, start + S)
        self._kernels.submit([self.keys, self.values])

    def bias(self, anchor_pos: int, block_size: int) -> NDArray[np.float32]:
        """What each query of a block sees of the first `n_read` slots: 0 or -inf, float32 [B, C].

        Query j stands at anchor_pos + j.
        """
        # Rows between a slot and the anchor; wraps to a huge number where there is none before it.
        between = (anchor_pos - 1 - self.positions[: self.n_read]).view(np.uint32)
        bias = np.zeros((block_size, len(between)), np.float32)
        window = self.window or _NEVER
        some = np.flatnonzero(between >= max(0, window - block_size))  # not seen by all queries
        is_gone = between[some] >= window - 1 - np.arange(block_size)[:, None]
        bias[:, some] = np.where(is_gone, np.float32(-np.inf), np.float32(0))
        return bias

    def _put(self, slot: int, keys: Array, values: Array) -> None:
        end = slot + keys.shape[1]
        self.keys[:, slot:end] = keys
        self.values[:, slot:end] = values

    def _grow(self, n_rows: int) -> None:
        slots = len(self.positions)
        if n_rows <= slots:
            return
        more = min(max(n_rows - slots, slots, _GROWTH), self._limit - slots)
        planes, _, head_dim = self._shape
        blank = self._kernels.blank((planes, more, head_dim), self._dtype)
        self.keys = self._kernels.joined([self.keys, blank], axis=1)
        self.values = self._kernels.joined([self.values, blank], axis=1)
        self.positions = np.concatenate([self.positions, np.full(more, _NEVER, np.int32)])


class Context:
    """One session's context over all stores of a drafter."""

    def __init__(self, session_id: str, max_context: int, stores: list[ContextStore]) -> None:
        self.session_id = session_id
        self.max_context = max_context
        self.stores = stores
        self.start = 0  # absolute position of the first row, whatever the windows have dropped
        self.end = 0  # absolute position of the next row; the anchor's, when a draft is asked for

    def reset(self, first_pos: int = 0) -> None:
        """Forget all rows and continue at `first_pos`: a new epoch, or a start after a prefix.

        Raises:
            EngineError: the position is outside the session; nothing changed.
        """
        if not 0 <= first_pos <= self.max_context:
            raise EngineError(
                f"context of {self.session_id!r} cannot start at {first_pos}; "
                f"a position in 0..{self.max_context} is needed"
            )
        for store in self.stores:
            store.reset(first_pos)
        self.start = self.end = first_pos

    def append(self, rows: Array, first_pos: int, project: Project) -> int:
        """Add features of committed positions; on a device submits the work without waiting.

        Rows below `end` are already there and ignored, so a replay does no harm. Rows that begin
        before `start` and reach `end` take the context's place: they are a whole one, of which a
        row sent to an earlier link has come first.

        Args:
            rows: float [S, H], the fused features of positions first_pos .. first_pos + S - 1.
            first_pos: absolute position of the first row.
            project: makes keys and values of rows for one store.

        Returns:
            How many rows were new.

        Raises:
            ContextGap: rows between `end` and `first_pos` are missing; nothing changed.
            EngineError: more positions than the session may hold; nothing changed.
        """
        if first_pos > self.end:
            raise ContextGap(
                f"context of {self.session_id!r} ends at {self.end}, rows begin at {first_pos}; "
                f"rows from {self.end} are needed",
                self.end,
            )
        end = first_pos + rows.shape[0]
        if end > self.max_context:
            raise EngineError(
                f"context of {self.session_id!r} would hold {end} positions; "
                f"at most {self.max_context} were asked for at open"
            )
        if first_pos < self.start and end >= self.end:
            self.reset(first_pos)
        if end <= self.end:
            return 0
        fresh = rows[self.end - first_pos :]
        self._write(fresh, project)
        self.end = end
        return int(fresh.shape[0])

    def _write(self, rows: Array, project: Project) -> None:
        end = self.end + rows.shape[0]
        for index, store in enumerate(self.stores):
            kept = store.n_kept(rows.shape[0])
            keys, values = project(index, rows[rows.shape[0] - kept :], end - kept)
            store.write(keys, values, end - kept)


def mask_of(
    store: ContextStore, anchor_pos: int, block_size: int, *, is_causal: bool
) -> NDArray[np.float32]:
    """What is added to the scores of one block, float32 [B, n_read + B]: 0 or -inf.

    Every row sees itself, so no row is empty whatever the context holds.
    """
    inside = np.zeros((block_size, block_size), np.float32)
    if is_causal or 0 < store.window < block_size:
        steps = np.arange(block_size)[:, None] - np.arange(block_size)
        is_far = abs(steps) >= (store.window or block_size)
        inside[is_far | (steps < 0) if is_causal else is_far] = -np.inf
    return np.concatenate([store.bias(anchor_pos, block_size), inside], axis=1)
