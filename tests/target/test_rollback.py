"""Every piece of state comes back to any number of kept rows, bit for bit."""

import mlx.core as mx
import numpy as np
import pytest
from support.target_cases import CLOSE, arrays_of, feed, feed_parts, fork

from common.errors import RollBackRefused
from target_svc.models.family import run_rows
from target_svc.rollback import commit

EOS = 7
#: Around edges of 4-token blocks and around 20 tokens, where the indexer starts to drop blocks.
BASES = (1, 3, 4, 15, 16, 17, 18, 19, 20, 21, 37, 40)
PIECES = (
    "recurrent",
    "0.window",
    "6.window",
    "3.keys",
    "3.values",
    "3.index",
    "7.keys",
    "7.values",
    "ngram.window",
    "ngram.history",
)


@pytest.fixture(scope="module")
def sequence(golden):
    """72 token ids with the end of a text at 20, 41, 42 and 60."""
    return golden["main.ids"]


@pytest.fixture(scope="module")
def prefixes(model, sequence):
    """A committed state at each base, grown one row at a time."""
    states, state = {}, model.new_state()
    for base in range(max(BASES) + 1):
        if base in BASES:
            states[base] = fork(state)
        feed(model, state, sequence[base : base + 1])
    return states


NEXT = [11, 12, 13]


def _after_verify(model, state, ids, keep, following=NEXT):
    """Verify `ids`, keep `keep`; returns the state's numbers and the following rows' logits."""
    state = fork(state)
    mx.eval(run_rows(model, [int(i) for i in ids], state))
    commit(state, keep)
    numbers = arrays_of(state)
    return numbers, feed(model, state, following)


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("base", BASES)
def test_two_wrong_tails_leave_the_same_bits(model, prefixes, sequence, base, rows):
    """A rejected row that leaks into state or scores, through any piece, at any block edge."""
    rng = np.random.default_rng(rows * 100 + base)
    true = sequence[base : base + rows]
    for keep in range(1, rows + 1):
        tails = rng.integers(8, 490, (2, rows - keep))
        tails[0, : min(2, rows - keep)] = EOS
        results = [
            _after_verify(model, prefixes[base], [*true[:keep], *tail], keep) for tail in tails
        ]
        (one, one_next), (two, two_next) = results
        assert one.keys() == two.keys()
        for name in one:
            assert np.array_equal(one[name], two[name]), (keep, name)
        assert np.array_equal(one_next, two_next), keep


@pytest.mark.parametrize("base", [3, 18, 40])
def test_kept_rows_equal_rows_that_were_never_drafted(model, prefixes, sequence, base):
    """A roll back that is the same for all tails and wrong for all of them."""
    for keep in range(1, 9):
        ids = [*sequence[base : base + keep], *[EOS] * (8 - keep)]
        _, got = _after_verify(model, prefixes[base], ids, keep)
        wanted = feed_parts(model, [np.array([*sequence[: base + keep], *NEXT])])[-3:]
        assert np.abs(got - wanted).max() < CLOSE


def test_abandoned_forward_changes_nothing(model, prefixes):
    """Keep 0 after a fault must leave the session able to go on."""
    state = fork(prefixes[20])
    before = arrays_of(state)
    mx.eval(run_rows(model, [9, 10, 11, 12], state))
    commit(state, 0)
    after = arrays_of(state)
    assert state.base == 20
    for name, value in before.items():
        if not name.endswith("pooled"):  # more pooled keys of committed blocks may exist now
            assert np.array_equal(value, after[name]), name


def test_twenty_rounds_in_a_row_equal_one_by_one(model, sequence):
    """A drift that a single round is too short to show."""
    rng, state = np.random.default_rng(5), model.new_state()
    got, at = [feed(model, state, sequence[:12])], 12
    for _ in range(20):
        keep = int(rng.integers(1, 6))
        keep = min(keep, len(sequence) - at)
        tail = rng.integers(8, 490, 8 - keep)
        tail[:1] = EOS
        logits = model.logits(run_rows(model, [*sequence[at : at + keep].tolist(), *tail], state))
        got.append(np.array(logits)[:keep])
        commit(state, keep)
        at += keep
    wanted = feed_parts(model, [sequence[i : i + 1] for i in range(at)])
    assert at > 60
    assert np.abs(np.concatenate(got) - wanted).max() < CLOSE


@pytest.mark.parametrize("name", PIECES)
def test_a_piece_that_is_not_rolled_back_is_noticed(model, prefixes, sequence, name):
    """The tests above must be able to fail for every kind of state."""
    base, keep, rows = 37, 2, 8
    ids = [*sequence[base : base + keep].tolist(), *range(100, 100 + rows - keep)]
    following = sequence[base + keep : base + keep + 16]  # long enough to choose another block
    _, wanted = _after_verify(model, prefixes[base], ids, keep, following)
    state = fork(prefixes[base])
    piece = state.pieces[name]
    real = piece.roll_back
    piece.roll_back = lambda _keep: real(rows)
    mx.eval(run_rows(model, ids, state))
    commit(state, keep)
    del piece.roll_back
    try:
        got = feed(model, state, following)
    except ValueError:  # a buffer that is too long no longer fits the mask
        return
    assert np.abs(got - wanted).max() > 1e-3


@pytest.mark.parametrize("keep", [-1, 5])
def test_keep_out_of_range_is_refused_and_changes_nothing(model, prefixes, keep):
    """An off-by-one in acceptance must not reach the state."""
    state = fork(prefixes[20])
    mx.eval(run_rows(model, [9, 10, 11, 12], state))
    with pytest.raises(RollBackRefused, match=f"keep {keep} of 4"):
        commit(state, keep)
    assert (state.base, state.captured) == (20, 4)
    commit(state, 2)
    assert state.base == 22


def test_a_piece_without_a_capture_is_refused_before_anything_changes(model, prefixes):
    """A half rolled back session after one layer lost its capture."""
    state = fork(prefixes[20])
    before = arrays_of(state)
    mx.eval(run_rows(model, [9, 10, 11], state))
    state.pieces["ngram.history"].roll_back(0)
    with pytest.raises(RollBackRefused, match="token history captured 0 rows of a forward of 3"):
        commit(state, 2)
    after = arrays_of(state)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_commit_without_a_forward_is_refused(model):
    """A round committed twice."""
    with pytest.raises(RollBackRefused, match="no forward"):
        commit(model.new_state(), 1)


def test_a_forward_of_several_chunks_keeps_all_or_none(model):
    """Prefill rows are never half accepted; asking for it must not return wrong state."""
    state = model.new_state()
    mx.eval(run_rows(model, list(range(8, 108)), state))
    with pytest.raises(RollBackRefused, match="several chunks"):
        commit(state, 50)
    commit(state, 100)
    assert state.base == 100
