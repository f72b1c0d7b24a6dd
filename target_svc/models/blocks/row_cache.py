"""Rows of a host table that were read lately, within a fixed number of bytes.

Knows row ids and their values. Does not know files or formats. One thread uses it.
Invariant: what it returns for a row is what was stored for that row; a slot names its row.

Direct-mapped: row ids are hashes already, so their low bits spread over the slots by themselves,
and a lookup is three vector operations whatever it holds.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_NOBODY: Final = -1


class RowCache:
    """A direct-mapped cache of rows.

    Args:
        n_bytes: most memory of values; the slots are the largest power of two that fits, at least
            one. All of it is taken at once: taking pages as they are used costs 20 ms in all,
            where huge pages are cleared one by one, and that during the first rounds.
        width: values of a row.
        values: their dtype.
    """

    def __init__(self, n_bytes: int, width: int, values: np.dtype[Any]) -> None:
        fitting = max(1, n_bytes // (width * values.itemsize))
        self.n_slots = 1 << (fitting.bit_length() - 1)
        self._mask = self.n_slots - 1
        self._row_of = np.full(self.n_slots, _NOBODY, np.int64)
        self._values = np.full((self.n_slots, width), 0, values)

    def has(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows [N] are held: bool [N]."""
        held: NDArray[np.bool_] = self._row_of[rows & self._mask] == rows
        return held

    def fetch(self, rows: NDArray[np.int64], out: NDArray[Any]) -> NDArray[np.bool_]:
        """Write the rows that are held into `out` [N, width]; returns which those are: bool [N].

        Other rows of `out` hold nothing of use.
        """
        slots = rows & self._mask
        held: NDArray[np.bool_] = self._row_of[slots] == rows
        self._values.take(slots, axis=0, out=out, mode="clip")
        return held

    def store(self, rows: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Hold rows [N] with values [N, width] in place of what their slots held."""
        slots = rows & self._mask
        self._row_of[slots] = rows
        # Two of these rows may share a slot: only the one that the slot now names may write.
        is_named = self._row_of[slots] == rows
        self._values[slots[is_named]] = values[is_named]
