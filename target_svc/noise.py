"""Random numbers that are a function of seed, place and purpose alone.

Knows a hash. Does not know scores or rounds. Whatever round, row or width a position comes up in,
its numbers are the same, so output depends on the seed and not on drafts, policy, faults or time.
Invariant: numbers of different purposes are independent; neither 0 nor 1 is ever reached.

Source: ddalcu/mlx-serve, `keyed_sample.zig` (the hash of seed, position and id).
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_POSITION: Final = np.uint64(0xD1B54A32D192ED03)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_COIN: Final = np.uint64(0xA0761D6478BD642F)  # sets the coins' numbers apart from the draws'


def uniform(seed: int, position: int, ids: NDArray[Any]) -> NDArray[np.float64]:
    """Numbers in (0, 1) of a draw at an absolute position, one per id; float64 [n].

    >>> round(float(uniform(1234, 0, np.array([0]))[0]), 10)
    0.177047044
    """
    with np.errstate(over="ignore"):  # arithmetic is modulo 2^64
        return _numbers(np.uint64(seed) + _GOLDEN, position, ids)


def gumbel(seed: int, position: int, ids: NDArray[Any]) -> NDArray[np.float64]:
    """Gumbel noise of a draw at an absolute position, one per id; float64 [n]."""
    noise: NDArray[np.float64] = -np.log(-np.log(uniform(seed, position, ids)))
    return noise


def coin(seed: int, position: int) -> float:
    """A number in (0, 1) that decides on the draft at a position; no draw has it."""
    with np.errstate(over="ignore"):
        return float(_numbers((np.uint64(seed) ^ _COIN) + _GOLDEN, position, np.array([0]))[0])


def _numbers(key: np.uint64, position: int, ids: NDArray[Any]) -> NDArray[np.float64]:
    place = np.uint64(position & 0xFFFFFFFF) * _POSITION
    mixed = _mix(_mix(_mix(np.array(key)) ^ place) ^ ids.astype(np.uint64))
    top = (mixed >> np.uint64(40)).astype(np.float64)
    numbers: NDArray[np.float64] = (top + 0.5) / 2.0**24
    return numbers


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    mixed: NDArray[np.uint64] = value ^ (value >> np.uint64(31))
    return mixed
