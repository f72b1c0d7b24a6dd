"""Long sessions of every kind of drafter, round by round, against the published formulas.

The oracle is `support.plain_drafter`: float64, no cache, the whole context anew every round.
"""

from pathlib import Path

import numpy as np
import pytest
from support.drafter_cases import CASES, LENGTHS, TARGET_CONFIG, anchor_of, taps_of
from support.plain_drafter import PlainDrafter
from support.tiny_drafter import (
    H,
    V,
    fuse,
    make_stand_in_target,
    make_tiny_drafter,
    tiny_config,
    tiny_tensors,
)

from drafter_svc import device, host
from drafter_svc.drafter import Drafter
from drafter_svc.load import load

GOLDEN = Path(__file__).parents[1] / "golden" / "drafter.npz"
FULL, SLIDING = "full_attention", "sliding_attention"
MIXED = {"num_hidden_layers": 3, "layer_types": [SLIDING, FULL, SLIDING]}
KINDS = {
    "second": (True, {}),
    "second_mixed": (True, MIXED),
    "second_narrow": (True, {"sliding_window": 5}),  # narrower than a block
    "second_two": (True, {"sliding_window": 2}),  # one row of context
    "first_causal": (False, {}),
    "first_mixed": (False, MIXED),
    "first_narrow": (False, {"sliding_window": 5}),
    "first_all_causal": (False, {**MIXED, "is_causal": True}),
    "first_not_causal": (False, {**MIXED, "is_causal": False}),
}
FORMS = pytest.mark.parametrize("kernels", [host, device], ids=["host", "device"])


def rows_of(n, seed):
    return np.random.default_rng(seed).standard_normal((n, H)).astype(np.float32)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_stand_in_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory, target):
    """A drafter's folder and its oracle."""
    is_second, changes = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    make_tiny_drafter(folder, target, 11, is_second=is_second, **changes)
    config = tiny_config(TARGET_CONFIG, is_second=is_second, **changes)
    return folder, PlainDrafter(config, tiny_tensors(config, 11))


@pytest.mark.parametrize("name", [name for name in CASES if "yarn" not in name])
def test_the_oracle_is_z_labs(name):
    """Stops: tests that agree with a wrong oracle."""
    case = CASES[name]
    config = tiny_config(case.target_config, is_second=case.is_second, **case.changes)
    tensors = tiny_tensors(config, case.seed)
    oracle = PlainDrafter(config, tensors)
    with np.load(GOLDEN) as goldens:
        for length in LENGTHS:
            features = fuse(tensors, taps_of(config, length))
            positions = case.first_pos + np.arange(length)
            hidden, logits = oracle.logits(features, positions, anchor_of(length))
            np.testing.assert_allclose(logits, goldens[f"{name}/{length}/logits"], atol=1e-4)
            drafts = oracle.drafts(hidden, logits, anchor_of(length))
            assert drafts == goldens[f"{name}/{length}/drafts"].tolist()


def follow(drafter, oracle, sizes, *, first_pos=0, seed=0):
    """Append pieces, and after each compare the block with the oracle's; returns all drafts."""
    rows = rows_of(sum(sizes), seed)
    context = drafter.open("s", 4096)
    context.reset(first_pos)
    end, seen = 0, []
    for size in sizes:
        drafter.append(context, rows[end : end + size], first_pos + end)
        end += size
        anchor = (end * 31 + seed) % V
        model = drafter._model
        logits = np.array(model.logits(model.hidden(anchor, context)))
        hidden, expected = oracle.logits(rows[:end], first_pos + np.arange(end), anchor)
        np.testing.assert_allclose(logits, expected, atol=2e-4, err_msg=f"end {first_pos + end}")
        block = drafter.draft(context, anchor, drafter.n_drafts)
        assert list(block.draft_ids) == oracle.drafts(hidden, expected, anchor)
        seen.append(block.draft_ids)
    assert len(set(seen)) > len(seen) // 2  # the rounds differ, so that they can tell
    return seen


@FORMS
def test_rounds_of_all_sizes_over_many_windows(pair, target, kernels):
    """Stops: a fault that shows after the second wrap, after one row, or after a long append.

    One row at a time over two windows; ordinary rounds; appends of a window and one row around it,
    of several windows; and single rows again, over a wrapped store.
    """
    folder, oracle = pair
    W = oracle.config["sliding_window"]
    rng = np.random.default_rng(W)
    ordinary = rng.integers(1, 9, 12).tolist()
    sizes = [*[1] * 34, *ordinary, W - 1, 1, W, 1, 1, W + 1, 3, 5 * W + 2, *[1] * 18, 8]
    follow(Drafter(load(folder, target, kernels)), oracle, [size for size in sizes if size])


@FORMS
def test_a_late_start_drafts_as_if_nothing_had_been_before(pair, target, kernels):
    """Stops: a start after a prefix that is rotated or masked from position 0."""
    folder, oracle = pair
    sizes = [1, 2, 6, 40, 1, 1, 8]
    follow(Drafter(load(folder, target, kernels)), oracle, sizes, first_pos=700, seed=3)


@FORMS
def test_a_first_append_of_many_windows(pair, target, kernels):
    """Stops: a long prompt whose kept rows are rotated by where they lie in the append."""
    folder, oracle = pair
    follow(Drafter(load(folder, target, kernels)), oracle, [333, 1, 7], seed=5)


@FORMS
def test_the_last_window_of_rows_is_a_whole_context(target, tmp_path, kernels):
    """Stops: a drafter that restarts, is fed the last W rows, and drafts worse than before."""
    folder = make_tiny_drafter(tmp_path / "d", target, 11)
    drafter = Drafter(load(folder, target, kernels))
    W, rows = drafter.card.window, rows_of(150, 7)
    old, new = drafter.open("old", 4096), drafter.open("new", 4096)
    for start in range(0, 100, 4):
        drafter.append(old, rows[start : start + 4], start)
    new.reset(100 - W)
    drafter.append(new, rows[100 - W : 100], 100 - W)
    for start in range(100, 150, 5):
        one, other = (drafter.draft(each, start % V, 7) for each in (old, new))
        assert one.draft_ids == other.draft_ids
        np.testing.assert_allclose(one.confidences, other.confidences, atol=1e-5)
        for each in (old, new):
            drafter.append(each, rows[start : start + 5], start)


@FORMS
def test_no_session_ever_sees_a_row_of_another(pair, target, kernels):
    """Stops: stores that are shared, reused or read beyond their own rows. Bit by bit.

    The others' rows are huge, they grow, wrap, are reset and end between our rounds.
    """
    folder, _ = pair
    drafter = Drafter(load(folder, target, kernels))
    rows, loud = rows_of(300, 1), rows_of(600, 2) * 1e3
    alone, among = drafter.open("alone", 1000), drafter.open("among", 1000)
    others = [drafter.open(f"o{number}", 1000) for number in range(3)]
    rng, blocks = np.random.default_rng(4), []
    while alone.end < 280:
        size = int(rng.integers(1, 20))
        for each in (alone, among):
            drafter.append(each, rows[each.end : each.end + size], each.end)
        alike = drafter.draft(alone, alone.end % V, 7)
        for other in others:
            n_more = int(rng.integers(1, 60))
            if other.end + n_more > 600:
                others[others.index(other)] = other = drafter.open(other.session_id, 1000)
            drafter.append(other, loud[other.end : other.end + n_more], other.end)
            drafter.draft(other, 3, 7)
        block = drafter.draft(among, among.end % V, 7)
        assert (block.draft_ids, block.confidences) == (alike.draft_ids, alike.confidences)
        blocks.append(block)
    assert len({block.confidences for block in blocks}) == len(blocks) > 20
