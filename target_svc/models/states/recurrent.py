"""States of recurrent layers, and what the rows of a forward add to them.

Does not know how a layer makes keys, values and decays. Invariant: the state before a forward stays
whole until `roll_back`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from common.errors import RollBackRefused
from target_svc.models.state import refuse_unless


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
