"""What becomes of a draft where the temperature is above 0: four rules, one signature.

Knows one row's distribution p, the draft and what it was drawn from. Does not know logits, rows or
state. A rule decides on one position; every random number is keyed by seed, position and purpose,
and a draft that is kept without a coin consumes none.

* `exact`: the token is drawn with keyed noise; the draft survives if it is that token.
* `residual`: kept with probability min(1, p / q), else drawn from max(p - q, 0), normalized
  (Leviathan et al. 2023, algorithm 1). Lossless for any q that the draft was really drawn from.
* `typical`: kept while p > min(epsilon, delta * exp(-H(p))), else drawn from p (Medusa, Cai et al.
  2024, section 3.3.1). Lossy.
* `cascade`: kept where p is no less than (1 - alpha) of the best; else `residual` against a mixture
  that gives the mass of such drafts back to p (speculative cascades, Narasimhan et al. 2024, the
  token-specific rule V3). Lossy.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from target_svc.distribution import NEAR_TIE, Kept, Sampling, draw
from target_svc.noise import coin

_LEAST_Q: Final = 1e-12  # a share of the draft that is no smaller


@dataclass(frozen=True, slots=True)
class Source:
    """What one draft was drawn from.

    Attributes:
        ids: int64 [K], each once; the draft is among them.
        probs: float64 [K], sum 1.
    """

    ids: NDArray[np.int64]
    probs: NDArray[np.float64]

    @classmethod
    def certain(cls, token: int) -> "Source":
        """A draft that was not drawn: it had no alternative."""
        return cls(np.array([token], np.int64), np.ones(1))

    def over(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Probabilities of `ids` (ascending), 0 where this source does not name them."""
        spread = np.zeros(len(ids))
        at = np.searchsorted(ids, self.ids)
        found = at < len(ids)
        found[found] = ids[at[found]] == self.ids[found]
        spread[at[found]] = self.probs[found]
        return spread

    def prob(self, token: int) -> float:
        """Probability of one id."""
        return float(self.probs[self.ids == token].sum())


@dataclass(frozen=True, slots=True)
class Ruling:
    """What becomes of one draft."""

    is_kept: bool
    token: int  # the draft, or what stands in its place
    is_near_tie: bool


Rule = Callable[[Kept, int, Source, Sampling, int], Ruling]


def exact(kept: Kept, draft: int, source: Source, sampling: Sampling, position: int) -> Ruling:
    """Keep the draft if the target draws the same token; what it was drawn from does not matter."""
    drawn = draw(kept, sampling.seed, position)
    return Ruling(drawn.token == draft, drawn.token, drawn.is_near_tie)


def residual(kept: Kept, draft: int, source: Source, sampling: Sampling, position: int) -> Ruling:
    """Keep with probability min(1, p / q), else draw from what of p exceeds q."""
    return _by_coin(kept, kept.probs, draft, source, sampling.seed, position)


def typical(kept: Kept, draft: int, source: Source, sampling: Sampling, position: int) -> Ruling:
    """Keep what is likely enough for how uncertain the target is, else draw from p."""
    floor = typical_floor(kept.probs, sampling.typical_delta, sampling.typical_epsilon)
    prob = kept.prob(draft)
    near = abs(prob - floor) < NEAR_TIE * floor or draft in kept.unsure
    if prob > floor:
        return Ruling(True, draft, near)
    drawn = draw(kept, sampling.seed, position)
    return Ruling(False, drawn.token, near or drawn.is_near_tie)


def cascade(kept: Kept, draft: int, source: Source, sampling: Sampling, position: int) -> Ruling:
    """Keep what is nearly as likely as the best; defer the rest to p."""
    floor = float(kept.probs.max()) * (1.0 - sampling.cascade_alpha)
    prob = kept.prob(draft)
    if prob >= floor:
        return Ruling(True, draft, abs(prob - floor) < NEAR_TIE * floor)
    law = cascade_law(kept.probs, source.over(kept.ids), floor)
    return _by_coin(kept, law, draft, source, sampling.seed, position)


def typical_floor(probs: NDArray[np.float64], delta: float, epsilon: float) -> float:
    """What a draft's probability must exceed: min(epsilon, delta * exp(-entropy in nats)).

    >>> round(typical_floor(np.array([0.5, 0.5]), 0.2, 1.0), 9)
    0.1
    """
    some = probs[probs > 0.0]
    return min(epsilon, delta * math.exp(float(np.sum(some * np.log(some)))))


def cascade_law(
    p: NDArray[np.float64], q: NDArray[np.float64], floor: float
) -> NDArray[np.float64]:
    """The mixture that a deferred draft is judged by, over p's candidates.

    Args:
        p: float64 [n], sum 1.
        q: float64 [n], what of the draft's distribution lies on them; the rest of it is deferred.
        floor: candidates with less probability are deferred.

    >>> cascade_law(np.array([.8, .19, .01]), np.array([.1, .2, .7]), .8 * .05).round(3).tolist()
    [0.66, 0.333, 0.007]
    """
    stays = np.where(p >= floor, q, 0.0)
    return stays + p * (1.0 - stays.sum())


def _by_coin(
    kept: Kept,
    law: NDArray[np.float64],
    draft: int,
    source: Source,
    seed: int,
    position: int,
) -> Ruling:
    """Keep with probability min(1, law / q), else draw from what of the law exceeds q."""
    at = int(np.searchsorted(kept.ids, draft))
    is_candidate = at < len(kept.ids) and kept.ids[at] == draft
    ratio = float(law[at]) / max(source.prob(draft), _LEAST_Q) if is_candidate else 0.0
    toss = coin(seed, position)
    near = abs(toss - ratio) < NEAR_TIE or draft in kept.unsure
    if toss < ratio:
        return Ruling(True, draft, near)
    rest = np.maximum(law - source.over(kept.ids), 0.0)
    if not rest.any():  # p equals q to the last bit, and the coin fell on the rounding
        rest = law
    some = rest > 0.0
    drawn = draw(
        Kept(kept.ids[some], np.log(rest[some]), rest[some], kept.unsure[:0], kept.scaled[:0]),
        seed,
        position,
    )
    return Ruling(False, drawn.token, near or drawn.is_near_tie)


RULES: Final[dict[str, Rule]] = {
    "exact": exact,
    "residual": residual,
    "typical": typical,
    "cascade": cascade,
}
LOSSY: Final = ("typical", "cascade")
