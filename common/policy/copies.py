"""Say how likely a copy of earlier text survives.

Owns two running rates, one for short and one for long agreement of the suffix. Does not know the
text. A copy's drafts share one probability.

Source: mlx-serve, `dflash_policy.zig`.
"""

from typing import Final

import numpy as np

LONG_SUFFIX: Final = 16  # tokens of agreement from which a copy counts as a long one
PRIOR_RATES: Final = (0.7, 0.9)  # short, long
PRIOR_TRIES: Final = 3.0
DECAY: Final = np.float32(0.95)


class CopyStats:
    """How copies fared, by class of suffix."""

    def __init__(self) -> None:
        self._tries = np.full(2, PRIOR_TRIES, np.float32)
        self._hits = np.asarray(PRIOR_RATES, np.float32) * self._tries

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


def _class_of(suffix_len: int) -> int:
    return int(suffix_len >= LONG_SUFFIX)
