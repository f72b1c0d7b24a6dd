"""States of recurrent layers whose decay differs per key channel, and what rows add to them.

Does not know how a layer makes keys, values and decays. Invariant: the states before a forward stay
whole until `roll_back`. A round holds, besides the states, 4 (2 Dk + Dv) bytes per row, head and
layer; the states after it are one product that is run with the next forward.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from common.errors import RollBackRefused
from target_svc.models.state import Own, refuse_unless


@dataclass(frozen=True, slots=True)
class ChannelChunk:
    """What a few rows add to states, for any number of kept ones, from the state before them.

    Several layers stand side by side on the axis of heads.
    """

    raised: mx.array  # float32 [H, c, Dk], unit keys divided by their `fade`
    added: mx.array  # float32 [H, c, Dv], corrected values
    fade: mx.array  # float32 [H, c, Dk], what is left of the state after a row, in (0, 1]

    @property
    def rows(self) -> int:
        """How many, c."""
        return self.added.shape[1]

    def after(self, keep: int, current: mx.array) -> mx.array:
        """The states [H, Dk, Dv] after `keep` rows, 1..c, from those before the rows."""
        written = self.raised[:, :keep].swapaxes(-1, -2) @ self.added[:, :keep]
        return (current + written) * self.fade[:, keep - 1, :, None]


def side_by_side(chunks: Sequence[ChannelChunk]) -> ChannelChunk:
    """Chunks of the same rows in several layers as one."""
    return ChannelChunk(
        mx.concatenate([chunk.raised for chunk in chunks]),
        mx.concatenate([chunk.added for chunk in chunks]),
        mx.concatenate([chunk.fade for chunk in chunks]),
    )


class ChannelRows:
    """States of all such layers, side by side so that few products commit them together.

    Args:
        layers: L.
        shape: of one layer, (H, Dk, Dv).

    Attributes:
        states: float32 [L * H, Dk, Dv]; immutable, so a forward leaves the old ones whole.
    """

    def __init__(self, layers: int, shape: tuple[int, int, int]) -> None:
        self._layers = layers
        self._become(mx.zeros((layers * shape[0], *shape[1:])))
        self._forget()

    def layer_state(self, layer: int) -> mx.array:
        """The state [H, Dk, Dv] of one layer before this forward's rows."""
        return self._views[layer]

    def capture(self, layer: int, chunks: Sequence[ChannelChunk]) -> None:
        """Keep what any number of kept rows will need; every layer has the same cuts."""
        self._chunks[layer] = tuple(chunks)

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
            if layer in self._settled:
                refuse_unless(self._settled[layer][1], rows, "a recurrent layer")
                if keep not in (0, rows):
                    raise RollBackRefused(
                        f"keep {keep} of {rows} rows: a forward so long keeps all or none"
                    )
            else:
                captured = sum(chunk.rows for chunk in self._chunks.get(layer, ()))
                refuse_unless(captured, rows, "a recurrent layer")

    def roll_back(self, keep: int) -> None:
        """See `Rollable`."""
        if keep and self._settled:
            self._become(mx.concatenate([self._settled[i][0] for i in range(self._layers)]))
        elif keep:
            self._become(self._replay(keep))
        self._forget()

    def twin(self, own: Own) -> "ChannelRows":
        """See `Rollable`."""
        twin = copy.copy(self)
        twin._become(own(self.states))
        twin._forget()
        return twin

    def _replay(self, keep: int) -> mx.array:
        states, left = self.states, keep
        for parts in zip(*(self._chunks[i] for i in range(self._layers)), strict=True):
            chunk = side_by_side(parts)
            states = chunk.after(min(left, chunk.rows), states)
            left -= chunk.rows
            if left <= 0:
                break
        return states

    def _become(self, states: mx.array) -> None:
        self.states = states
        self._views = mx.split(states, self._layers)

    def _forget(self) -> None:
        self._chunks: dict[int, tuple[ChannelChunk, ...]] = {}
        self._settled: dict[int, tuple[mx.array, int]] = {}
