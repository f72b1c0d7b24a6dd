"""From a row of scores to the distribution a request wants: one code path for every forward.

Knows scores, what a request changes in them, and the filters. Does not know rounds, drafts' origin
or acceptance. The order, for prefill, plain rounds and every row of a verify alike:

1. logit bias, added to the raw score (as OpenAI's API defines it);
2. repetition penalty r over ids of the prompt and the reply: a positive score is divided by r, a
   negative one multiplied (CTRL, Keskar et al. 2019, section 4.1);
3. frequency penalty times the count of an id in the reply, and presence penalty where it occurs
   there at all, subtracted (as OpenAI's API defines them); row i counts the drafts before it;
4. temperature T divides; T = 0 takes the best score, lowest id first, and ends here;
5. top-k keeps scores no less than the k-th largest, ties included;
6. top-p keeps the fewest, best first and lowest id first, whose mass reaches it;
7. min-p keeps what has at least that share of the best one's probability.

Source of 5 and 6: ddalcu/mlx-serve (`keyed_sample.zig`); of 7: Nguyen et al. 2024, "Min-p".
Invariant: `Kept.unsure` names every id whose being kept rounding may decide, so that no such draw
goes unreported.
"""

import math
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from target_svc.noise import gumbel
from target_svc.seen import Seen

NEAR_TIE: Final = 1e-4  # of max(1, |best|): kernels that differ by rows may order these either way


class Sampling(Protocol):
    """What is read of a request's sampling parameters; ranges as in `common.sampling`."""

    @property
    def temperature(self) -> float: ...  # noqa: D102

    @property
    def top_p(self) -> float: ...  # noqa: D102

    @property
    def top_k(self) -> int: ...  # noqa: D102

    @property
    def min_p(self) -> float: ...  # noqa: D102

    @property
    def repetition_penalty(self) -> float: ...  # noqa: D102

    @property
    def presence_penalty(self) -> float: ...  # noqa: D102

    @property
    def frequency_penalty(self) -> float: ...  # noqa: D102

    @property
    def stop_ids(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def ignore_eos(self) -> bool: ...  # noqa: D102

    @property
    def bias_ids(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def bias_values(self) -> tuple[float, ...]: ...  # noqa: D102

    @property
    def seed(self) -> int: ...  # noqa: D102

    @property
    def acceptance(self) -> str: ...  # noqa: D102

    @property
    def typical_delta(self) -> float: ...  # noqa: D102

    @property
    def typical_epsilon(self) -> float: ...  # noqa: D102

    @property
    def cascade_alpha(self) -> float: ...  # noqa: D102

    @property
    def logprobs(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Draw:
    """One token and whether another one was nearly drawn."""

    token: int
    is_near_tie: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """The candidates that the filters leave.

    Attributes:
        ids: int64 [n], ascending.
        scaled: float64 [n], score / T.
        probs: float64 [n], sum 1.
        unsure: int64 [m], ids that another rounding might keep or drop.
        unsure_scaled: float64 [m].
    """

    ids: NDArray[np.int64]
    scaled: NDArray[np.float64]
    probs: NDArray[np.float64]
    unsure: NDArray[np.int64]
    unsure_scaled: NDArray[np.float64]

    def prob(self, token: int) -> float:
        """Probability of one id; 0 where the filters dropped it."""
        at = int(np.searchsorted(self.ids, token))
        is_there = at < len(self.ids) and self.ids[at] == token
        return float(self.probs[at]) if is_there else 0.0


def changes_scores(sampling: Sampling) -> bool:
    """Whether steps 1 to 3 do anything."""
    return bool(sampling.bias_ids) or counts_tokens(sampling)


def counts_tokens(sampling: Sampling) -> bool:
    """Whether steps 2 and 3 do anything, so that earlier ids must be known."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def adjusted(
    scores: NDArray[Any], sampling: Sampling, seen: Seen | None, drafts: tuple[int, ...] = ()
) -> NDArray[np.float64]:
    """Steps 1 to 3.

    Args:
        scores: float [V].
        sampling: of the request.
        seen: the ids of prompt and reply up to the anchor; None where nothing counts them.
        drafts: ids between the anchor and this row.

    Returns:
        float64 [V], a new array.
    """
    wide = scores.astype(np.float64)
    if sampling.bias_ids:
        wide[list(sampling.bias_ids)] += sampling.bias_values
    if seen is None or not counts_tokens(sampling):
        return wide
    ids, counts = seen.counted(drafts)
    if sampling.repetition_penalty != 1.0:
        everything = seen.everything(drafts)
        had = wide[everything]
        rate = sampling.repetition_penalty
        wide[everything] = np.where(had > 0, had / rate, had * rate)
    wide[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    return wide


def best(scores: NDArray[np.float64]) -> Draw:
    """Step 4 at T = 0: the best score, lowest id first."""
    token = int(scores.argmax())
    top = scores[token]
    second = np.partition(scores, -2)[-2] if len(scores) > 1 else -math.inf
    return Draw(token, _is_near(top, second))


def kept_of(scores: NDArray[np.float64], sampling: Sampling) -> Kept:
    """Steps 4 to 7 of adjusted scores [V], with a temperature above 0."""
    scaled = scores / sampling.temperature
    unsure: list[NDArray[np.int64]] = []
    ids = _top_k(scaled, sampling.top_k, unsure)
    if sampling.top_p < 1.0 or sampling.min_p > 0.0:
        ids = ids[np.argsort(-scaled[ids], kind="stable")]  # value first, then lowest id
        ids = _top_p(scaled, ids, sampling.top_p, unsure)
        ids = np.sort(_min_p(scaled, ids, sampling.min_p, unsure))
    weights = np.exp(scaled[ids] - scaled[ids].max())
    open_ids = np.unique(np.concatenate(unsure)) if unsure else np.zeros(0, np.int64)
    return Kept(ids, scaled[ids], weights / weights.sum(), open_ids, scaled[open_ids])


def draw(kept: Kept, seed: int, position: int) -> Draw:
    """Draw the token at an absolute position: the argmax of score / T plus keyed Gumbel noise.

    A near-tie is two deciding sums close enough, or a filter's edge open enough, to fall the other
    way under another kernel's rounding.
    """
    sums = kept.scaled + gumbel(seed, position, kept.ids)
    top = float(sums.max())
    token = int(kept.ids[sums == top].min())
    others = sums[kept.ids != token]
    near = len(others) > 0 and _is_near(top, float(others.max()))
    if len(kept.unsure):
        noise = gumbel(seed, position, kept.unsure)
        near = near or token in kept.unsure or bool((kept.unsure_scaled + noise > top).any())
    return Draw(token, near)


def _top_k(
    scaled: NDArray[np.float64], top_k: int, unsure: list[NDArray[np.int64]]
) -> NDArray[np.int64]:
    if not 0 < top_k < len(scaled):
        return np.flatnonzero(scaled > -np.inf)
    edge = np.partition(scaled, len(scaled) - top_k)[len(scaled) - top_k]
    close = np.abs(scaled - edge) < NEAR_TIE * max(1.0, abs(edge))
    if np.count_nonzero(close | (scaled > edge)) > top_k:
        unsure.append(np.flatnonzero(close))
    return np.flatnonzero(scaled >= edge)


def _top_p(
    scaled: NDArray[np.float64],
    ranked: NDArray[np.int64],
    top_p: float,
    unsure: list[NDArray[np.int64]],
) -> NDArray[np.int64]:
    if top_p >= 1.0:
        return ranked
    values = scaled[ranked]
    mass = np.cumsum(np.exp(values - values[0]))
    mass /= mass[-1]
    count = min(int(np.searchsorted(mass, top_p)) + 1, len(ranked))
    below = mass[count - 2] if count > 1 else 0.0
    may_grow = count < len(ranked) and mass[count - 1] - top_p < NEAR_TIE
    may_shrink = count > 1 and top_p - below < NEAR_TIE
    may_swap = count < len(ranked) and _is_near(values[count - 1], values[count])
    if may_grow or may_swap:
        unsure.append(ranked[count : count + 1])
    if may_shrink or may_swap:
        unsure.append(ranked[count - 1 : count])
    return ranked[:count]


def _min_p(
    scaled: NDArray[np.float64],
    ranked: NDArray[np.int64],
    min_p: float,
    unsure: list[NDArray[np.int64]],
) -> NDArray[np.int64]:
    if min_p <= 0.0:
        return ranked
    values = scaled[ranked]
    edge = values[0] + math.log(min_p)
    close = np.abs(values - edge) < NEAR_TIE * max(1.0, abs(edge))
    close[0] = False  # the best one is always kept
    unsure.append(ranked[close])
    is_kept = values >= edge
    is_kept[0] = True
    return ranked[is_kept]


def _is_near(first: float, second: float) -> bool:
    return bool(first - second < NEAR_TIE * max(1.0, abs(first)))
