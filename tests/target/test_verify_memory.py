"""A verify writes into its caches in place, however long the context is."""

import mlx.core as mx
import pytest
from support.tiny import make_tiny_target

from common.wire.messages import Sampling
from target_svc.accept import NO_DRAFTS
from target_svc.build import Build, BuildPlan, build_and_submit
from target_svc.models.qwen4_exp import load
from target_svc.models.states.index_keys import PooledKeys
from target_svc.models.states.rows import GrowingRows
from target_svc.rollback import abandon, commit
from target_svc.verify import VerifyPlan, run_round

CONTEXT = 16_000
ROWS = 8
MIB = 1 << 20
BOUND = 16 * MIB  # the promise is 64; one layer's keys alone are 31


@pytest.fixture(scope="module")
def long_state(tmp_path_factory):
    """A model of four layers and a state that was given 16,000 rows instead of running them."""
    fields = {"head_dim": 256, "indexer_budget": 2048, "indexer_head_dim": 128}
    folder = tmp_path_factory.mktemp("long")
    model = load(make_tiny_target(folder, num_hidden_layers=4, **fields))
    state = model.new_state()
    for piece in state.pieces.values():
        if isinstance(piece, PooledKeys):
            piece.raw.append(mx.random.normal((CONTEXT, 128)))
            piece.add_pooled(mx.random.normal((CONTEXT // 4, 128)))
        elif isinstance(piece, GrowingRows):
            piece.append(mx.random.normal((2, CONTEXT, 256)))
        else:
            continue
        piece.roll_back(CONTEXT)
        mx.eval(piece.unread, piece.committed if isinstance(piece, GrowingRows) else [])
    state.base = CONTEXT
    _round(model, state, BuildPlan(), prebuilt=False)  # the table of rotations grows to this length
    return model, state


def _round(model, state, plan, *, prebuilt):
    ids = list(range(20, 20 + ROWS))
    if prebuilt:
        forward = Build(model, state, ROWS, None, plan).fill(ids).submit()
    else:
        forward = build_and_submit(model, state, ids, None, plan)
    mx.eval(forward.logits, *state.arrays())
    commit(state, ROWS // 2)


def _peak(model, state, plan, *, prebuilt):
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    _round(model, state, plan, prebuilt=prebuilt)
    return mx.get_peak_memory() - held


@pytest.mark.parametrize("prebuilt", [False, True])
@pytest.mark.parametrize("layers", [0, 1])
@pytest.mark.parametrize("is_deferred", [False, True])
def test_a_verify_at_16k_allocates_no_second_cache(long_state, layers, is_deferred, prebuilt):
    """One name too many for a buffer, and MLX copies it, every round."""
    model, state = long_state
    assert _peak(model, state, BuildPlan(layers, is_deferred), prebuilt=prebuilt) < BOUND


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_plain_round_at_16k_allocates_no_second_cache(long_state, overlaps):
    """A graph that is built while its own past runs holds the buffer that is written."""
    model, state = long_state
    plan, standing = VerifyPlan(overlaps=overlaps), None
    for _ in range(2):
        mx.clear_cache()
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        verdict = run_round(model, state, 9, NO_DRAFTS, plan, None, Sampling(), build=standing)
        standing = verdict.ahead
        assert mx.get_peak_memory() - held < BOUND
    assert (standing is not None) == overlaps
    abandon(state)


def test_the_bound_notices_a_cache_that_is_not_let_go(long_state, monkeypatch):
    """The test above must be able to fail."""
    model, state = long_state
    monkeypatch.setattr(state, "let_go", lambda: None)
    assert _peak(model, state, BuildPlan(), prebuilt=False) > 4 * BOUND
