"""Make the first rows of a forward final, and forget the others.

Knows pieces of state only by their common life. Does not know what they hold.
Invariant: everything is checked before anything changes; a refusal leaves the state as it was.
"""

from common.errors import RollBackRefused
from target_svc.models.state import SequenceState


def commit(state: SequenceState, keep: int) -> None:
    """Keep the first `keep` rows of the forward that is captured in `state`.

    Args:
        state: after a forward.
        keep: 0..R rows; 0 abandons the forward.

    Raises:
        RollBackRefused: nothing is captured, `keep` is out of range, or a piece cannot serve it
            (code "roll_back_refused"); nothing changed.
    """
    rows = state.captured
    if rows == 0:
        raise RollBackRefused("no forward to commit; run one first")
    if not 0 <= keep <= rows:
        raise RollBackRefused(f"keep {keep} of {rows} rows; it must be in 0..{rows}")
    for piece in state.pieces.values():
        piece.check(rows, keep)
    for piece in state.pieces.values():
        piece.roll_back(keep)
    state.base += keep
    state.captured = 0


def abandon(state: SequenceState) -> None:
    """Forget a forward that was built, wholly or in part, whether it ran or not."""
    for piece in state.pieces.values():
        piece.roll_back(0)
    state.captured = 0
