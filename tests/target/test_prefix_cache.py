"""Prefixes: what is found, for whom, for how many bytes, and that nobody can change one."""

import mlx.core as mx
import pytest

from common.errors import EngineError
from target_svc.models.state import SequenceState, itself
from target_svc.models.states.rows import GrowingRows, RowWindow
from target_svc.prefix_cache import Context, Copies, PrefixCache, Scope, kept_after
from target_svc.taps import FeatureStore

ME, YOU = Scope("me", "Taps"), Scope("you", "Taps")
WIDTH, ROW_BYTES = 4, 16  # of the one buffer of these tests, float32


def context_of(n_tokens):
    """A context that holds as many rows as tokens, each its position."""
    rows = GrowingRows(0, WIDTH, mx.float32)
    state = SequenceState({"rows": rows})
    if n_tokens:
        append(state, 0, n_tokens)
    return Context(state)


def append(state, first, count):
    rows = state.pieces["rows"]
    rows.append(mx.broadcast_to(mx.arange(first, first + count)[:, None], (count, WIDTH)))
    rows.roll_back(count)
    state.base += count


def values(context):
    return context.state.pieces["rows"].committed[:, 0].tolist()


def cache_with(*prefixes, budget=1 << 20, scope=ME):
    cache = PrefixCache(budget)
    for ids in prefixes:
        cache.keep(scope, ids, context_of(len(ids)))
    return cache


def test_the_longest_prefix_that_leaves_a_token_is_found():
    """All of a prompt taken over leaves nothing to score."""
    cache = cache_with([1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 9, 9])
    assert cache.find(ME, [1, 2, 3, 4, 5]).state.base == 4
    assert cache.find(ME, [1, 2, 3, 4]).state.base == 3
    assert cache.find(ME, [1, 2, 9, 9]).state.base == 2
    assert cache.find(ME, [1]) is None
    assert cache.find(ME, [2, 2, 3, 4]) is None
    counters = cache.counters()
    assert (counters["prefix_hits"], counters["prefix_misses"]) == (3, 2)
    assert counters["prefix_tokens"] == 9


@pytest.mark.parametrize("scope", [YOU, Scope("me", "NoneType"), Scope("", "Taps")])
def test_another_owner_or_kind_finds_nothing(scope):
    cache = cache_with([1, 2, 3])
    assert cache.find(scope, [1, 2, 3, 4]) is None
    cache.forget(scope, [1, 2, 3])
    assert cache.find(ME, [1, 2, 3, 4]) is not None


def test_the_least_recently_used_goes_first_and_bytes_stay_in_the_budget():
    cache = cache_with([1] * 4, [2] * 4, budget=10 * ROW_BYTES)
    assert cache.find(ME, [1] * 5) is not None  # used again: now [2] is the oldest
    cache.keep(ME, [3] * 4, context_of(4))
    assert cache.find(ME, [2] * 5) is None
    assert cache.find(ME, [1] * 5) is not None
    assert cache.find(ME, [3] * 5) is not None
    counters = cache.counters()
    assert counters["prefix_bytes"] == 8 * ROW_BYTES
    assert (counters["prefix_entries"], counters["prefix_evictions"]) == (2, 1)


def test_keeping_again_makes_it_the_newest_and_costs_nothing():
    cache = cache_with([1] * 4, [2] * 4, budget=10 * ROW_BYTES)
    cache.keep(ME, [1] * 4, context_of(4))
    assert cache.counters()["prefix_bytes"] == 8 * ROW_BYTES
    cache.keep(ME, [3] * 4, context_of(4))
    assert cache.find(ME, [2] * 5) is None


def test_what_is_larger_than_the_budget_evicts_nobody():
    cache = cache_with([1] * 4, budget=5 * ROW_BYTES)
    cache.keep(ME, [2] * 6, context_of(6))
    assert cache.find(ME, [2] * 7) is None
    assert cache.find(ME, [1] * 5) is not None
    assert cache.counters()["prefix_too_large"] == 1


def test_a_budget_of_0_keeps_and_counts_nothing():
    cache = cache_with([1, 2], budget=0)
    assert cache.find(ME, [1, 2, 3]) is None
    assert cache.counters() == {}


def test_forgetting_drops_every_prefix_of_the_ids_and_no_other():
    cache = cache_with([1, 2], [1, 2, 3], [1, 2, 4])
    cache.forget(ME, [1, 2, 3])
    assert cache.find(ME, [1, 2, 3, 5]) is None
    assert cache.find(ME, [1, 2, 4, 5]).state.base == 3
    cache.forget(ME, [1, 2, 4])
    assert cache.counters()["prefix_bytes"] == 0


def test_whoever_goes_on_changes_neither_the_prefix_nor_another():
    cache = cache_with([5, 5, 5])
    one, other = cache.find(ME, [5] * 4), cache.find(ME, [5] * 4)
    append(one.state, 70, 2)
    append(other.state, 80, 1)
    assert values(one) == [0, 1, 2, 70, 71]
    assert values(other) == [0, 1, 2, 80]
    assert values(cache.find(ME, [5] * 4)) == [0, 1, 2]


def test_who_leaves_a_prefix_goes_on_without_changing_it():
    cache, live = PrefixCache(1 << 20), context_of(3)
    cache.keep(ME, [5, 5, 5], live)
    append(live.state, 70, 2)
    assert values(cache.find(ME, [5] * 4)) == [0, 1, 2]


def test_a_prefix_holds_its_rows_and_not_the_buffer_behind_them():
    """A view would keep 256 rows alive, and 4 would be counted."""
    window = RowWindow(2, WIDTH, mx.float32)
    window.extend(mx.ones((1000, WIDTH)))
    window.roll_back(1000)
    copies = Copies()
    state = SequenceState({"window": window, "rows": context_of(4).state.pieces["rows"]})
    twin = state.twin(copies)
    mx.eval(copies.made)
    assert copies.nbytes == (2 + 4) * ROW_BYTES
    del state, window
    mx.clear_cache()
    held = mx.get_active_memory()
    del twin, copies
    mx.clear_cache()
    assert 0 < held - mx.get_active_memory() <= 2 * 6 * ROW_BYTES  # small buffers are rounded up


def test_a_state_within_a_forward_has_no_twin():
    state = context_of(2).state
    state.captured = 3
    with pytest.raises(EngineError, match=r"3 rows are captured at position 2"):
        state.twin(itself)


@pytest.mark.parametrize("window", [0, 4])
def test_a_store_hands_on_the_rows_a_drafter_can_use(window):
    store = FeatureStore(window)
    for first in (0, 5):
        store.add(mx.broadcast_to(mx.arange(first, first + 5)[:, None], (5, 2)))
    twin = store.twin(Copies())
    assert store.rows_from(0)[0] == twin.rows_from(0)[0] == (7 if window else 0)
    twin.add(mx.full((1, 2), 10))
    first, rows = twin.rows_from(8)
    assert (first, rows[:, 0].tolist()) == (8, [8, 9, 10])
    assert store.rows_from(8)[1].shape == (2, 2)
    assert FeatureStore(window).twin(itself).rows_from(0) is None


@pytest.mark.parametrize(
    ("start", "total", "ends"),
    [
        (0, 20, set()),
        (0, 21, {20}),
        (0, 45, {20, 40}),
        (0, 170, {20, 40, 80, 160}),
        (40, 170, {80, 160}),
        (159, 170, {160}),
        (160, 170, set()),
    ],
)
def test_ends_of_chunks_worth_keeping(start, total, ends):
    assert kept_after(start, total, 20) == ends
