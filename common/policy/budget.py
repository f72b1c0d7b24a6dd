"""Keep what drafting may lose within a promise.

Owns the losses of the last 64 rounds. Does not know the gate, confidences or rows.
Promise: against plain rounds, no window of 64 rounds takes more than 1.05 of their time.

A window that starts behind a lucky stretch must keep the promise too, so what counts is the worst
sum over any last 1..63 rounds, and wins before it do not pay for losses after it. Rounds that a
young request has not had yet count as plain ones. A window's tokens are at least its rounds, so
64 plain rounds are the smallest time it can be measured against.

While drafting is in credit, having won more over the last rounds than the promise lets it lose, a
win clears what was lost before it: a row of losses can then still not exceed the promise, but a
few unlucky rounds among many lucky ones do not keep drafts out for 64 rounds.
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
        self._streak_ms = np.float32(0)  # lost since the last win

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
        if loss_ms < 0:
            self._streak_ms = np.float32(0)
        else:
            self._streak_ms += np.float32(loss_ms)

    def is_in_credit(self, plain_ms: float) -> bool:
        """Whether drafting won more over the last rounds than it may lose in as many."""
        window_ms = np.float32(WINDOW_ROUNDS) * np.float32(plain_ms)
        return bool(self._losses_ms.sum() <= -POSTPONE_SHARE * window_ms)

    def left_ms(self, plain_ms: float, *, is_in_credit: bool = False) -> float:
        """What the next drafted round may lose, in ms; 0 while drafting is to be postponed.

        Args:
            plain_ms: of one plain round.
            is_in_credit: of this budget, or of the one that all requests share.
        """
        worst = self._streak_ms if is_in_credit else np.float32(self.worst_ms)
        window_ms = np.float32(WINDOW_ROUNDS) * np.float32(plain_ms)
        if worst > POSTPONE_SHARE * window_ms:
            return 0.0
        return float(PROMISE_SHARE * window_ms - worst)
