"""Copies: drafts taken from earlier text, and how likely they survive.

Owns the search for the latest longest agreement with the committed tail, and two running rates, for
short and long agreement. Does not know costs. A copy's drafts share one probability.

Source: mlx-serve, `dflash_policy.zig` (rates) and `dflash_copy.zig` (search, silence).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from common.policy.ladder import MAX_ROWS

LONG_SUFFIX: Final = 16  # tokens of agreement from which a copy counts as a long one
PRIOR_RATES: Final = (0.7, 0.9)  # short, long
PRIOR_TRIES: Final = 3.0
DECAY: Final = np.float32(0.95)

MIN_SUFFIX: Final = 6  # tokens that must agree before anything is copied
MAX_SUFFIX: Final = 64  # agreement is not counted further
MAX_PLACES: Final = 8  # latest places looked at for each three tokens
MAX_MISSES: Final = 4  # copies rejected whole, in a row ..
SILENT_ROUNDS: Final = 16  # .. and then no copy for so many rounds


@dataclass(frozen=True, slots=True)
class Copy:
    """Drafts taken from earlier text.

    Attributes:
        ids: 1..15 draft ids.
        suffix_len: tokens before them that agree with the committed tail.
    """

    ids: tuple[int, ...]
    suffix_len: int


class CopyFinder:
    """Finds where the committed tail has occurred before."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}  # three ids -> where they end

    def extend(self, ids: Sequence[int]) -> None:
        """Append ids; what stands before each of them may be found from now on."""
        for token in ids:
            end = len(self._ids)
            if end >= 3:
                places = self._places.setdefault(tuple(self._ids[-3:]), [])
                places.append(end)
                del places[:-MAX_PLACES]
            self._ids.append(token)

    def find(self) -> Copy | None:
        """The latest of the longest agreements, if it is long enough.

        Examples:
            >>> finder = CopyFinder()
            >>> finder.extend([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6])
            >>> finder.find()
            Copy(ids=(7, 8, 9, 1, 2, 3, 4, 5, 6), suffix_len=6)
        """
        places = self._places.get(tuple(self._ids[-3:]), [])
        suffix_len, end = max(((self._agreement(end), end) for end in places), default=(0, 0))
        if suffix_len < MIN_SUFFIX:
            return None
        return Copy(tuple(self._ids[end : end + MAX_ROWS - 1]), suffix_len)

    def _agreement(self, end: int) -> int:
        ids, tail = self._ids, len(self._ids)
        n = 3
        while n < min(end, MAX_SUFFIX) and ids[end - n - 1] == ids[tail - n - 1]:
            n += 1
        return n


class CopyStats:
    """How copies fared, by class of suffix, and whether to leave them for a while."""

    def __init__(self) -> None:
        self._tries = np.full(2, PRIOR_TRIES, np.float32)
        self._hits = np.asarray(PRIOR_RATES, np.float32) * self._tries
        self._n_missed = 0
        self._n_silent = 0

    @property
    def is_silent(self) -> bool:
        """Whether copies are left alone after too many misses."""
        return self._n_silent > 0

    def probability(self, suffix_len: int) -> float:
        """P(a copied draft survives | those before it did), 0..1.

        Args:
            suffix_len: tokens before the copy that agree with the committed tail.
        """
        index = _class_of(suffix_len)
        return float(self._hits[index] / self._tries[index])

    def observe(self, suffix_len: int, n_drafts: int, n_accepted: int) -> None:
        """Record one verified copy; only drafts that were reached count as tries."""
        index = _class_of(suffix_len)
        reached = min(n_accepted + 1, n_drafts)
        self._hits[index] = DECAY * self._hits[index] + np.float32(n_accepted)
        self._tries[index] = DECAY * self._tries[index] + np.float32(reached)
        self._n_missed = 0 if n_accepted else self._n_missed + 1
        if self._n_missed >= MAX_MISSES:
            self._n_missed, self._n_silent = 0, SILENT_ROUNDS

    def count_round(self) -> None:
        """A round without a copy has passed."""
        self._n_silent = max(0, self._n_silent - 1)


def _class_of(suffix_len: int) -> int:
    return int(suffix_len >= LONG_SUFFIX)
