"""Measure what each width of a verify costs, in turns.

Owns how often and in what order widths are run, and which time of each counts. Does not know what
a verify is. Other processes start at the same time, so the lower quartile of each width counts.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final

TURNS: Final = 8  # timed rounds of every width, after one that is not timed
_LEAST: Final = 3  # of them, where they take long
_ENOUGH_S: Final = 5.0  # after so long no further turn is begun


def measure_ladder(widths: Sequence[int], run: Callable[[int, int], float]) -> dict[int, float]:
    """Milliseconds by rows.

    Args:
        widths: rows, each measured.
        run: runs a verify of (rows, turn) and returns its milliseconds.
    """
    timings: dict[int, list[float]] = {rows: [] for rows in widths}
    begun = time.perf_counter()
    for turn in range(TURNS + 1):  # widths take turns, so that drift hits all alike
        if turn > _LEAST and time.perf_counter() - begun > _ENOUGH_S:
            break
        first = turn % len(widths)  # and another one begins each turn
        for rows in (*widths[first:], *widths[:first]):
            ms = run(rows, turn)
            if turn:
                timings[rows].append(ms)
    return {rows: sorted(times)[len(times) // 4] for rows, times in timings.items()}
