"""When a dead process is started again: pure arithmetic on times that are passed in.

Owns the waits and when a process is given up. Does not know processes, clocks or randomness.
"""

from dataclasses import dataclass, field
from typing import Final

LONGEST_WAIT_S: Final = 30.0
STABLE_AFTER_S: Final = 60.0  # a life this long clears the record
JITTER: Final = 0.25  # replicas that died together do not start together


@dataclass(slots=True)
class RestartRecord:
    """Deaths of one process in a row."""

    backoff_s: float
    limit: int | None  # restarts in a row before it is given up; None: never
    deaths: int = field(default=0)

    def on_death(self, lived_s: float, chance: float) -> float | None:
        """Take one death.

        Args:
            lived_s: seconds from its start to its death.
            chance: a random number in 0..1, which spreads the wait.

        Returns:
            Seconds to wait before the next start, or None: give it up.
        """
        if lived_s >= STABLE_AFTER_S:
            self.deaths = 0
        self.deaths += 1
        if self.limit is not None and self.deaths > self.limit:
            return None
        wait_s = min(LONGEST_WAIT_S, self.backoff_s * 2.0 ** min(self.deaths - 1, 10))
        return wait_s * (1.0 + JITTER * chance)
