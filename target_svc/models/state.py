"""What a forward keeps of one sequence, and how each piece is rolled back.

Owns KV rows, index keys, convolution windows, recurrent states and the n-gram history. Does not
know layers' arithmetic. Every piece has the same life: a forward captures R rows, `check(keep)`
says whether they can be cut to `keep`, and `roll_back(keep)` makes the first `keep` rows final.
Invariant: between forwards no piece has captured rows, and all hold the same committed rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import mlx.core as mx

from common.errors import RollBackRefused

GROWTH_ROWS: Final = 256  # buffers grow by this many rows


class Rollable(Protocol):
    """One piece of state."""

    def check(self, rows: int, keep: int) -> None:
        """Raise RollBackRefused unless `rows` rows are captured and `keep` of them can stay."""

    def roll_back(self, keep: int) -> None:
        """Make the first `keep` captured rows final and forget the rest."""


def refuse_unless(captured: int, rows: int, what: str) -> None:
    """Raise RollBackRefused where a piece has not captured exactly the rows of this forward."""
    if captured != rows:
        raise RollBackRefused(
            f"{what} captured {captured} rows of a forward of {rows}; all must be captured"
        )


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

    def check(self, rows: int, keep: int) -> None:
        """See `Rollable`."""
        captured = 0 if self._padded is None else self._padded.shape[0] - self._rows
        refuse_unless(captured, rows, "a convolution window")

    def roll_back(self, keep: int) -> None:
        """See `Rollable`."""
        if self._padded is not None:
            self.window = self._padded[keep : keep + self._rows]
        self._padded = None


@dataclass(frozen=True, slots=True)
class DeltaChunk:
    """What the rows of a forward add to recurrent states, for any number of kept rows.

    Several layers stand side by side on the axis of key heads.
    """

    k: mx.array  # float32 [Hk, 1, R, Dk], unit length
    u: mx.array  # float32 [Hk, G, R, Dv], corrected values
    decay: mx.array  # float32 [Hk, G, R], cumulative log decay

    def after(self, keep: int, current: mx.array) -> mx.array:
        """The state [Hk, G, Dk, Dv] after `keep` rows, 1..R, from the one before the rows."""
        decay = self.decay[..., :keep]
        last = decay[..., keep - 1 :]
        kept = self.u[..., :keep, :] * mx.exp(last - decay)[..., None]
        added = self.k[..., :keep, :].swapaxes(-1, -2) @ kept
        return current * mx.exp(last)[..., None] + added


class RecurrentRows:
    """States of all recurrent layers, side by side so that one product commits them together.

    Args:
        layers: L.
        shape: of one layer, (Hk, G, Dk, Dv).

    Attributes:
        states: float32 [L * Hk, G, Dk, Dv]; immutable, so a forward leaves the old one whole.
    """

    def __init__(self, layers: int, shape: tuple[int, int, int, int]) -> None:
        self._layers = layers
        self._become(mx.zeros((layers * shape[0], *shape[1:])))
        self._forget()

    def layer_state(self, layer: int) -> mx.array:
        """The state [Hk, G, Dk, Dv] of one layer before this forward's rows."""
        return self._views[layer]

    def capture(self, layer: int, chunk: DeltaChunk) -> None:
        """Keep what any number of kept rows will need."""
        self._chunks[layer] = chunk

    def capture_settled(self, layer: int, state: mx.array, rows: int) -> None:
        """Keep the state after all of `rows` rows; only keeping all of them can be served."""
        self._settled[layer] = (state, rows)

    def check(self, rows: int, keep: int) -> None:
        """See `Rollable`."""
        for layer in range(self._layers):
            if layer in self._settled:
                refuse_unless(self._settled[layer][1], rows, "a recurrent layer")
                if keep not in (0, rows):
                    raise RollBackRefused(
                        f"keep {keep} of {rows} rows: a forward of several chunks keeps all or none"
                    )
            else:
                chunk = self._chunks.get(layer)
                captured = 0 if chunk is None else chunk.decay.shape[-1]
                refuse_unless(captured, rows, "a recurrent layer")

    def roll_back(self, keep: int) -> None:
        """See `Rollable`."""
        if keep and self._settled:
            self._become(mx.concatenate([self._settled[i][0] for i in range(self._layers)]))
        elif keep:
            chunks = [self._chunks[i] for i in range(self._layers)]
            side_by_side = DeltaChunk(
                mx.concatenate([chunk.k for chunk in chunks]),
                mx.concatenate([chunk.u for chunk in chunks]),
                mx.concatenate([chunk.decay for chunk in chunks]),
            )
            self._become(side_by_side.after(keep, self.states))
        self._forget()

    def _become(self, states: mx.array) -> None:
        self.states = states
        self._views = mx.split(states, self._layers)

    def _forget(self) -> None:
        self._chunks: dict[int, DeltaChunk] = {}
        self._settled: dict[int, tuple[mx.array, int]] = {}


class GrowingRows:
    """Rows by absolute position in a buffer that grows in steps; a cut changes the length only.

    Args:
        heads: 0 for a buffer [n, D], else [heads, n, D].
    """

    def __init__(self, heads: int, width: int, dtype: mx.Dtype) -> None:
        self._heads = heads
        self.length = 0
        self._captured = 0
        self._rows = mx.zeros(self._shape(GROWTH_ROWS, width), dtype=dtype)

    def append(self, new: mx.array) -> mx.array:
        """Capture rows [heads, R, D] or [R, D]; returns a view of all rows up to them."""
        count = new.shape[-2]
        end = self.length + count
        self._reserve(end)
        self._captured = count
        if self._heads:
            self._rows[:, self.length : end] = new
            return self._rows[:, :end]
        self._rows[self.length : end] = new
        return self._rows[:end]

    @property
    def committed(self) -> mx.array:
        """View of the committed rows."""
        return self._rows[..., : self.length, :]

    @property
    def buffer(self) -> mx.array:
        """The whole buffer, for evaluation: an append nobody reads must not pile up."""
        return self._rows

    def check(self, rows: int, keep: int) -> None:
        """See `Rollable`."""
        refuse_unless(self._captured, rows, "a row buffer")

    def roll_back(self, keep: int) -> None:
        """See `Rollable`."""
        self.length += keep
        self._captured = 0

    def _reserve(self, length: int) -> None:
        have = self._rows.shape[-2]
        if length <= have:
            return
        more = -(-(length - have) // GROWTH_ROWS) * GROWTH_ROWS
        extra = mx.zeros(self._shape(more, self._rows.shape[-1]), dtype=self._rows.dtype)
        self._rows = mx.concatenate([self._rows, extra], axis=-2)

    def _shape(self, rows: int, width: int) -> tuple[int, ...]:
        return (self._heads, rows, width) if self._heads else (rows, width)


class PooledKeys:
    """Index keys: raw rows by position, and one pooled key per complete block, made when needed.

    Raw rows are kept for the whole context, so a cut is a length; pooled keys of complete blocks
    are never made twice, and a block that a rejected row completed is dropped.
    """

    def __init__(self, width: int, ratio: int, dtype: mx.Dtype) -> None:
        self.raw = GrowingRows(0, width, dtype)
        self._ratio = ratio
        self._pooled = GrowingRows(0, width, mx.float32)

    @property
    def n_pooled(self) -> int:
        """Blocks whose pooled key is stored."""
        return self._pooled.length

    def add_pooled(self, keys: mx.array) -> None:
        """Store the pooled keys of the next blocks, [n, D]."""
        self._pooled.append(keys)
        self._pooled.roll_back(keys.shape[0])

    def pooled(self, blocks: int) -> mx.array:
        """Pooled keys of the first `blocks` blocks, [blocks, D]."""
        return self._pooled.committed[:blocks]

    @property
    def buffers(self) -> Sequence[mx.array]:
        """For evaluation."""
        return (self.raw.buffer, self._pooled.buffer)

    def check(self, rows: int, keep: int) -> None:
        """See `Rollable`."""
        self.raw.check(rows, keep)

    def roll_back(self, keep: int) -> None:
        """See `Rollable`."""
        self.raw.roll_back(keep)
        self._pooled.length = min(self._pooled.length, self.raw.length // self._ratio)


class TokenHistory:
    """The last raw token ids that n-gram rows look back on; before the start all are `filler`."""

    def __init__(self, count: int, filler: int) -> None:
        self.ids: tuple[int, ...] = (filler,) * count
        self._captured: tuple[int, ...] = ()

    def extend(self, ids: Sequence[int]) -> list[int]:
        """Capture the ids of this forward; returns the history and them."""
        self._captured = tuple(ids)
        return [*self.ids, *self._captured]

    def check(self, rows: int, keep: int) -> None:
        """See `Rollable`."""
        refuse_unless(len(self._captured), rows, "the token history")

    def roll_back(self, keep: int) -> None:
        """See `Rollable`."""
        seen = self.ids + self._captured[:keep]
        self.ids = seen[len(seen) - len(self.ids) :]
        self._captured = ()


class SequenceState:
    """All pieces of one sequence.

    Attributes:
        base: committed rows; the absolute position of the next row.
        captured: rows of the forward that is not committed yet, 0 between rounds.
        pieces: everything that must be rolled back, by name.
    """

    def __init__(self, pieces: dict[str, Rollable]) -> None:
        self.base = 0
        self.captured = 0
        self.pieces = pieces

    def arrays(self) -> list[mx.array]:
        """Arrays that a forward changed although no result may read them; evaluate them too."""
        kept = (piece for piece in self.pieces.values() if isinstance(piece, PooledKeys))
        return [array for piece in kept for array in piece.buffers]
