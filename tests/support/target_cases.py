"""Ways to run the tiny target that several tests share."""

import copy

import mlx.core as mx
import numpy as np

from target_svc.models.family import run_rows
from target_svc.rollback import commit

#: float32 on two BLAS kernels; the reference's own spread over feeding patterns is 5e-6.
CLOSE = 2e-5


def feed(model, state, ids):
    """Forward and commit all of `ids`; logits [R, V]."""
    logits = np.array(model.logits(run_rows(model, [int(i) for i in ids], state)))
    commit(state, len(ids))
    return logits


def feed_parts(model, parts):
    """Logits [N, V] of a new sequence fed in these parts."""
    state = model.new_state()
    return np.concatenate([feed(model, state, part) for part in parts])


def fork(state):
    """An independent copy of a state between forwards."""
    mx.eval(state.arrays())
    return copy.deepcopy(state)


def arrays_of(state):
    """Every committed number of a state, by piece and attribute."""
    found = {}
    for name, piece in state.pieces.items():
        match type(piece).__name__:
            case "RecurrentRows" | "ChannelRows":
                found[name] = np.array(piece.states)
            case "RowWindow":
                found[name] = np.array(piece.window)
            case "GrowingRows":
                found[name] = np.array(piece.committed)
            case "PooledKeys":
                found[name + ".raw"] = np.array(piece.raw.committed)
                found[name + ".pooled"] = np.array(piece.pooled(piece.n_pooled))
            case "GatedPools":
                found[name + ".open"] = np.array(piece.open)
                found[name + ".keys"] = np.array(piece.keys)
            case "TokenHistory":
                found[name] = np.array(piece.ids)
            case other:
                raise AssertionError(f"a piece without a rule here: {other}")
    return found
