"""What a session's own work read of the host's tables.

Owns the share of one session in the model's running totals. Does not know messages or tables.
Invariant: every read of a session is in exactly one `take`, a rebuild's in that of its next round.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from target_svc.models.family import Model, host_counters


@dataclass(frozen=True, slots=True)
class NgramReads:
    """Rows of an n-gram table that were wanted; both 0 for a family without one."""

    hits: int = 0  # held by the row cache
    misses: int = 0  # read from the table's file; all of them where the table has no cache


class HostReads:
    """One session's reads since they were last taken. Used on the thread that reads.

    Args:
        model: whose totals are read.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._pending = NgramReads()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """What is read within belongs to this session, also where it ends in an error."""
        before = self._totals()
        try:
            yield
        finally:
            after, own = self._totals(), self._pending
            self._pending = NgramReads(
                own.hits + after.hits - before.hits, own.misses + after.misses - before.misses
            )

    def take(self) -> NgramReads:
        """Reads that were not yet taken."""
        own, self._pending = self._pending, NgramReads()
        return own

    def _totals(self) -> NgramReads:
        totals = host_counters(self._model)
        return NgramReads(totals.get("ngram_hits", 0), totals.get("ngram_misses", 0))
