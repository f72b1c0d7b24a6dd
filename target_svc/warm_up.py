"""Measure what each width of a verify costs, in turns.

Owns how often and in what order widths are run, and which time of each counts. Does not know how a
verify is run. Other processes start at the same time, so the lower quartile of each width counts.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from target_svc.card import EngineCard
from target_svc.prefill import PrefillStep
from target_svc.verify import Verdict

CONTEXT: Final = 256  # tokens at which the ladder is measured
TURNS: Final = 8  # timed rounds of every width, after one that is not timed
_LEAST: Final = 3  # of them, where they take long
_ENOUGH_S: Final = 5.0  # after so long no further turn is begun


class Sequenced(Protocol):
    """A session, as far as it is measured."""

    def prefill(self, prompt_ids: Sequence[int]) -> Iterator[PrefillStep]:
        """Run a prompt."""

    def verify(self, draft_ids: Sequence[int], rows: int) -> Verdict:
        """Run a round."""


def measure_ladder(session: Sequenced, widths: Sequence[int], card: EngineCard) -> dict[int, float]:
    """Milliseconds by rows.

    Args:
        session: new.
        widths: rows, each measured.
        card: of the target.
    """
    length = max(1, min(CONTEXT, card.context_len // 2))
    for _ in session.prefill([(31 * index + 8) % card.vocab_size for index in range(length)]):
        pass
    timings: dict[int, list[float]] = {rows: [] for rows in widths}
    begun = time.perf_counter()
    for turn in range(TURNS + 1):  # widths take turns, so that drift hits all alike
        if turn > _LEAST and time.perf_counter() - begun > _ENOUGH_S:
            break
        first = turn % len(widths)  # and another one begins each turn
        for rows in (*widths[first:], *widths[:first]):
            drafts = [(turn + 17 * row) % card.vocab_size for row in range(1, rows)]
            verdict = session.verify(drafts, rows)
            if turn:
                timings[rows].append(verdict.build_ms + verdict.eval_ms)
    return {rows: sorted(times)[len(times) // 4] for rows, times in timings.items()}
