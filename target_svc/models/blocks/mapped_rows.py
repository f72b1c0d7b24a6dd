"""Rows of tensors on disk, copied out of memory maps, and pages asked for before they are read.

Knows files, offsets and pages. Does not know what rows mean.
Invariant: asking ahead changes when bytes arrive, never which bytes.

Why it looks so, for rows of 320 B, 16 of them per token, medians on ext4 over a virtual disk:

* A view with one row per byte offset copies whole rows: 1, 3 and 185 us for 1, 8 and 256 tokens,
  against 14, 64 and 3098 us when every element is indexed. It needs no alignment.
* Without `MADV_RANDOM` every cold row pulls in its neighbourhood: 150 ms per token against 1.9.
* `MADV_WILLNEED` page by page, then reading, keeps the disk's queue full from one thread: 0.5, 3.2
  and 105 ms cold, against 1.9, 14 and 530 ms row after row, and 1.5, 6 and 115 ms with sixteen
  threads of `pread`. Those threads cost 0.4 ms on warm rows too, so there are none.
* Asked for while something else runs, they are copied in 0.3, 0.3 and 6 to 13 ms.
* Advice on a page that is resident costs 1.5 us, more than its row, so pages asked for once are
  remembered.
"""

import contextlib
import mmap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from common.checkpoint.index import TensorSpan
from common.errors import ModelMismatch

_PAGE: Final = mmap.PAGESIZE
_BURST: Final = 32  # pages advised, at 16 us each, before other threads may run: advising keeps
# the interpreter to itself

#: Pages of one file that shall be read ahead: page numbers, unique.
Claim = tuple["MappedFile", NDArray[np.int64]]


class MappedFile:
    """One file, mapped read-only for scattered reads.

    One thread claims pages; `advise` may run on another.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_RANDOM)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._is_asked = np.zeros(-(-len(self._map) // _PAGE), np.bool_)

    def windows(self, n_bytes: int) -> NDArray[Any]:
        """`n_bytes` from every offset on, as opaque items; nothing is read yet."""
        count = len(self._map) - n_bytes + 1
        return np.ndarray((count,), f"V{n_bytes}", buffer=self._map, strides=(1,))

    def claim(self, offsets: NDArray[np.int64], n_bytes: int) -> NDArray[np.int64]:
        """Pages of `n_bytes` from each offset on that were not asked for; from now on they are."""
        first, last = offsets // _PAGE, (offsets + (n_bytes - 1)) // _PAGE
        if self._is_asked[first].all() and self._is_asked[last].all():
            return first[:0]
        pages = np.unique(np.concatenate([first, last]))
        pages = pages[~self._is_asked[pages]]
        self._is_asked[pages] = True
        return pages

    def advise(self, pages: NDArray[np.int64]) -> None:
        """Ask for pages; returns before they are read. Advice is never an error."""
        with contextlib.suppress(OSError):
            for count, page in enumerate(pages.tolist(), start=1):
                self._map.madvise(mmap.MADV_WILLNEED, page * _PAGE, _PAGE)
                if count % _BURST == 0:
                    time.sleep(0)

    def await_pages(self, pages: NDArray[np.int64]) -> None:
        """Touch pages, so that the thread that will copy from them neither waits nor faults."""
        self._bytes[pages * _PAGE]

    def advise_range(self, offset: int, n_bytes: int) -> None:
        """Ask for everything from `offset` on, `n_bytes` long."""
        start = offset // _PAGE * _PAGE
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_WILLNEED, start, offset + n_bytes - start)

    def forget_claims(self) -> None:
        """Pages asked for earlier may have been evicted: ask for all again."""
        self._is_asked[:] = False


class MappedRows:
    """Rows of one tensor that may be split into parts, in one file or several.

    Args:
        parts: spans of equal shape [rows, columns] and dtype, in row order.
        files: at least the files of the parts, by path.

    Attributes:
        dtype: container spelling, such as "BF16".
        n_rows: of all parts.
        columns: stored items of a row.
        n_bytes: of all parts.
    """

    def __init__(self, parts: Sequence[TensorSpan], files: Mapping[Path, MappedFile]) -> None:
        first = parts[0]
        if len(first.shape) != 2:
            raise ModelMismatch(f"n-gram table has shape {list(first.shape)}; right are two axes")
        if any((part.shape, part.dtype) != (first.shape, first.dtype) for part in parts):
            raise ModelMismatch("parts of the n-gram table differ in shape or dtype; they may not")
        self.dtype = first.dtype
        self._rows_per_part, self.columns = first.shape
        self.n_rows = self._rows_per_part * len(parts)
        self._row_bytes = first.n_bytes // self._rows_per_part
        self.n_bytes = first.n_bytes * len(parts)
        self._spans = tuple(parts)
        paths = sorted({part.path for part in parts})
        self._files = [files[path] for path in paths]
        self._windows = [file.windows(self._row_bytes) for file in self._files]
        self._file_of = np.array([paths.index(part.path) for part in parts])
        self._start_of = np.array([part.offset for part in parts], np.int64)

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Bytes [N, row bytes] of rows [N] in 0..n_rows-1."""
        parts, offsets = self._locate(rows)
        if len(self._files) == 1:
            items = self._windows[0][offsets]
        else:
            items = np.empty(len(rows), self._windows[0].dtype)
            for file, mine in self._by_file(parts):
                items[mine] = self._windows[file][offsets[mine]]
        return items.view(np.uint8).reshape(len(rows), self._row_bytes)

    def claim(self, rows: NDArray[np.int64]) -> list[Claim]:
        """Pages of rows [N] that were not asked for; the caller now owes their `advise`."""
        parts, offsets = self._locate(rows)
        if len(self._files) == 1:
            claims = [(self._files[0], self._files[0].claim(offsets, self._row_bytes))]
        else:
            claims = [
                (self._files[file], self._files[file].claim(offsets[mine], self._row_bytes))
                for file, mine in self._by_file(parts)
            ]
        return [(file, pages) for file, pages in claims if len(pages)]

    def advise_all(self) -> None:
        """Ask for the whole tensor."""
        for file, span in zip(self._file_of.tolist(), self._spans, strict=True):
            self._files[file].advise_range(span.offset, span.n_bytes)

    def forget_claims(self) -> None:
        """See `MappedFile.forget_claims`."""
        for file in self._files:
            file.forget_claims()

    def _locate(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The part of each row, and the byte in its file at which it begins."""
        parts, local = np.divmod(rows, self._rows_per_part)
        return parts, self._start_of[parts] + local * self._row_bytes

    def _by_file(self, parts: NDArray[np.int64]) -> list[tuple[int, NDArray[np.bool_]]]:
        files = self._file_of[parts]
        return [(file, files == file) for file in np.unique(files).tolist()]


def map_files(spans: Sequence[TensorSpan]) -> dict[Path, MappedFile]:
    """Map every file that spans lie in, once."""
    return {path: MappedFile(path) for path in sorted({span.path for span in spans})}
