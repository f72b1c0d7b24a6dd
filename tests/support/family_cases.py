"""How the families of one residual stream are compared with the reference."""

from pathlib import Path

import mlx.core as mx
import numpy as np
from support.target_cases import feed_parts

from target_svc.models.family import run_rows

STRIDE = 16  # the goldens hold every sixteenth id
PATTERNS = {
    "all at once": lambda ids: [ids],
    "one by one": lambda ids: in_parts(ids, 1),
    "in fives": lambda ids: in_parts(ids, 5),
    "in sevens": lambda ids: in_parts(ids, 7),
    "in chunks of 64": lambda ids: in_parts(ids, 64),
    "in chunks of 65": lambda ids: in_parts(ids, 65),
    "in uneven chunks": lambda ids: [ids[:1], ids[1:24], ids[24:88], ids[88:89], ids[89:]],
}


def golden_families():
    """What transformers computed; see tests/golden/make_families.py."""
    with np.load(Path(__file__).parents[1] / "golden" / "families.npz") as stored:
        return dict(stored)


def in_parts(ids, rows):
    """The ids in forwards of so many rows."""
    return [ids[at : at + rows] for at in range(0, len(ids), rows)]


def worst(model, golden, case, pattern):
    """Largest difference from the reference over a case's sequences."""
    differences = []
    for ids, wanted in zip(golden[f"{case}.ids"], golden[f"{case}.logits"], strict=True):
        assert np.abs(wanted).max() > 1
        logits = feed_parts(model, PATTERNS[pattern](ids))
        differences.append(np.abs(logits[:, ::STRIDE] - wanted).max())
    return max(differences)


def residual_after(model, ids, layer):
    """The tap [R, H] of a layer, as a drafter is given it."""
    seen, state = {}, model.new_state()

    def tap(index, residual):
        seen[index] = model.contract("stream_mean", index, residual)

    run_rows(model, [int(i) for i in ids], state, tap=tap)
    mx.eval(seen[layer])
    return np.array(seen[layer])
