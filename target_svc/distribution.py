"""Draw tokens from a target's scores with noise that depends on the place alone.

Knows scores, temperature, the two filters and keyed noise. Does not know rounds or drafts. The
token at an absolute position is the argmax of score / T + Gumbel noise of (seed, position, id), so
what is drawn there is the same in whatever round, row or width the position comes up: a draft
survives exactly if it is that token.

Source: ddalcu/mlx-serve, `keyed_sample.zig` (the hash and the order of candidates).
"""

from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

NEAR_TIE: Final = 1e-4  # of max(1, |best|): kernels that differ by rows may order these either way

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_POSITION: Final = np.uint64(0xD1B54A32D192ED03)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)


class Sampling(Protocol):
    """What is read of a request's sampling parameters."""

    @property
    def temperature(self) -> float:
        """0 is greedy."""

    @property
    def top_p(self) -> float:
        """Probability mass kept, in (0, 1]."""

    @property
    def top_k(self) -> int:
        """Candidates kept; 0 is all."""

    @property
    def seed(self) -> int:
        """Names the draws."""

    @property
    def acceptance(self) -> str:
        """How drafts are accepted where T is above 0."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One token and whether another one was nearly drawn."""

    token: int
    is_near_tie: bool


def uniform(seed: int, position: int, ids: NDArray[Any]) -> NDArray[np.float64]:
    """Keyed numbers in (0, 1), float64 so that neither end is reached.

    >>> round(float(uniform(1234, 0, np.array([0]))[0]), 10)
    0.177047044
    """
    with np.errstate(over="ignore"):  # arithmetic is modulo 2^64
        place = np.uint64(position & 0xFFFFFFFF) * _POSITION
        key = _mix(_mix(np.array(np.uint64(seed) + _GOLDEN)) ^ place)
        mixed = _mix(key ^ ids.astype(np.uint64))
    top = (mixed >> np.uint64(40)).astype(np.float64)
    numbers: NDArray[np.float64] = (top + 0.5) / 2.0**24
    return numbers


def draw(scores: NDArray[Any], sampling: Sampling, position: int) -> Draw:
    """Draw the token at an absolute position.

    Args:
        scores: float [V], all finite or -inf.
        sampling: with a temperature above 0.
        position: of the token drawn; the prompt starts at 0.

    Returns:
        The token; a near-tie is two deciding sums, or a filter's edge, close enough to fall the
        other way under another kernel's rounding.
    """
    scaled = scores.astype(np.float64) / sampling.temperature
    ids, edge = _candidates(scaled, sampling)
    sums = scaled[ids] + _gumbel(sampling.seed, position, ids)
    best = sums.max()
    token = int(ids[sums == best].min())
    others = sums[ids != token]
    near = len(others) > 0 and _is_near(best, others.max())
    near = near or (
        edge is not None and _edge_decides(scaled, edge, best, token, sampling, position)
    )
    return Draw(token, bool(near))


@dataclass(frozen=True, slots=True)
class _Edge:
    """The last candidate kept and the first dropped, where rounding may swap or move them."""

    kept: int
    dropped: int


def _candidates(
    scaled: NDArray[np.float64], sampling: Sampling
) -> tuple[NDArray[np.int64], _Edge | None]:
    """Ids that the filters keep, and their edge where it is uncertain."""
    if not sampling.top_k and sampling.top_p >= 1.0:
        return np.arange(len(scaled)), None
    ranked = np.argsort(-scaled, kind="stable")  # value first, then lowest id
    count = min(sampling.top_k or len(scaled), len(scaled))
    edge = None
    if count < len(ranked) and _is_near(scaled[ranked[count - 1]], scaled[ranked[count]]):
        edge = _Edge(int(ranked[count - 1]), int(ranked[count]))
    if sampling.top_p < 1.0:
        weights = np.exp(scaled[ranked[:count]] - scaled[ranked[0]])
        mass = np.cumsum(weights / weights.sum())
        kept = min(int(np.searchsorted(mass, sampling.top_p)) + 1, count)
        if kept < count and _mass_is_near(mass, kept, sampling.top_p):
            edge = _Edge(int(ranked[kept - 1]), int(ranked[kept]))
        elif kept < count:
            edge = None  # the other filter's edge was cut off
        count = kept
    return ranked[:count], edge


def _mass_is_near(mass: NDArray[np.float64], kept: int, top_p: float) -> bool:
    """Whether rounding may keep one candidate more or fewer."""
    below = mass[kept - 2] if kept > 1 else 0.0
    return bool(mass[kept - 1] - top_p < NEAR_TIE or top_p - below < NEAR_TIE)


def _edge_decides(
    scaled: NDArray[np.float64],
    edge: _Edge,
    best: float,
    token: int,
    sampling: Sampling,
    position: int,
) -> bool:
    """Whether the draw would differ if the edge fell the other way."""
    noise = _gumbel(sampling.seed, position, np.array([edge.dropped]))[0]
    return token == edge.kept or bool(scaled[edge.dropped] + noise > best)


def _gumbel(seed: int, position: int, ids: NDArray[Any]) -> NDArray[np.float64]:
    noise: NDArray[np.float64] = -np.log(-np.log(uniform(seed, position, ids)))
    return noise


def _is_near(best: float, second: float) -> bool:
    return bool(best - second < NEAR_TIE * max(1.0, abs(best)))


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    mixed: NDArray[np.uint64] = value ^ (value >> np.uint64(31))
    return mixed
