"""Rows by absolute position: attention's keys and values, and a convolution's last rows.

Does not know what rows mean. Invariants: a roll-back moves a length or takes a view; nothing is
copied. A forward's rows stand in a buffer of their own name until it is submitted, so that an
abandoned build leaves nothing behind; then the old name is let go, so that MLX writes in place.
"""

import copy
from collections.abc import Sequence
from typing import Final

import mlx.core as mx

from target_svc.models.state import Own, refuse_unless

GROWTH_ROWS: Final = 256  # buffers grow by this many rows


class RowWindow:
    """The last rows that a causal convolution looks back on, [w, C].

    Args:
        rows: w.
        width: C.
    """

    def __init__(self, rows: int, width: int, dtype: mx.Dtype) -> None:
        self._rows = rows
        self.window = mx.zeros((rows, width), dtype=dtype)
        self._padded: mx.array | None = None

    def extend(self, new: mx.array) -> mx.array:
        """Capture new rows [R, C]; returns the window and them, [w + R, C]."""
        self._padded = mx.concatenate([self.window, new])
        return self._padded

    @property
    def unread(self) -> Sequence[mx.array]:
        """See `Rollable`."""
        return ()

    def check(self, rows: int, keep: int) -> None:
        """See `Rollable`."""
        captured = 0 if self._padded is None else self._padded.shape[0] - self._rows
        refuse_unless(captured, rows, "a convolution window")

    def roll_back(self, keep: int) -> None:
        """See `Rollable`."""
        if keep and self._padded is not None:  # a view at 0 would hold on to an abandoned graph
            self.window = self._padded[keep : keep + self._rows]
        self._padded = None

    def twin(self, own: Own) -> "RowWindow":
        """See `Rollable`."""
        twin = copy.copy(self)
        twin.window, twin._padded = own(self.window), None
        return twin


class GrowingRows:
    """Rows by absolute position in a buffer that grows in steps; a cut changes the length only.

    Args:
        heads: 0 for a buffer [n, D], else [heads, n, D].

    Attributes:
        length: committed rows.
        captured: rows of the present forward.
    """

    def __init__(self, heads: int, width: int, dtype: mx.Dtype) -> None:
        self._heads = heads
        self.length = 0
        self.captured = 0
        self._rows = mx.zeros(self._shape(GROWTH_ROWS, width), dtype=dtype)
        self._built: mx.array | None = None  # `_rows` with captured ones, until it is submitted

    def append(self, new: mx.array) -> mx.array:
        """Capture rows [heads, R, D] or [R, D]; returns a view of all rows up to them."""
        end = self.length + new.shape[-2]
        built = self._with_room(end)[:]  # another name of the same array; assigning rebinds it
        self.captured = new.shape[-2]
        self._built = built
        if self._heads:
            built[:, self.length : end] = new
            return built[:, :end]
        built[self.length : end] = new
        return built[:end]

    @property
    def committed(self) -> mx.array:
        """View of the committed rows."""
        return self._rows[..., : self.length, :]

    @property
    def buffer(self) -> mx.array:
        """The whole buffer, for evaluation: an append nobody reads must not pile up."""
        return self._rows if self._built is None else self._built

    @property
    def unread(self) -> Sequence[mx.array]:
        """See `Rollable`."""
        return ()

    def let_go(self) -> None:
        """See `Buffered`."""
        if self._built is not None:
            self._rows, self._built = self._built, None

    def check(self, rows: int, keep: int) -> None:
        """See `Rollable`."""
        refuse_unless(self.captured, rows, "a row buffer")

    def roll_back(self, keep: int) -> None:
        """See `Rollable`."""
        if keep:
            self.let_go()
        self._built = None
        self.length += keep
        self.captured = 0

    def cut(self, length: int) -> None:
        """Forget committed rows from `length` on."""
        self.length = min(self.length, length)

    def twin(self, own: Own) -> "GrowingRows":
        """See `Rollable`: a buffer without room, so that its first append makes another one."""
        twin = copy.copy(self)
        twin._rows, twin._built, twin.captured = own(self.committed), None, 0
        return twin

    def _with_room(self, length: int) -> mx.array:
        have = self._rows.shape[-2]
        if length <= have:
            return self._rows
        more = -(-(length - have) // GROWTH_ROWS) * GROWTH_ROWS
        extra = mx.zeros(self._shape(more, self._rows.shape[-1]), dtype=self._rows.dtype)
        return mx.concatenate([self._rows, extra], axis=-2)

    def _shape(self, rows: int, width: int) -> tuple[int, ...]:
        return (self._heads, rows, width) if self._heads else (rows, width)
