"""Whether a model can take rejected rows back: asked of its state, before anybody drafts.

Owns the question and the sentence of the answer. Does not know families: a piece of state declares
what it can serve by `Rollable.check`. Invariant: what is found here would have been refused in the
first round with a rejected draft; a model that fails still serves plain, where all rows are kept.
"""

from common.errors import RollBackRefused
from target_svc.models.family import Model, run_rows
from target_svc.models.state import Rollable, SequenceState
from target_svc.rollback import abandon


def refusal_of(model: Model, rows: int) -> str:
    """Say which state could not be rolled back after a verify.

    Builds the graph of one verify on an empty sequence; nothing is run.

    Args:
        model: loaded.
        rows: of the widest verify, at least 1.

    Returns:
        A sentence without a full stop that names the state, or "" where every number of kept rows
        can be served.
    """
    state = model.new_state()
    strange = [name for name, piece in state.pieces.items() if not _is_rollable(piece)]
    if strange:
        return f"state {strange[0]!r} declares no way to be rolled back"
    run_rows(model, [0] * rows, state)
    try:
        return _first_refusal(state, rows)
    finally:
        abandon(state)


def _is_rollable(piece: object) -> bool:
    return all(hasattr(piece, name) for name in ("unread", "check", "roll_back"))


def _first_refusal(state: SequenceState, rows: int) -> str:
    for name, piece in state.pieces.items():
        fault = _fault_of(piece, rows)
        if fault:
            return f"state {name!r} cannot be rolled back: {fault}"
    return ""


def _fault_of(piece: Rollable, rows: int) -> str:
    for keep in range(1, rows):
        try:
            piece.check(rows, keep)
        except RollBackRefused as fault:
            return str(fault)
    return ""
