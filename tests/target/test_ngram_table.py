"""Rows of an n-gram table: the right bytes, the right values, from files larger than memory."""

import mmap
import os
import threading

import numpy as np
import psutil
import pytest
from support.stored import write_stored

from common.checkpoint.index import TensorSpan, index_file
from common.errors import EngineError
from target_svc.models.blocks import ngram_table
from target_svc.models.blocks.mapped_rows import MappedFile, MappedRows, map_files
from target_svc.models.blocks.ngram_table import NgramTable
from target_svc.models.blocks.row_cache import RowCache
from target_svc.models.blocks.row_formats import (
    BFLOAT16_BITS,
    FLOAT16,
    FLOAT32,
    PlainRows,
    convert,
)

PARTS, ROWS, WIDTH = 6, 50, 24  # rows of each part
STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
GIB = 1 << 30


def make_bits(dtype, seed=0):
    """Random finite rows [PARTS * ROWS, WIDTH] as stored."""
    values = np.random.default_rng(seed).standard_normal((PARTS * ROWS, WIDTH), dtype=np.float32)
    return convert(values, np.dtype(STORED[dtype]))


def write_parts(folder, bits, dtype, n_files):
    """Write the table in parts over files, an odd number of bytes before each file's first."""
    parts = np.split(bits, PARTS)
    for file in range(n_files):
        mine = {f"part_{p}": (dtype, parts[p]) for p in range(PARTS) if p % n_files == file}
        write_stored(folder / f"{file}.safetensors", {"odd": ("U8", np.zeros(3, np.uint8)), **mine})
    spans = {}
    for file in range(n_files):
        spans |= index_file(folder / f"{file}.safetensors")[0]
    return [spans[f"part_{p}"] for p in range(PARTS)]


def open_rows(spans, values=FLOAT32, **options):
    """A table over parts."""
    return NgramTable(PlainRows(MappedRows(spans, map_files(spans)), values), **options)


@pytest.fixture
def bits():
    """A bfloat16 table."""
    return make_bits("BF16")


@pytest.fixture
def spans(tmp_path, bits):
    """Its parts in two files."""
    return write_parts(tmp_path, bits, "BF16", 2)


@pytest.fixture
def never_small(monkeypatch):
    """Treat every table as one that does not fit memory."""
    monkeypatch.setattr(ngram_table, "SMALL_BYTES", 0)


def draw_rows(rng, count, heads=4):
    """Row ids [count, heads], some of them twice."""
    rows = rng.integers(0, PARTS * ROWS, (count, heads))
    rows[-1] = rows[0]
    return rows


def gather(table, rows, values=np.float32):
    """What a leaf is filled with."""
    out = np.full((len(rows), rows.shape[1] * table.width), 77, values)
    table.gather_into(rows, out)
    return out


# --------------------------------------------------------------------------- which bytes


@pytest.mark.parametrize("n_files", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_rows_come_from_their_part_whatever_file_it_is_in(tmp_path, dtype, n_files):
    """A row of the next part, or one column late because a file is not aligned."""
    bits = make_bits(dtype)
    table = open_rows(write_parts(tmp_path, bits, dtype, n_files))
    rows = draw_rows(np.random.default_rng(1), 9)
    assert np.array_equal(gather(table, rows), convert(bits, FLOAT32)[rows].reshape(9, -1))


def test_a_graph_gets_the_same_rows_as_a_leaf(spans):
    """Two ways to the table that differ."""
    table, rows = open_rows(spans), draw_rows(np.random.default_rng(2), 5)
    assert np.array_equal(np.array(table.gather(rows)), gather(table, rows))


@pytest.mark.parametrize("values", [FLOAT32, FLOAT16, BFLOAT16_BITS])
@pytest.mark.parametrize("wanted", [FLOAT32, FLOAT16, BFLOAT16_BITS])
def test_a_leaf_of_another_dtype_gets_rounded_values(tmp_path, values, wanted):
    """Bits of bfloat16 read as numbers of float32."""
    bits = make_bits("F32")
    table = open_rows(write_parts(tmp_path, bits, "F32", 1), values)
    rows = np.arange(8).reshape(2, 4)
    expected = convert(convert(bits, values), wanted)[:8].reshape(2, -1)
    assert np.array_equal(gather(table, rows, wanted), expected)


def test_a_buffer_that_cannot_be_filled_in_place_is_refused(spans):
    """A copy filled in place of the leaf: rows of zeros."""
    out = np.zeros((4, 2 * WIDTH), np.float32)[::2]
    with pytest.raises(EngineError, match="contiguous"):
        open_rows(spans).gather_into(np.zeros((2, 2), np.int64), out)


# --------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("slots", [1, 8, 64, 1024])
def test_a_cache_changes_no_value_whatever_collides(spans, bits, slots):
    """Two rows of one slot in one batch: the tag of one with the values of the other."""
    table = open_rows(spans, cache_bytes=slots * WIDTH * 4)
    rng, values = np.random.default_rng(slots), convert(bits, FLOAT32)
    for count in rng.integers(1, 40, 60):
        rows = draw_rows(rng, count)
        assert np.array_equal(gather(table, rows), values[rows].reshape(count, -1))
    counts = table.counters()
    assert counts["hits"] > 0
    assert counts["misses"] > 0


def test_a_slot_keeps_the_values_of_the_row_that_it_names():
    """The last write of a row's id and the last write of its values are not the same one."""
    cache = RowCache(4 * WIDTH * 4, WIDTH, FLOAT32)
    rows = np.array([1, 5, 9, 1, 5])
    cache.store(rows, np.repeat(rows[:, None], WIDTH, axis=1).astype(np.float32))
    out = np.zeros((3, WIDTH), np.float32)
    held = cache.fetch(np.array([1, 5, 9]), out)
    assert held.sum() == 1
    assert out[held][0, 0] == np.array([1, 5, 9])[held][0]


def test_a_second_look_hits_and_reads_nothing(spans):
    """A cache that never answers, or counters that say so."""
    table, rows = open_rows(spans, cache_bytes=1 << 16), np.arange(12).reshape(3, 4)
    gather(table, rows)
    gather(table, rows)
    assert table.counters() == {
        "hits": 12,
        "misses": 12,
        "prefetched": 0,
        "bytes_read": 12 * WIDTH * 2,
    }


def test_a_small_plain_table_goes_without_a_cache(spans):
    """A lookup that costs more than the copy it saves."""
    table, rows = open_rows(spans), np.zeros((2, 4), np.int64)
    gather(table, rows)
    gather(table, rows)
    assert table.counters()["hits"] == 0


# --------------------------------------------------------------------------- reading ahead


def wait_for_read_ahead(table):
    """Until what was asked for is read; the deadline is the future's own."""
    table._asked.result(timeout=30)


@pytest.fixture
def advised(monkeypatch):
    """Pages asked for, in order, and the thread that asked."""
    seen = []
    real = MappedFile.advise

    def spy(self, pages):
        seen.append((pages.tolist(), threading.current_thread() is threading.main_thread()))
        real(self, pages)

    monkeypatch.setattr(MappedFile, "advise", spy)
    return seen


@pytest.mark.usefixtures("never_small")
def test_rows_asked_for_ahead_are_not_asked_for_again(spans, advised):
    """A prefetch that helps nothing, since the gather asks for every page once more."""
    table, rows = open_rows(spans), np.arange(0, 300, 25).reshape(3, 4)
    table.prefetch(rows)
    wait_for_read_ahead(table)
    n_asked = len(advised)
    gather(table, rows)
    assert n_asked > 0
    assert len(advised) == n_asked
    assert not any(is_main for _, is_main in advised)
    assert table.counters()["prefetched"] == 12


@pytest.mark.usefixtures("never_small")
def test_rows_that_are_cached_are_not_read_ahead(spans, advised):
    """Disk reads for rows that memory holds already."""
    table, rows = open_rows(spans), np.arange(12).reshape(3, 4)
    gather(table, rows)
    for piece in table._rows.pieces:
        piece.forget_claims()
    advised.clear()
    table.prefetch(rows)
    assert advised == []
    assert table.counters()["prefetched"] == 0


@pytest.mark.usefixtures("never_small")
def test_a_cold_gather_asks_for_all_its_pages_before_it_reads(spans, advised):
    """One page after the other, each as slow as the disk."""
    gather(open_rows(spans), np.array([[0, 299]]))
    assert sum(len(pages) for pages, _ in advised) >= 2


@pytest.mark.usefixtures("never_small")
def test_pages_that_were_evicted_are_asked_for_again(spans, advised, monkeypatch):
    """A table larger than memory that is slow for ever once it was read through."""
    monkeypatch.setattr(ngram_table, "_SLOW_ROW_S", -1.0)  # every read looks like the disk's
    table, rows = open_rows(spans, cache_bytes=0), np.array([[0, 299]])
    gather(table, rows)
    gather(table, rows)  # nothing new to ask for, and slow
    n_asked = len(advised)
    gather(table, rows)
    assert len(advised) > n_asked


@pytest.mark.usefixtures("never_small")
def test_advice_that_the_system_refuses_is_no_error(spans, monkeypatch):
    """A request that fails because of an optimisation."""

    class Stubborn:
        def madvise(self, *_):
            raise OSError("no")

    table, rows = open_rows(spans), np.array([[0, 299]])
    for file in table._rows.pieces[0]._files:
        monkeypatch.setattr(file, "_map", Stubborn())
    table.prefetch(rows)
    wait_for_read_ahead(table)
    assert gather(table, rows).shape == (1, 2 * WIDTH)


def test_a_row_over_two_pages_asks_for_both(tmp_path):
    """The second half of one row in twelve left to a slow fault."""
    path = tmp_path / "two_pages.bin"
    path.write_bytes(bytes(2 * mmap.PAGESIZE))
    file = MappedFile(path)
    assert file.claim(np.array([mmap.PAGESIZE - 10]), 20).tolist() == [0, 1]
    assert file.claim(np.array([0, mmap.PAGESIZE]), 20).tolist() == []


# --------------------------------------------------------------------------- larger than memory


def sparse_file(path, n_bytes):
    """A file with a hole of `n_bytes`; skips where the filesystem would fill it."""
    path.touch()
    os.truncate(path, n_bytes)
    if path.stat().st_blocks * 512 > 1 << 20:
        path.unlink()
        pytest.skip("this filesystem has no sparse files")


def test_a_table_of_forty_gib_is_read_in_a_few_pages(tmp_path):
    """A table pulled into memory, or an offset that overflows 32 bits."""
    path, width, n_rows = tmp_path / "table.bin", 160, 40 * GIB // 320
    sparse_file(path, 40 * GIB)
    known = np.array([0, 1, n_rows // 3, n_rows // 2 + 7, n_rows - 2, n_rows - 1])
    rng = np.random.default_rng(3)
    written = convert(rng.standard_normal((6, width), dtype=np.float32), BFLOAT16_BITS)
    with path.open("r+b") as file:
        for row, values in zip(known.tolist(), written, strict=True):
            file.seek(row * 320)
            file.write(values.tobytes())
    span = TensorSpan(path, "BF16", (n_rows, width), 0, n_rows * 320)
    before = psutil.Process().memory_info().rss
    table = NgramTable(PlainRows(MappedRows([span], map_files([span])), BFLOAT16_BITS))
    rows = np.concatenate([known, rng.integers(0, n_rows, 4090)]).reshape(256, 16)
    table.prefetch(rows[:8])
    out = gather(table, rows, np.uint16).reshape(-1, width)
    grown = psutil.Process().memory_info().rss - before
    assert np.array_equal(out[:6], written)
    assert not out[6:].any()
    assert table.counters()["misses"] == 4096
    assert grown < 160 * (1 << 20)  # the cache's 64 MiB, the pages, and what is around them
