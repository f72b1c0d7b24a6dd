"""The n-gram table: rows of a file that may be larger than memory, as the graph wants them.

Owns the order cache, page advice, read, and what is counted of it. Does not know how rows are
chosen or stored. `prefetch`, `gather` and `gather_into` belong to one thread.
Invariant: neither cache nor prefetch changes a value.

A cache pays where a row takes arithmetic (16 rows of 160 for each of 1, 8, 256 tokens, all held: 4,
7, 360 us; made of 4 bits: 74, 110, 5000; of FP8: 24, 46, 1100) or where its page may be evicted: a
page holds twelve such rows, of which one is wanted again. Plain rows of a small table are copied in
about the time of a lookup, and most rounds miss some row, so those go without.
"""

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from common.errors import EngineError
from target_svc.models.blocks.mapped_rows import Claim
from target_svc.models.blocks.row_cache import RowCache
from target_svc.models.blocks.row_formats import BFLOAT16_BITS, RowFormat, convert

CACHE_BYTES: Final = 64 * 1024 * 1024  # 200,000 rows of 160 bfloat16
SMALL_BYTES: Final = 256 * 1024 * 1024  # a table up to this is read ahead whole
_SLOW_ROW_S: Final = 25e-6  # a row copied from memory takes under one; from disk about a hundred


class NgramTable:
    """Rows of a table.

    Args:
        rows: how they are stored, and the dtype of their values.
        cache_bytes: most memory of the row cache; 0 is none, None chooses.
    """

    def __init__(self, rows: RowFormat, *, cache_bytes: int | None = None) -> None:
        self._rows = rows
        self._is_small = sum(piece.n_bytes for piece in rows.pieces) <= SMALL_BYTES
        if cache_bytes is None:
            cache_bytes = CACHE_BYTES if rows.is_computed or not self._is_small else 0
        self._cache = RowCache(cache_bytes, rows.width, rows.values) if cache_bytes else None
        self._ahead: ThreadPoolExecutor | None = None
        self._asked: Future[None] | None = None
        self._counts = {"hits": 0, "misses": 0, "prefetched": 0, "bytes_read": 0}
        self._row_bytes = sum(piece.n_bytes // piece.n_rows for piece in rows.pieces)
        if self._is_small:
            for piece in rows.pieces:
                piece.advise_all()

    @property
    def n_rows(self) -> int:
        """Valid ids are 0..n_rows-1."""
        return self._rows.n_rows

    @property
    def width(self) -> int:
        """Values of a row."""
        return self._rows.width

    def gather(self, rows: NDArray[np.int64]) -> mx.array:
        """Read rows [R, heads] as one array [R, heads * width] in the table's dtype of values."""
        out = np.empty((rows.shape[0], rows.shape[1] * self.width), self._rows.values)
        self.gather_into(rows, out)
        array = mx.array(out)
        return array.view(mx.bfloat16) if out.dtype == BFLOAT16_BITS else array

    def gather_into(self, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Read rows [R, heads] into a host buffer.

        Args:
            rows: ids in 0..n_rows-1.
            out: [R, heads * width], contiguous; float32, float16, or uint16 for bfloat16's bits.
                Another dtype than the table's own is rounded to.

        Raises:
            EngineError: the buffer is not contiguous; nothing was written.
        """
        if not out.flags.c_contiguous:
            raise EngineError(f"buffer has strides {out.strides}; rows need a contiguous one")
        flat = rows.reshape(-1)
        buffer = out.reshape(len(flat), self.width)
        if buffer.dtype == self._rows.values:
            self._fetch(flat, buffer)
            return
        values = np.empty(buffer.shape, self._rows.values)
        self._fetch(flat, values)
        buffer[:] = convert(values, buffer.dtype)

    def prefetch(self, rows: NDArray[np.int64]) -> None:
        """Begin to read rows of any shape in the background; returns at once."""
        if self._is_small:
            return  # asked for when it was opened
        flat = rows.reshape(-1)
        if self._cache is not None:
            flat = flat[~self._cache.has(flat)]
        claims = self._claim(flat)
        if not claims:
            return
        self._counts["prefetched"] += len(flat)
        if self._ahead is None:
            self._ahead = ThreadPoolExecutor(1, "ngram-read-ahead")
        with contextlib.suppress(RuntimeError):  # the interpreter is on its way out
            self._asked = self._ahead.submit(_read_ahead, claims)

    def counters(self) -> dict[str, int]:
        """Totals: rows by cache `hits` and `misses`, rows `prefetched`, `bytes_read`.

        Any thread may call it.
        """
        return dict(self._counts)

    def _fetch(self, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Write rows [N] into `out` [N, width], which has the dtype of values."""
        if self._cache is None:
            out[:] = self._read(rows)
            return
        missed = ~self._cache.fetch(rows, out)
        wanted = rows[missed]
        self._counts["hits"] += len(rows) - len(wanted)
        if len(wanted):
            values = self._read(wanted)
            out[missed] = values
            self._cache.store(wanted, values)

    def _read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        self._counts["misses"] += len(rows)
        self._counts["bytes_read"] += len(rows) * self._row_bytes
        if self._is_small:
            return self._rows.read(rows)
        claims = self._claim(rows)
        _advise(claims)
        is_settled = not claims and (self._asked is None or self._asked.done())
        begun = time.perf_counter()
        values = self._rows.read(rows)
        if is_settled and time.perf_counter() - begun > _SLOW_ROW_S * (len(rows) + 8):
            # All of it was asked for once and yet came from disk: pages are being evicted.
            for piece in self._rows.pieces:
                piece.forget_claims()
        return values

    def _claim(self, rows: NDArray[np.int64]) -> list[Claim]:
        return [claim for piece in self._rows.pieces for claim in piece.claim(rows)]


def _advise(claims: Sequence[Claim]) -> None:
    for file, pages in claims:
        file.advise(pages)


def _read_ahead(claims: Sequence[Claim]) -> None:
    _advise(claims)
    for file, pages in claims:
        file.await_pages(pages)
