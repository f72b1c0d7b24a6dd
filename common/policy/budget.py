"""Keep what drafting may lose within a promise.

Owns the losses of the last 64 rounds. Does not know the gate, confidences or rows.
Promise: against plain rounds, no window of 64 rounds takes more than 1.05 of their time.

A window that starts behind a lucky stretch must keep the promise too, so every run of last rounds
counts by itself, 1 to 63 of them, and wins before it do not pay for losses in it. The rounds that
are still to come into its window can always be plain ones: they lose nothing, and each brings a
token that may be lost upon. What the next round may lose is the least that any run leaves.

While drafting is in credit, having won more over the last rounds than the promise lets it lose, a
win clears what was lost before it: a row of losses can then still not exceed the promise, but a
few unlucky rounds among many lucky ones do not keep drafts out for 64 rounds.
"""

from typing import Final

import numpy as np

WINDOW_ROUNDS: Final = 64
POSTPONE_SHARE: Final = np.float32(0.04)  # of the window's time: no new draft is started above it
PROMISE_SHARE: Final = np.float32(0.049)  # of plain time: the promise less 0.1 % for uneven clocks


class LossBudget:
    """Losses and tokens of rounds over a sliding window; rounds not had yet count as plain ones."""

    def __init__(self) -> None:
        self._losses_ms = np.zeros(WINDOW_ROUNDS - 1, np.float32)  # latest first
        self._tokens = np.ones(WINDOW_ROUNDS - 1, np.float32)

    @property
    def worst_ms(self) -> float:
        """Largest sum over any last 1..63 rounds, in ms; at least 0."""
        return float(max(np.float32(0), np.cumsum(self._losses_ms).max()))

    def record(self, loss_ms: float, n_tokens: int = 1) -> None:
        """Close one round.

        Args:
            loss_ms: time of a drafted round less its tokens at the plain rate, negative when
                drafting won; 0 for a plain round.
            n_tokens: tokens it committed, at least 1.
        """
        self._losses_ms[1:] = self._losses_ms[:-1]
        self._tokens[1:] = self._tokens[:-1]
        self._losses_ms[0], self._tokens[0] = loss_ms, n_tokens

    def is_in_credit(self, plain_ms: float) -> bool:
        """Whether drafting won more over the last rounds than it may lose in as many."""
        window_ms = np.float32(WINDOW_ROUNDS) * np.float32(plain_ms)
        return bool(self._losses_ms.sum() <= -POSTPONE_SHARE * window_ms)

    def left_ms(self, plain_ms: float, *, is_in_credit: bool = False) -> float:
        """What the next round may lose without breaking the promise, in ms; at least 0.

        Args:
            plain_ms: of one plain round.
            is_in_credit: of this budget, or of the one that all requests share.
        """
        plain = np.float32(plain_ms)
        losses, tokens = self._losses_ms, self._tokens
        if is_in_credit and (losses < 0).any():
            last_win = int(np.argmax(losses < 0))
            losses, tokens = losses[:last_win], tokens[:last_win]
        to_come = np.arange(WINDOW_ROUNDS, WINDOW_ROUNDS - 1 - len(losses), -1, dtype=np.float32)
        lost = np.concatenate([np.zeros(1, np.float32), np.cumsum(losses)])
        had = np.concatenate([np.zeros(1, np.float32), np.cumsum(tokens)])
        left = PROMISE_SHARE * plain * (had + to_come) - lost
        return float(max(np.float32(0), left.min()))

    def is_postponed(self, plain_ms: float) -> bool:
        """Whether so much of the window's time was lost that no new draft is to be waited for."""
        plain, lost = np.float32(plain_ms), self._losses_ms.sum()
        return bool(lost > POSTPONE_SHARE * (lost + plain * (self._tokens.sum() + 1)))
