"""Count, for the stats line, where in the block drafts are lost and how wide rounds were.

Owns the counts of one request. Does not decide anything.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from common.policy.ladder import MAX_ROWS

MAX_DRAFTS: Final = MAX_ROWS - 1


class PositionStats:
    """Acceptance by draft position, and the histogram of rows."""

    def __init__(self) -> None:
        self._rows = np.zeros(MAX_ROWS + 1, np.int64)
        self._reached = np.zeros(MAX_DRAFTS, np.int64)
        self._accepted = np.zeros(MAX_DRAFTS, np.int64)

    def record(self, n_drafts: int, n_accepted: int) -> None:
        """Count one round.

        Args:
            n_drafts: drafts that were verified, 0..15.
            n_accepted: length of the accepted prefix, 0..n_drafts.
        """
        self._rows[n_drafts + 1] += 1
        self._reached[: min(n_accepted + 1, n_drafts)] += 1
        self._accepted[:n_accepted] += 1

    def acceptance(self) -> list[float]:
        """Accepted over reached by draft position, down to the deepest one reached; 0..1."""
        depth = int(np.count_nonzero(self._reached))
        return [float(self._accepted[k] / self._reached[k]) for k in range(depth)]

    def rows_histogram(self) -> dict[int, int]:
        """Rounds by rows, ascending, without zeros."""
        return {rows: int(n) for rows, n in enumerate(self._rows) if n}

    def format_acceptance(self) -> str:
        """Such as `1.00/0.95/0.50`."""
        return _joined(self.acceptance())

    def format_rows(self) -> str:
        """Such as `1:12,2:3,8:100`."""
        return ",".join(f"{rows}:{n}" for rows, n in self.rows_histogram().items())


def _joined(rates: Sequence[float]) -> str:
    return "/".join(f"{rate:.2f}" for rate in rates)
