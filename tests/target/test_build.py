"""However a forward is built, its bits are the same, and no empty leaf is ever run."""

import mlx.core as mx
import numpy as np
import pytest
from support.target_cases import arrays_of, feed, fork

from common.errors import EngineError, RollBackRefused
from target_svc.build import Build, BuildPlan, FilledLeaves, Leaves, build_and_submit
from target_svc.models.family import run_rows
from target_svc.rollback import abandon, commit
from target_svc.taps import TapPlan, Taps

PLANS = [BuildPlan(layers, deferred) for layers in (0, 3) for deferred in (False, True)]
ARMS = [(plan, prebuilt) for plan in PLANS for prebuilt in (False, True)]
IDS = np.random.default_rng(9).integers(8, 490, 64).tolist()
BASE = 21  # the indexer has begun to drop blocks


@pytest.fixture(scope="module")
def taps(model):
    """Three tapped layers."""
    fc = mx.random.normal((32, 3 * model.facts.hidden), key=mx.random.key(1)) / 14
    plan = TapPlan((1, 3, 6), "stream_mean", 8, 16, 1e-6)
    return Taps(plan, model, fc, mx.ones((32,)))


@pytest.fixture(scope="module")
def committed(model):
    """A state after 21 tokens."""
    state = model.new_state()
    feed(model, state, IDS[:BASE])
    return state


def run(model, state, ids, taps, plan, *, prebuilt):
    """Forward `ids`, built in one of the ways."""
    if prebuilt:
        return Build(model, state, len(ids), taps, plan).fill(ids).submit()
    return build_and_submit(model, state, ids, taps, plan)


@pytest.mark.parametrize("rows", range(1, 17))
def test_all_ways_to_build_give_the_same_bits(model, committed, taps, rows):
    """A layer that runs on an empty leaf, or a hand-over that cuts the graph at the wrong place."""
    ids, keep, seen = IDS[BASE : BASE + rows], rows // 2 + 1, []
    for plan, prebuilt in ARMS:
        state = fork(committed)
        forward = run(model, state, ids, taps, plan, prebuilt=prebuilt)
        results = {"logits": np.array(forward.logits), "features": np.array(forward.features)}
        commit(state, keep)
        results |= arrays_of(state)
        results["next"] = feed(model, state, [11, 12])
        seen.append(results)
    for plan_and_way, other in zip(ARMS[1:], seen[1:], strict=True):
        for name, value in seen[0].items():
            assert np.array_equal(value, other[name]), (plan_and_way, name)


@pytest.mark.parametrize(
    ("plan", "prebuilt"), ARMS, ids=lambda value: getattr(value, "name", value)
)
def test_nothing_is_submitted_before_the_leaves_are_filled(
    model, committed, taps, monkeypatch, plan, prebuilt
):
    """An empty leaf reads as zeros, so a submission past it is wrong without an error."""
    state, order = fork(committed), []
    fill, blank, submit = model.fill, model.blank, mx.async_eval
    monkeypatch.setattr(model, "fill", lambda *args: (order.append("fill"), fill(*args)))
    monkeypatch.setattr(mx, "async_eval", lambda *args: (order.append("run"), submit(*args)))
    monkeypatch.setattr(mx, "eval", lambda *_: order.append("run"))

    def unseen_blank(rows):
        inputs = blank(rows)
        order.clear()  # leaves are made by evaluating zeros
        return inputs

    monkeypatch.setattr(model, "blank", unseen_blank)
    run(model, state, IDS[BASE : BASE + 5], taps, plan, prebuilt=prebuilt)
    n_parts = 1 + 8 // plan.pipeline_layers if plan.pipeline_layers else 1
    assert order == ["fill", *["run"] * n_parts]


def test_what_is_not_filled_has_no_way_to_run():
    """A method that submits, added to a type that may be empty."""
    public = lambda kind: {name for name in vars(kind) if not name.startswith("_")}  # noqa: E731
    assert public(Build) == {"fill", "abandon"}
    assert public(Leaves) == {"fill"}
    assert public(FilledLeaves) == {"submit", "finish"}


def test_an_abandoned_build_leaves_nothing_behind(model, committed, taps):
    """A capture that is still claimed, or rows of an empty leaf in a buffer or a pooled key."""
    state = fork(committed)
    before = arrays_of(state)
    for rows in (8, 3, 300):  # 300 rows need larger buffers
        Build(model, state, rows, taps, BuildPlan(2)).abandon()
    assert (state.base, state.captured) == (BASE, 0)
    with pytest.raises(RollBackRefused, match="no forward"):
        commit(state, 1)
    after = arrays_of(state)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    wanted = feed(model, fork(committed), IDS[BASE : BASE + 9])
    assert np.array_equal(feed(model, state, IDS[BASE : BASE + 9]), wanted)


def test_an_abandoned_build_is_not_run_with_the_next_forward(model, committed, tmp_path):
    """A view of old rows that hangs on an abandoned graph: right, and a whole forward slower."""

    def n_operations(state):
        mx.eval(state.arrays())
        logits = model.logits(run_rows(model, [9, 10, 11], state))
        mx.export_to_dot(str(tmp_path / "graph.dot"), logits, *state.arrays())
        return (tmp_path / "graph.dot").read_text().count("shape=rectangle")

    state = fork(committed)
    Build(model, state, 8, None, BuildPlan()).abandon()
    assert n_operations(state) == n_operations(fork(committed))


def test_a_forward_that_ran_can_be_abandoned_too(model, committed):
    """A round that failed after its buffers were written in place."""
    state = fork(committed)
    forward = build_and_submit(model, state, [9] * 8, None, BuildPlan(1))
    mx.eval(forward.logits)
    abandon(state)
    wanted = feed(model, fork(committed), IDS[BASE : BASE + 9])
    assert np.array_equal(feed(model, state, IDS[BASE : BASE + 9]), wanted)


def test_leaves_take_as_many_ids_as_they_have_rows(model, committed):
    """NumPy would broadcast one id into every row without a word."""
    build = Build(model, fork(committed), 4, None, BuildPlan())
    with pytest.raises(EngineError, match="1 ids for leaves of 4 rows"):
        build.fill([5])


def test_a_build_of_an_earlier_position_cannot_be_filled(model, committed):
    """A graph that reads keys of another length than the state holds now."""
    state = fork(committed)
    build = Build(model, state, 2, None, BuildPlan())
    abandon(state)
    feed(model, state, [11])
    with pytest.raises(EngineError, match="leaves are for position 21, the state is at 22"):
        build.fill([5, 6])


def test_plan_has_a_name_for_people():
    """`ps` and replies show which of the four ways runs."""
    assert [plan.name for plan in PLANS] == [
        "whole eager",
        "whole deferred",
        "pipelined/3 eager",
        "pipelined/3 deferred",
    ]
