"""States of recurrent layers, and what the rows of a forward add to them.

Does not know how a layer makes keys, values and decays. Two ways to commit: `DeltaChunk`s of all
layers are added by one product at the roll back; `Replayable` rows only get a count there, and the
next forward replays them in its own launch.

Memory of a round beside the states before it (4 Hv Dk Dv bytes a layer): for replayed rows the
states after those of the round before (as much again) and, per row and layer, one packed row,
41 KB at 16 key and 48 value heads of 128; so 12 MB for 8 rows of 36 layers, next to 2 x 108 MiB.

Invariant: the states before a forward, and the rows they wait for, stay whole until `roll_back`.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from common.errors import RollBackRefused
from target_svc.models.state import Own, refuse_unless


class Replayable(Protocol):
    """Rows of one layer that can be run again on its state."""

    @property
    def rows(self) -> int:
        """How many."""

    def after(self, keep: int, current: mx.array) -> mx.array:
        """The state [Hk, G, Dk, Dv] after the first `keep` rows, 1..rows, from the one before."""


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
    """States of all recurrent layers.

    Args:
        layers: L.
        shape: of one layer, (Hk, G, Dk, Dv).
    """

    def __init__(self, layers: int, shape: tuple[int, int, int, int]) -> None:
        self._layers = layers
        self._waiting: list[Replayable] = []  # committed rows that the states do not hold yet
        self._keep = 0  # how many of them
        self._whole: mx.array | None = None  # all states side by side, where made already
        self._become(mx.zeros((layers * shape[0], *shape[1:])))
        self._forget()

    @property
    def states(self) -> mx.array:
        """Committed states of all layers, float32 [L * Hk, G, Dk, Dv]; settles."""
        self.settle()
        if self._whole is None:
            self._whole = mx.concatenate(self._views)
        return self._whole

    def layer_state(self, layer: int) -> mx.array:
        """The committed state [Hk, G, Dk, Dv] of one layer; settles."""
        self.settle()
        return self._views[layer]

    def replay_from(self, layer: int) -> tuple[mx.array, Replayable | None, int]:
        """A layer's state, and rows of which the first so many are to be replayed on it."""
        waiting = self._waiting[layer] if self._waiting else None
        return self._views[layer], waiting, self._keep

    def settle(self) -> None:
        """Fold rows that wait for the next forward into the states, for copies or other forms."""
        if self._waiting:
            pairs = zip(self._waiting, self._views, strict=True)
            self._become_layers([rows.after(self._keep, state) for rows, state in pairs])

    def capture(self, layer: int, chunk: DeltaChunk) -> None:
        """Keep what any number of kept rows will need."""
        self._chunks[layer] = chunk

    def capture_replayable(self, layer: int, before: mx.array, rows: Replayable) -> None:
        """Keep the state before this forward's rows, what waited folded in, and the rows."""
        self._replayable[layer] = (before, rows)

    def capture_settled(self, layer: int, state: mx.array, rows: int) -> None:
        """Keep the state after all of `rows` rows; only keeping all of them can be served."""
        self._settled[layer] = (state, rows)

    @property
    def unread(self) -> Sequence[mx.array]:
        """See `Rollable`."""
        return ()

    def check(self, rows: int, keep: int) -> None:
        """See `Rollable`."""
        for layer in range(self._layers):
            refuse_unless(self._captured(layer), rows, "a recurrent layer")
        if self._settled and keep not in (0, rows):
            raise RollBackRefused(
                f"keep {keep} of {rows} rows: a forward of several chunks keeps all or none"
            )

    def roll_back(self, keep: int) -> None:
        """See `Rollable`."""
        layers = range(self._layers)
        if keep and self._settled:
            self._become_layers([self._settled[layer][0] for layer in layers])
        elif keep and self._replayable:
            self._become_layers([self._replayable[layer][0] for layer in layers])
            self._waiting = [self._replayable[layer][1] for layer in layers]
            self._keep = keep
        elif keep:
            self._become(self._side_by_side().after(keep, self.states))
        self._forget()

    def twin(self, own: Own) -> "RecurrentRows":
        """See `Rollable`; what waits is folded in at the twin, and still waits here."""
        twin = copy.copy(self)
        twin._forget()
        twin.settle()
        twin._become(own(twin.states))
        return twin

    def _captured(self, layer: int) -> int:
        if layer in self._settled:
            return self._settled[layer][1]
        if layer in self._replayable:
            return self._replayable[layer][1].rows
        chunk = self._chunks.get(layer)
        return 0 if chunk is None else chunk.decay.shape[-1]

    def _side_by_side(self) -> DeltaChunk:
        chunks = [self._chunks[layer] for layer in range(self._layers)]
        return DeltaChunk(
            mx.concatenate([chunk.k for chunk in chunks]),
            mx.concatenate([chunk.u for chunk in chunks]),
            mx.concatenate([chunk.decay for chunk in chunks]),
        )

    def _become(self, states: mx.array) -> None:
        self._become_layers(list(mx.split(states, self._layers)))
        self._whole = states

    def _become_layers(self, states: list[mx.array]) -> None:
        self._views = states
        self._whole = None
        self._waiting, self._keep = [], 0

    def _forget(self) -> None:
        self._chunks: dict[int, DeltaChunk] = {}
        self._replayable: dict[int, tuple[mx.array, Replayable]] = {}
        self._settled: dict[int, tuple[mx.array, int]] = {}
