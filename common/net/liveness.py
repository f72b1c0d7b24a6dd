"""Two clocks per peer: is it alive, and does it get anywhere?

Owns the arithmetic. Pure: times are passed in (monotonic seconds), nothing is sent or awaited.
A busy loop answers pings for ever, so being heard is not the same as getting on: `alive` moves
with any inbound traffic, `progress` with what the peer says of its own compute thread.
"""

from dataclasses import dataclass
from typing import Final

ALIVE: Final = "alive"
SILENT: Final = "silent"  # nothing heard for too long: treat as lost
STUCK: Final = "stuck"  # heard, but its compute thread is over its budget: kill and replace


@dataclass(slots=True)
class Liveness:
    """State of one peer.

    >>> peer = Liveness(heard_at=0.0, silence_s=2.0)
    >>> peer.heartbeat(1.0, progress_age_s=0.2)
    >>> peer.verdict(2.5, budget_s=10.0), peer.verdict(3.5, budget_s=10.0)
    ('alive', 'silent')
    >>> peer.heartbeat(4.0, progress_age_s=11.0)
    >>> peer.verdict(4.0, budget_s=10.0)
    'stuck'
    """

    heard_at: float
    silence_s: float  # allowed between two messages
    progress_at: float = float("inf")  # inf: it has not said

    def heard(self, now: float) -> None:
        """Any message came."""
        self.heard_at = max(self.heard_at, now)

    def heartbeat(self, now: float, progress_age_s: float) -> None:
        """A heartbeat came; its age is of when the compute thread last got on."""
        self.heard(now)
        self.progress_at = now - progress_age_s

    def verdict(self, now: float, budget_s: float) -> str:
        """ALIVE, SILENT or STUCK; `budget_s` is what the present phase may take."""
        if now - self.heard_at > self.silence_s:
            return SILENT
        return STUCK if now - self.progress_at > budget_s else ALIVE

    def next_deadline(self, budget_s: float) -> float:
        """When the verdict may change if nothing more is heard."""
        return min(self.heard_at + self.silence_s, self.progress_at + budget_s)
