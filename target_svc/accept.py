"""Choose the target's own token for every row, and count the drafts that agree.

Knows logits and ids. Does not know sessions, state or drafters. Greedy acceptance compares ids, so
any draft, good or hostile, leaves the output unchanged. One tie rule: the lowest id.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from common.errors import NotFinite
from target_svc.models.blocks.norms import is_cpu

NEAR_TIE: Final = 1e-4  # of max(1, |best|): kernels that differ by rows may order these either way


@dataclass(frozen=True, slots=True)
class Choices:
    """The target's choice at every row of one forward."""

    ids: tuple[int, ...]
    is_near_tie: tuple[bool, ...]


def choose(logits: mx.array) -> Choices:
    """Take the best id of every row of logits [R, V]; the one host read of a round.

    Raises:
        NotFinite: a row has no finite best score.
    """
    ids, best, second = _best_two_on_host(logits) if is_cpu() else _best_two_on_device(logits)
    if not np.isfinite(best).all():
        row = int(np.argmin(np.isfinite(best)))
        raise NotFinite(f"row {row} has best score {best[row]}; every row needs a finite one")
    near = (best - second) < NEAR_TIE * np.maximum(1.0, np.abs(best))
    return Choices(tuple(ids.tolist()), tuple(near.tolist()))


def count_accepted(chosen_ids: Sequence[int], draft_ids: Sequence[int]) -> int:
    """Leading drafts that equal the target's own choice at their position.

    >>> count_accepted([5, 6, 9, 1], [5, 6, 7])
    2
    """
    count = 0
    for chosen, draft in zip(chosen_ids, draft_ids, strict=False):
        if chosen != draft:
            break
        count += 1
    return count


def _best_two_on_host(logits: mx.array) -> tuple[NDArray[Any], ...]:
    scores = np.array(logits)  # a copy: the best is struck out below
    rows = np.arange(len(scores))
    ids = scores.argmax(axis=1)
    best = scores[rows, ids]
    scores[rows, ids] = -np.inf
    return ids, best, scores.max(axis=1)


def _best_two_on_device(logits: mx.array) -> tuple[NDArray[Any], ...]:
    scores = logits.astype(mx.float32)
    ids = mx.argmax(scores, axis=-1)
    best = mx.max(scores, axis=-1)
    is_best = mx.arange(scores.shape[-1])[None, :] == ids[:, None]
    second = mx.max(mx.where(is_best, -mx.inf, scores), axis=-1)
    mx.eval(ids, best, second)
    return np.array(ids), np.array(best), np.array(second)
