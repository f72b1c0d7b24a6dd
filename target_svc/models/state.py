"""What a forward keeps of one sequence: pieces of one common life, and the whole of them.

Owns the life of a piece: a forward captures R rows, `let_go` says that they will be run,
`check(keep)` says whether they can be cut to `keep`, and `roll_back(keep)` makes the first `keep`
rows final. Does not know what pieces hold; they are in `target_svc.models.states`.
Invariant: between forwards no piece has captured rows, and all hold the same committed rows.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, Self, runtime_checkable

import mlx.core as mx

from common.errors import EngineError, RollBackRefused

#: Gives the array that a twin holds for one of the piece it is made of: itself, or a copy.
Own = Callable[[mx.array], mx.array]


def itself(array: mx.array) -> mx.array:
    """The `Own` of twins that share arrays, as values."""
    return array


class Rollable(Protocol):
    """One piece of state."""

    @property
    def unread(self) -> Sequence[mx.array]:
        """Arrays that a forward changed although no result may read them: evaluate them too."""

    def check(self, rows: int, keep: int) -> None:
        """Raise RollBackRefused unless `rows` rows are captured and `keep` of them can stay."""

    def roll_back(self, keep: int) -> None:
        """Make the first `keep` captured rows final and forget the rest."""

    def twin(self, own: Own) -> Self:
        """Another piece with the committed rows of this one; neither ever changes the other.

        Args:
            own: called once for every array of committed rows, and for nothing beyond them.
        """


@runtime_checkable
class Buffered(Protocol):
    """A piece that a forward writes into in place, once nothing else holds the old buffer."""

    def let_go(self) -> None:
        """Forget what only an abandoned build needs: the captured rows will be run."""


def refuse_unless(captured: int, rows: int, what: str) -> None:
    """Raise RollBackRefused where a piece has not captured exactly the rows of this forward."""
    if captured != rows:
        raise RollBackRefused(
            f"{what} captured {captured} rows of a forward of {rows}; all must be captured"
        )


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
        self._buffered = [piece for piece in pieces.values() if isinstance(piece, Buffered)]

    def let_go(self) -> None:
        """Call before rows are handed to the device: else MLX copies every buffer they extend."""
        for piece in self._buffered:
            piece.let_go()

    def twin(self, own: Own) -> "SequenceState":
        """Another state with the committed rows of this one; see `Rollable.twin`.

        Raises:
            EngineError: a forward is captured; commit or abandon it first.
        """
        if self.captured:
            raise EngineError(
                f"{self.captured} rows are captured at position {self.base}; a twin is made "
                "between forwards"
            )
        twin = SequenceState({name: piece.twin(own) for name, piece in self.pieces.items()})
        twin.base = self.base
        return twin

    def arrays(self) -> list[mx.array]:
        """Arrays that a forward changed although no result may read them; evaluate them too."""
        return [array for piece in self.pieces.values() for array in piece.unread]
