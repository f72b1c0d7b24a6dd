"""How long a request waits, for what, and when it asks again.

Owns the limits and the two deadlines of a wait for the target. Pure: times are passed in.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Time budgets of one request in seconds, and how often it may move to another target."""

    prefill_s: float = 120.0  # without progress
    verify_s: float = 30.0
    resend_s: float = 1.0  # a message unanswered for so long is sent again; all are idempotent
    slow_reader_s: float = 60.0  # paused for a client that does not read on
    max_replays: int = 2


class Wait:
    """One wait at a time.

    Attributes:
        due: when to look again, in monotonic seconds; None: nothing is awaited.
    """

    def __init__(self, resend_s: float) -> None:
        self.due: float | None = None
        self._resend_s = resend_s
        self._ends_at = 0.0

    def begin(self, now: float, budget_s: float) -> None:
        """Wait for an answer; ask again meanwhile, and give up after the budget."""
        self._ends_at = now + budget_s
        self.due = min(self._ends_at, now + self._resend_s)

    def until(self, moment: float) -> None:
        """Wait without asking again."""
        self._ends_at = self.due = moment

    def end(self) -> None:
        """Nothing is awaited."""
        self.due = None

    def is_due(self, now: float) -> bool:
        """Whether it is time to look."""
        return self.due is not None and now >= self.due

    def ask_again(self, now: float) -> bool:
        """Whether to ask again; False: the budget is spent."""
        if now >= self._ends_at:
            return False
        self.due = min(self._ends_at, now + self._resend_s)
        return True
