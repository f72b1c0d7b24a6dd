"""Every family can be built in every way; a new one is a line in `MAKERS`."""

import mlx.core as mx
import numpy as np
import pytest
from support.target_cases import arrays_of, feed, fork
from support.tiny import make_tiny_target
from support.tiny_glm5_next import make_tiny_glm5_next
from support.tiny_llama import make_tiny_llama
from support.tiny_qwen3 import make_tiny_qwen3
from support.tiny_qwen3_5 import make_tiny_qwen3_5

from target_svc.build import Build, BuildPlan, build_and_submit
from target_svc.load import FAMILIES
from target_svc.models.family import run_rows
from target_svc.rollback import commit

MAKERS = {
    "qwen4_exp": make_tiny_target,
    "glm5_next": make_tiny_glm5_next,
    "qwen3": make_tiny_qwen3,
    "llama": make_tiny_llama,
    "qwen3_5": make_tiny_qwen3_5,
}
IDS = np.random.default_rng(3).integers(8, 300, 64).tolist()
BASE = 37
ARMS = [
    (BuildPlan(layers, deferred), prebuilt)
    for layers in (0, 2)
    for deferred in (False, True)
    for prebuilt in (False, True)
]


@pytest.fixture(scope="module", params=MAKERS)
def family(request, tmp_path_factory):
    """A model, and a state of it after 37 tokens."""
    folder = MAKERS[request.param](tmp_path_factory.mktemp(request.param))
    model = FAMILIES[request.param](folder)
    state = model.new_state()
    feed(model, state, IDS[:BASE])
    return model, state


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16])
def test_all_ways_to_build_give_the_same_bits(family, rows):
    """A host read, or a buffer written before its time, in a layer that only this family has."""
    model, committed = family
    ids, keep, seen = IDS[BASE : BASE + rows], rows // 2 + 1, []
    for plan, prebuilt in ARMS:
        state = fork(committed)
        if prebuilt:
            forward = Build(model, state, rows, None, plan).fill(ids).submit()
        else:
            forward = build_and_submit(model, state, ids, None, plan)
        results = {"logits": np.array(forward.logits)}
        commit(state, keep)
        results |= arrays_of(state)
        results["next"] = feed(model, state, [11, 12])
        seen.append(results)
    for arm, other in zip(ARMS[1:], seen[1:], strict=True):
        for name, value in seen[0].items():
            assert np.array_equal(value, other[name]), (arm, name)


def test_building_evaluates_nothing(family, monkeypatch):
    """On a GPU an evaluation waits for the round that runs, and nothing is built meanwhile."""
    model, committed = family
    state, evaluated = fork(committed), []
    monkeypatch.setattr(mx, "eval", lambda *arrays: evaluated.append(arrays))
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: evaluated.append(arrays))
    build = Build(model, state, 8, None, BuildPlan(2))
    assert not evaluated
    build.abandon()


def test_an_abandoned_build_leaves_nothing_behind(family, tmp_path):
    """Rows of an empty leaf in a piece of state, or an abandoned graph that is run later."""
    model, committed = family

    def n_operations(state):
        mx.eval(state.arrays())
        logits = model.logits(run_rows(model, [9, 10, 11], state))
        mx.export_to_dot(str(tmp_path / "graph.dot"), logits, *state.arrays())
        return (tmp_path / "graph.dot").read_text().count("shape=rectangle")

    state = fork(committed)
    before = arrays_of(state)
    for rows in (8, 3):
        Build(model, state, rows, None, BuildPlan(2)).abandon()
    after = arrays_of(state)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    Build(model, state, 5, None, BuildPlan()).abandon()
    assert n_operations(state) == n_operations(fork(committed))
