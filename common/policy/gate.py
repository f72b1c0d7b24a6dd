"""Decide whether a round drafts at all.

Owns the running cost of a plain round and the gate that backs off while drafting loses.
Does not know why drafting loses: only milliseconds gained and spent.

Source: mlx-serve, `dflash_policy.zig`.
"""

from typing import Final

import numpy as np

from common.policy.ladder import PRIOR_PLAIN_MS

SAMPLE_WEIGHT: Final = np.float32(0.1)
SAMPLE_LOW: Final = np.float32(0.8)  # a sample moves the average as if it were at least this share
SAMPLE_HIGH: Final = np.float32(1.25)  # of it, and at most this one: one stall changes little
GATE_WEIGHT: Final = np.float32(0.3)
MAX_PERIOD: Final = 32  # plain rounds between two probes, at most


class PlainCost:
    """Running average of what one plain round takes, in ms; fed by plain rounds only."""

    def __init__(self, start_ms: float = PRIOR_PLAIN_MS) -> None:
        self._ms = np.float32(start_ms)

    @property
    def ms(self) -> float:
        """Present estimate."""
        return float(self._ms)

    def sample(self, ms: float) -> None:
        """Feed one plain round; times that are not finite and positive are ignored."""
        if not np.isfinite(ms) or ms <= 0:
            return
        clipped = np.clip(np.float32(ms), SAMPLE_LOW * self._ms, SAMPLE_HIGH * self._ms)
        self._ms = np.float32(self._ms + SAMPLE_WEIGHT * (clipped - self._ms))


class DraftGate:
    """Drafts while drafted rounds pay; else owes 1, 2, 4 .. 32 plain rounds between probes.

    Two averages are kept and compared, rather than the average of their ratios: a round then
    counts by the time it took.

    Attributes:
        n_skipped: rounds it kept plain.
        n_probes: drafted rounds that followed a plain one of its own making.
    """

    def __init__(self) -> None:
        self._gain_ms = np.float32(0)
        self._wall_ms = np.float32(0)
        self._has_record = False
        self._owed = 0
        self._period = 1
        self._is_skipping = False
        self.n_skipped = 0
        self.n_probes = 0

    @property
    def owed(self) -> int:
        """Plain rounds still owed."""
        return self._owed

    @property
    def is_probing(self) -> bool:
        """Whether a draft now would be a probe: the last answer was no."""
        return self._is_skipping

    def should_draft(self) -> bool:
        """Answer for the next round, paying one owed plain round when the answer is no."""
        if self._owed > 0:
            self._owed -= 1
            self.n_skipped += 1
            self._is_skipping = True
            return False
        self.n_probes += self._is_skipping
        self._is_skipping = False
        return True

    def record(self, gain_ms: float, wall_ms: float) -> None:
        """Feed one drafted round.

        Args:
            gain_ms: what its tokens would have cost as plain rounds.
            wall_ms: what the round took: draft, verify and accept.
        """
        gain, wall = np.float32(gain_ms), np.float32(wall_ms)
        if self._has_record:
            self._gain_ms = np.float32(self._gain_ms + GATE_WEIGHT * (gain - self._gain_ms))
            self._wall_ms = np.float32(self._wall_ms + GATE_WEIGHT * (wall - self._wall_ms))
        else:
            self._gain_ms, self._wall_ms, self._has_record = gain, wall, True
        if self._gain_ms >= self._wall_ms:
            self._owed = 0
            self._period = max(1, self._period // 2)
        else:
            self._owed = self._period
            self._period = min(2 * self._period, MAX_PERIOD)
