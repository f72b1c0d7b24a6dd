"""The context: what it keeps, what a query sees, what it refuses."""

import mlx.core as mx
import numpy as np
import pytest
from support.tiny_drafter import H, make_stand_in_target, make_tiny_drafter

from common.errors import EngineError, NotFinite
from drafter_svc import device, host
from drafter_svc.context import ContextGap, ContextStore
from drafter_svc.drafter import Drafter
from drafter_svc.load import load

W = 16
SLIDING, FULL = "sliding_attention", "full_attention"


FORMS = pytest.mark.parametrize("kernels", [host, device], ids=["host", "device"])


def build(folder, kernels, **changes):
    target = make_stand_in_target(folder / "target")
    path = make_tiny_drafter(folder / "drafter", target, **changes)
    return Drafter(load(path, target, kernels))


@pytest.fixture(scope="module", params=[host, device], ids=["host", "device"])
def drafter(request, tmp_path_factory):
    """DFlash2, both layers sliding with window 16."""
    return build(tmp_path_factory.mktemp("sliding"), request.param)


@pytest.fixture(scope="module", params=[host, device], ids=["host", "device"])
def mixed(request, tmp_path_factory):
    """DFlash2, one sliding and one full layer."""
    folder = tmp_path_factory.mktemp("mixed")
    return build(folder, request.param, layer_types=[SLIDING, FULL])


def features(n, seed=0):
    return np.random.default_rng(seed).standard_normal((n, H)).astype(np.float32)


def fill(drafter, rows, *, first_pos=0, sizes=None):
    """A context made of rows, appended in pieces of the given sizes."""
    context = drafter.open("s", 4000)
    context.reset(first_pos)
    for piece in np.split(np.arange(len(rows)), np.cumsum(sizes or [])):
        if len(piece):
            drafter.append(context, rows[piece], first_pos + int(piece[0]))
    return context


def logits(drafter, context, anchor_id=7):
    model = drafter._model
    return np.array(model.logits(model.hidden(anchor_id, context)))


@pytest.mark.parametrize("seed", range(6))
def test_any_split_of_a_context_gives_the_same_block(drafter, mixed, seed):
    """Stops: rows lost, doubled or misplaced at a piece's edge or where the slots wrap."""
    rng = np.random.default_rng(seed)
    rows = features(97, seed)
    sizes = rng.choice([1, 1, 2, 8, W - 1, W, 40], size=60).tolist()
    for one in (drafter, mixed):
        expected = logits(one, fill(one, rows))
        np.testing.assert_allclose(logits(one, fill(one, rows, sizes=sizes)), expected, atol=2e-5)


def test_single_rows_fill_the_context_like_one_piece(drafter):
    """Stops: a one-row path that differs, the known ring-order fault of other caches."""
    rows = features(50)
    one_by_one = logits(drafter, fill(drafter, rows, sizes=[1] * 50))
    np.testing.assert_allclose(one_by_one, logits(drafter, fill(drafter, rows)), atol=2e-5)


def test_the_oldest_visible_row_matters_and_the_one_before_does_not(drafter):
    """Stops: a window that is one row too wide or too narrow."""
    rows, n = features(40), 40
    plain = logits(drafter, fill(drafter, rows))
    for pos, is_seen in ((n - W + 1, True), (n - W, False)):
        changed = rows.copy()
        changed[pos] = features(1, seed=9)[0]
        other = logits(drafter, fill(drafter, changed))
        assert (np.abs(other - plain).max() > 1e-4) == is_seen
        assert (other == plain).all() != is_seen


@FORMS
def test_each_query_has_its_own_window(kernels):
    """Stops: one window for the whole block, taken from its first row."""
    store = ContextStore(1, 4, W, 100, mx.float32, kernels)
    blank = kernels.blank((1, W - 1, 4), mx.float32)
    store.write(blank, blank, 0)
    seen = store.bias(W - 1, 8) == 0
    assert seen.sum(axis=1).tolist() == [W - 1 - j for j in range(8)]


def test_rows_at_or_after_the_anchor_are_never_seen(drafter):
    """Stops: a leak of positions that the target has not committed."""
    context = fill(drafter, features(10))
    plain = logits(drafter, context)
    for store in context.stores:
        noise = np.full((store.keys.shape[0], 3, store.keys.shape[2]), 100.0, np.float32)
        noise = drafter._model.kernels.taken_in(noise, mx.float32)
        store.write(noise, noise, 10)
    assert (logits(drafter, context) == plain).all()


def test_after_wrapping_it_equals_a_fresh_context_of_the_last_rows(drafter):
    """Stops: stale rows that stay visible, and slots read by index."""
    rows = features(101)
    wrapped = fill(drafter, rows, sizes=[7] * 14)
    fresh = fill(drafter, rows[-(W - 1) :], first_pos=101 - (W - 1))
    assert wrapped.end == fresh.end == 101
    np.testing.assert_allclose(logits(drafter, wrapped), logits(drafter, fresh), atol=2e-5)


def test_visibility_follows_stored_positions(drafter):
    """Stops: any mask that is right only while slots are in order."""
    rng = np.random.default_rng(3)
    context = drafter.open("s", 500)
    context.reset(33)
    store = context.stores[0]
    for _ in range(40):
        n = int(rng.integers(1, 9))
        drafter.append(context, features(n), context.end)
        queries = np.arange(context.end, context.end + 8, dtype=np.int32)
        seen = store.bias(context.end, 8) == 0
        for query, row in zip(queries, seen, strict=True):
            positions = sorted(store.positions[: store.n_read][row].tolist())
            assert positions == list(range(max(33, query - W + 1), context.end))


def test_a_full_layer_sees_the_first_row_of_a_long_context(mixed):
    """Stops: a window applied to all layers, and rows lost when the store grows."""
    rows = features(700)
    changed = rows.copy()
    changed[0] += 20.0
    plain = logits(mixed, fill(mixed, rows, sizes=[8] * 80))
    assert np.abs(logits(mixed, fill(mixed, changed, sizes=[8] * 80)) - plain).max() > 1e-5
    np.testing.assert_allclose(logits(mixed, fill(mixed, rows)), plain, atol=2e-5)


def test_positions_matter(drafter):
    """Stops: rotating by row index, which a late start would reveal only as fewer accepts."""
    rows = features(12)
    early, late = (fill(drafter, rows, first_pos=first) for first in (0, 500))
    np.testing.assert_allclose(logits(drafter, early), logits(drafter, late), atol=1e-3)
    one_off = fill(drafter, rows, first_pos=0)
    one_off.end += 3
    assert np.abs(logits(drafter, one_off) - logits(drafter, early)).max() > 1e-2


def test_a_gap_names_the_wanted_position_and_changes_nothing(drafter):
    """Stops: features lost on the way going unnoticed."""
    rows = features(12)
    context = fill(drafter, rows[:8])
    plain = logits(drafter, context)
    with pytest.raises(ContextGap, match="rows from 8 are needed") as caught:
        drafter.append(context, rows[9:], 9)
    assert caught.value.wanted_pos == 8 == context.end
    assert (logits(drafter, context) == plain).all()


def test_rows_below_the_end_are_ignored(drafter):
    """Stops: a replay after a reconnect that shifts or overwrites the context."""
    rows = features(20)
    context = fill(drafter, rows[:10])
    assert drafter.append(context, features(6, seed=5), 4) == 0
    assert drafter.append(context, rows[6:], 6) == 10
    assert context.end == 20
    np.testing.assert_allclose(
        logits(drafter, context), logits(drafter, fill(drafter, rows)), atol=2e-5
    )


def test_rows_from_before_the_start_make_the_context_anew(drafter, mixed):
    """Stops: one row of an earlier link that keeps the whole window, sent after it, out."""
    rows = features(40)
    for one in (drafter, mixed):
        context = fill(one, rows[38:], first_pos=38)
        assert one.append(context, rows[20:39], 20) == 0  # does not reach the end: kept as it is
        assert (context.start, context.end) == (38, 40)
        assert one.append(context, rows[12:], 12) == 28
        assert (context.start, context.end) == (12, 40)
        whole = fill(one, rows[12:], first_pos=12)
        assert (logits(one, context) == logits(one, whole)).all()


def test_more_positions_than_asked_for_are_refused(drafter):
    """Stops: a store that wraps over rows it still needs."""
    context = drafter.open("s", 10)
    drafter.append(context, features(10), 0)
    with pytest.raises(EngineError, match="at most 10"):
        drafter.append(context, features(1), 10)
    assert context.end == 10


def test_a_reset_forgets_everything(drafter):
    """Stops: rows of an older epoch in a new one."""
    rows = features(30)
    context = fill(drafter, features(25, seed=4))
    context.reset()
    drafter.append(context, rows, 0)
    assert (logits(drafter, context) == logits(drafter, fill(drafter, rows))).all()


def test_a_late_start_after_a_reset_sees_no_older_row(drafter):
    """Stops: rows from before the reset that fall into the window of the new positions."""
    rows = features(3, seed=8)
    context = fill(drafter, features(25))
    context.reset(27)
    drafter.append(context, rows, 27)
    assert (logits(drafter, context) == logits(drafter, fill(drafter, rows, first_pos=27))).all()


def test_a_context_without_rows_still_drafts(drafter):
    """Stops: NaN from a softmax over nothing, at the start of a session."""
    context = drafter.open("s", 100)
    context.reset(60)
    assert len(drafter.draft(context, 5, 7).draft_ids) == 7


@pytest.mark.parametrize(
    ("rows", "first_pos"),
    [
        (np.zeros((2, H + 1), np.float32), 0),
        (np.zeros((0, H), np.float32), 0),
        (np.zeros(H, np.float32), 0),
        (np.zeros((2, H), np.float32), -1),
    ],
)
def test_features_of_a_wrong_shape_are_refused(drafter, rows, first_pos):
    """Stops: a peer's bad tensor reaching a product that broadcasts."""
    context = drafter.open("s", 100)
    with pytest.raises(EngineError, match="is needed"):
        drafter.append(context, rows, first_pos)
    assert context.end == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_features_that_are_not_finite_are_refused(drafter, value):
    """Stops: one bad row spoiling every draft until the window has passed it."""
    context = drafter.open("s", 100)
    rows = features(3)
    rows[1, 5] = value
    with pytest.raises(NotFinite):
        drafter.append(context, rows, 0)
    assert context.end == 0
