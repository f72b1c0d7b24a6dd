"""Choose the target's own token for every row, and count the drafts that agree.

Knows logits and ids. Does not know sessions, state or drafters. Acceptance compares ids: the
target's own choice at a position, greedy or keyed, does not depend on drafts, so any draft, good
or hostile, leaves the output unchanged. One tie rule: the lowest id.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from common.errors import NotFinite
from target_svc.distribution import NEAR_TIE, Sampling, draw
from target_svc.models.blocks.norms import is_cpu


@dataclass(frozen=True, slots=True)
class Choices:
    """The target's choice at every row of one forward."""

    ids: tuple[int, ...]
    is_near_tie: tuple[bool, ...]


def choose(logits: mx.array, sampling: Sampling, first_pos: int) -> Choices:
    """Choose a token at every row of logits [R, V]; the one host read of a round.

    Args:
        logits: row i scores the token at position first_pos + i.
        sampling: temperature 0 takes the best, another one draws.
        first_pos: absolute position of the token that row 0 scores.

    Raises:
        NotFinite: a row has no finite best score.
    """
    if sampling.temperature > 0:
        return _draw_rows(np.array(logits.astype(mx.float32)), sampling, first_pos)
    ids, best, second = _best_two_on_host(logits) if is_cpu() else _best_two_on_device(logits)
    _check_finite(best)
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


def _draw_rows(scores: NDArray[Any], sampling: Sampling, first_pos: int) -> Choices:
    _check_finite(scores.max(axis=1))
    draws = [draw(row, sampling, first_pos + index) for index, row in enumerate(scores)]
    return Choices(tuple(d.token for d in draws), tuple(d.is_near_tie for d in draws))


def _check_finite(best: NDArray[Any]) -> None:
    if not np.isfinite(best).all():
        row = int(np.argmin(np.isfinite(best)))
        raise NotFinite(f"row {row} has best score {best[row]}; every row needs a finite one")


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
