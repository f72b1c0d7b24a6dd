"""Decide on the drafts of one forward, and choose the token that follows the accepted prefix.

Knows logits, drafts and a request's sampling. Does not know sessions, state or drafters. Scores are
read by the host once; a row is looked at only if all drafts before it were kept.
Invariant: under greedy and `exact` the target's own choice at a position does not depend on drafts,
so any draft, good or hostile, leaves the output unchanged. One tie rule: the lowest id.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from common.errors import NotFinite
from target_svc.distribution import (
    NEAR_TIE,
    Sampling,
    adjusted,
    best,
    changes_scores,
    draw,
    kept_of,
)
from target_svc.models.blocks.norms import is_cpu
from target_svc.rules import RULES, Ruling, Source
from target_svc.seen import Seen


@dataclass(frozen=True, slots=True)
class Drafts:
    """What a forward verifies beside the anchor.

    Attributes:
        ids: draft ids, at most R - 1.
        sources: what each was drawn from; empty where none was drawn but the best one taken.
        is_copy: taken from earlier text: always judged by `exact`, since a lossy rule would make
            copying certain.
    """

    ids: tuple[int, ...] = ()
    sources: tuple[Source, ...] = ()
    is_copy: bool = False


NO_DRAFTS: Final = Drafts()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms under softmax of the raw scores, before anything of `distribution`."""

    chosen: float
    top_ids: tuple[int, ...]  # best first, lowest id first
    top: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """What one forward has decided."""

    ids: tuple[int, ...]  # accepted drafts, then the target's own token
    n_accepted: int
    near_ties: int  # among the positions decided
    logprobs: tuple[TokenLogprobs, ...]  # one per id where asked for, else empty
    certainty: float  # share of the best token under softmax of the last id's raw scores


def decide(
    logits: mx.array,
    drafts: Drafts,
    sampling: Sampling,
    first_pos: int,
    seen: Seen | None = None,
) -> Decision:
    """Judge drafts by the scores of the rows before them.

    Args:
        logits: [R, V]; row i scores the token at position first_pos + i. Rows past the drafts are
            padding.
        drafts: at most R - 1 of them.
        sampling: of the request.
        first_pos: absolute position of the token that row 0 scores.
        seen: ids up to the anchor, where `distribution.counts_tokens`.

    Raises:
        NotFinite: a row that decides has no finite best score.
    """
    is_greedy = sampling.temperature == 0
    if is_greedy and sampling.logprobs < 0 and not changes_scores(sampling):
        return _decide_greedily(logits, drafts.ids)
    scores = np.array(logits.astype(mx.float32))
    decided: list[Ruling] = []
    for row in range(len(drafts.ids) + 1):
        _check_finite(scores[row : row + 1].max(axis=1), row)
        decided.append(_rule(scores[row], row, drafts, sampling, first_pos + row, seen))
        if not decided[-1].is_kept:
            break
    ids = tuple(ruling.token for ruling in decided)
    logprobs = (
        tuple(logprobs_of(scores[row], token, sampling.logprobs) for row, token in enumerate(ids))
        if sampling.logprobs >= 0
        else ()
    )
    near = sum(ruling.is_near_tie for ruling in decided)
    return Decision(ids, len(ids) - 1, near, logprobs, share_of_best(scores[len(ids) - 1]))


def _rule(
    scores: NDArray[Any],
    row: int,
    drafts: Drafts,
    sampling: Sampling,
    position: int,
    seen: Seen | None,
) -> Ruling:
    """Decide on one position; the row after the last draft keeps nothing."""
    wide = adjusted(scores, sampling, seen, drafts.ids[:row])
    draft = drafts.ids[row] if row < len(drafts.ids) else None
    if sampling.temperature == 0:
        choice = best(wide)
        return Ruling(choice.token == draft, choice.token, choice.is_near_tie)
    kept = kept_of(wide, sampling)
    if draft is None:
        choice = draw(kept, sampling.seed, position)
        return Ruling(False, choice.token, choice.is_near_tie)
    source = drafts.sources[row] if drafts.sources else Source.certain(draft)
    rule = RULES["exact" if drafts.is_copy else sampling.acceptance]
    return rule(kept, draft, source, sampling, position)


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


def logprobs_of(scores: NDArray[Any], token: int, count: int) -> TokenLogprobs:
    """Log probabilities of one token and of the `count` best, under raw scores [V]."""
    wide = scores.astype(np.float64)
    top = wide.max()
    wide = wide - (top + np.log(np.exp(wide - top).sum()))
    count = min(count, len(wide))
    edge = np.partition(wide, len(wide) - count)[len(wide) - count] if count else np.inf
    ranked = np.flatnonzero(wide >= edge)
    ranked = ranked[np.argsort(-wide[ranked], kind="stable")][:count]
    return TokenLogprobs(
        min(0.0, float(wide[token])),
        tuple(ranked.tolist()),
        tuple(min(0.0, value) for value in wide[ranked].tolist()),
    )


def share_of_best(scores: NDArray[Any]) -> float:
    """Probability of the best token under softmax of scores [V].

    >>> share_of_best(np.zeros(4))
    0.25
    """
    return float(1.0 / np.exp(scores - scores.max()).sum())


# --------------------------------------------------------------------------- greedy, the short way


def _decide_greedily(logits: mx.array, draft_ids: Sequence[int]) -> Decision:
    rows = len(draft_ids) + 1
    read = _read_host(logits) if is_cpu() else _read_device(logits)
    n_accepted = count_accepted(read.ids.tolist(), draft_ids)
    _check_finite(read.top[:rows], 0)
    near = (read.top - read.second) < NEAR_TIE * np.maximum(1.0, np.abs(read.top))
    decided = n_accepted + 1
    return Decision(
        ids=tuple(read.ids[:decided].tolist()),
        n_accepted=n_accepted,
        near_ties=int(np.count_nonzero(near[:decided])),
        logprobs=(),
        certainty=read.certainty(n_accepted),
    )


def _check_finite(top: NDArray[Any], first_row: int) -> None:
    if not np.isfinite(top).all():
        row = int(np.argmin(np.isfinite(top)))
        raise NotFinite(
            f"row {first_row + row} has best score {top[row]}; every row needs a finite one"
        )


@dataclass(frozen=True, slots=True)
class _Read:
    """What the host knows of every row's scores."""

    ids: NDArray[Any]  # of the best one
    top: NDArray[Any]
    second: NDArray[Any]
    certainty: Callable[[int], float]  # of one row


def _read_host(logits: mx.array) -> _Read:
    scores = np.array(logits)  # a copy: the best is struck out below
    rows = np.arange(len(scores))
    ids = scores.argmax(axis=1)
    top = scores[rows, ids]
    scores[rows, ids] = -np.inf
    return _Read(
        *(ids, top, scores.max(axis=1)),
        lambda row: float(1.0 / (1.0 + np.exp(scores[row] - top[row]).sum())),
    )


def _read_device(logits: mx.array) -> _Read:
    scores = logits.astype(mx.float32)
    ids = mx.argmax(scores, axis=-1)
    top = mx.max(scores, axis=-1)
    is_best = mx.arange(scores.shape[-1])[None, :] == ids[:, None]
    second = mx.max(mx.where(is_best, -mx.inf, scores), axis=-1)
    share = mx.minimum(mx.exp(top - mx.logsumexp(scores, axis=-1)), 1.0)
    mx.eval(ids, top, second, share)
    return _Read(np.array(ids), np.array(top), np.array(second), np.array(share).item)
