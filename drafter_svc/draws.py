"""Draw drafts from the drafter's own distribution, for acceptance rules that weigh it.

Knows one slot's scores. Does not know how scores are made or what becomes of a draft. Numbers are
keyed by seed and absolute position, never by round or process, and by a purpose of their own, so
that they are independent of the target's coins and draws at the same positions.

Source: Leviathan et al. 2023, "Fast inference from transformers via speculative decoding" (q).
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

PURPOSE: Final = 0xD12AF7  # sets these numbers apart from every other use of the seed


@dataclass(frozen=True, slots=True)
class Drawing:
    """How the drafts of one block are drawn.

    Attributes:
        temperature: above 0; scores are divided by it.
        seed: 0..2^64-1, of the request.
        base: absolute position of the anchor.
    """

    temperature: float
    seed: int
    base: int

    def pick(self, slot: int, scores: NDArray[Any]) -> tuple[int, NDArray[np.float64]]:
        """Draw one candidate.

        Args:
            slot: 0 is the position after the anchor.
            scores: [K], finite.

        Returns:
            Its index, and float64 [K]: the distribution it was drawn from, sum 1.
        """
        wide = scores.astype(np.float64)
        weights = np.exp((wide - wide.max()) / self.temperature)
        probs: NDArray[np.float64] = weights / weights.sum()
        number = np.random.default_rng((PURPOSE, self.seed, self.base + 1 + slot)).random()
        ends = np.cumsum(probs)
        # Below the last end even where rounding left that under 1: what has no share is not drawn.
        return int(np.searchsorted(ends, number * ends[-1], side="right")), probs
