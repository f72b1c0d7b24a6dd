"""Keep what drafting may lose within a promise.

Owns the losses of the last 64 rounds. Does not know the gate, confidences or rows.
Promise: against plain rounds, no window of 64 rounds takes more than 1.05 of their time.

A window that starts behind a lucky stretch must keep the promise too, so what counts is the worst
sum over any last 1..63 rounds, and wins before it do not pay for losses after it. Rounds that a
young request has not had yet count as plain ones. A window's tokens are at least its rounds, so
64 plain rounds are the smallest time it can be measured against.
"""

from typing import Final

import numpy as np

WINDOW_ROUNDS: Final = 64
POSTPONE_SHARE: Final = np.float32(0.04)  # no new draft is started above it
PROMISE_SHARE: Final = np.float32(0.046)  # the promise less 0.4 % for an uneven clock


class LossBudget:
    """Losses of drafted rounds over a sliding window of 64 rounds."""

    def __init__(self) -> None:
        self._losses_ms = np.zeros(WINDOW_ROUNDS - 1, np.float32)  # oldest first

    @property
    def worst_ms(self) -> float:
        """Largest sum over any last 1..63 rounds, in ms; at least 0."""
        return float(max(np.float32(0), np.cumsum(self._losses_ms[::-1]).max()))

    def record(self, loss_ms: float) -> None:
        """Close one round.

        Args:
            loss_ms: time of a drafted round less its tokens at the plain rate, negative when
                drafting won; 0 for a plain round.
        """
        self._losses_ms[:-1] = self._losses_ms[1:]
        self._losses_ms[-1] = np.float32(loss_ms)

    def left_ms(self, plain_ms: float) -> float:
        """What the next drafted round may lose, in ms; 0 while drafting is to be postponed."""
        worst = np.float32(self.worst_ms)
        window_ms = np.float32(WINDOW_ROUNDS) * np.float32(plain_ms)
        if worst > POSTPONE_SHARE * window_ms:
            return 0.0
        return float(PROMISE_SHARE * window_ms - worst)
