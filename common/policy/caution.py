"""Wait for a sure anchor after drafts that lost.

Owns the count of drafts lost in a row. Does not know milliseconds or budgets. A draft goes on from
the anchor, and is worth little where the target itself was in doubt about it: of the embedded
pair's drafts one in five fails at once behind an anchor below three quarters, one in thirty behind
the others. What may be lost in a row is little (see `budget`), so it is spent on sure anchors.
"""

from typing import Final

SURE: Final = 0.9  # share of the target's best token from which its choice counts as sure
MOST_WAITS: Final = 8  # plain rounds; a target that is never sure is still drafted for


class Caution:
    """Drafts at once after a win; after n losses in a row waits for an anchor that is sure.

    At most 1, 2, 4 and from then on 8 rounds, doubling with n.
    """

    def __init__(self) -> None:
        self._n_lost = 0
        self._n_waits_left = 0
        self._is_sure = True

    def should_wait(self) -> bool:
        """Whether the next round is better plain; counts as one of the waits if so."""
        if self._is_sure or self._n_waits_left == 0:
            return False
        self._n_waits_left -= 1
        return True

    def record_draft(self, loss_ms: float) -> None:
        """Feed one drafted round: its time less its tokens at the plain rate."""
        self._n_lost = self._n_lost + 1 if loss_ms > 0 else 0
        self._n_waits_left = min(2**self._n_lost // 2, MOST_WAITS)

    def record_anchor(self, certainty: float) -> None:
        """Feed the anchor that a round, drafted or plain, has left.

        Args:
            certainty: share of the target's best token where it chose the anchor, 0..1.
        """
        self._is_sure = certainty >= SURE
