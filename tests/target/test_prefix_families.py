"""Every family goes on from a kept prefix as if its prompt had been run from the start."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from support.family_makers import MAKERS
from support.scripted_drafts import GREEDY, plain_decode
from support.target_cases import CLOSE, arrays_of
from support.tiny_drafter import make_tiny_drafter

from target_svc.load import EngineOptions, load_engine
from target_svc.models.family import run_rows
from target_svc.models.state import itself
from target_svc.prefix_cache import PrefixCache
from target_svc.verify import VerifyPlan

CHUNK, BLOCK = 20, 8
RNG = np.random.default_rng(2)
PROMPT = RNG.integers(8, 300, 50).tolist()
MORE = RNG.integers(8, 300, 13).tolist()
MIB = 1 << 20


@pytest.fixture(scope="module", params=MAKERS)
def engine(request, tmp_path_factory):
    make, fields = MAKERS[request.param]
    place = tmp_path_factory.mktemp(request.param)
    target = make(place / "target", **fields)
    drafter = make_tiny_drafter(place / "drafter", target, 3)
    return load_engine(target, drafter, EngineOptions(prefill_chunk=CHUNK, prefix_cache_mb=64))


@pytest.fixture(autouse=True)
def empty(engine):
    """Every test begins with nothing kept."""
    engine.prefixes = PrefixCache(64 * MIB)


def run(engine, ids, owner="me", *, taps=True):
    """A session after its prompt; with an owner it takes from the cache and leaves to it."""
    session = engine.open(GREEDY, taps=taps, owner=owner)
    steps = list(session.prefill(ids))
    return session, steps


def numbers(session):
    return arrays_of(session._state.twin(itself))


def next_scores(engine, session):
    """What the token after the anchor is chosen by; the session stays as it is."""
    state = session._state.twin(itself)
    return np.array(engine.model.logits(run_rows(engine.model, [session.anchor_id], state)))


def assert_equal(some, others):
    assert some.keys() == others.keys()
    for name, array in some.items():
        np.testing.assert_array_equal(array, others[name], err_msg=name)


def test_a_prefix_of_whole_chunks_gives_the_same_bits(engine):
    """A piece left out of the prefix, or one taken later than the others."""
    run(engine, PROMPT)[0].close()
    ids = [*PROMPT[:45], *MORE]
    cold, cold_steps = run(engine, ids, None)
    warm, steps = run(engine, ids)
    assert (cold.n_cached, warm.n_cached) == (0, 40)
    assert [(step.first_pos, step.done) for step in steps] == [(40, 58)]
    assert warm.anchor_id == cold.anchor_id
    assert_equal(numbers(warm), numbers(cold))
    np.testing.assert_array_equal(next_scores(engine, warm), next_scores(engine, cold))
    (first, rows), (wanted_first, wanted) = warm.feature_rows(0), cold.feature_rows(0)
    assert first == wanted_first
    np.testing.assert_array_equal(np.array(rows), np.array(wanted))
    assert len(cold_steps) == 3


def test_the_same_prompt_again_runs_its_last_chunk(engine):
    once, _ = run(engine, PROMPT)
    again, steps = run(engine, PROMPT)
    assert again.n_cached == 40
    assert len(steps) == 1
    assert again.anchor_id == once.anchor_id
    assert_equal(numbers(again), numbers(once))


def test_turn_two_runs_only_what_is_new(engine):
    """A reply that leaves nothing, or leaves rows that were rejected."""
    session, _ = run(engine, PROMPT)
    ids, n_rejected = [session.anchor_id], 0
    while len(ids) < 25:
        verdict = session.verify([(ids[-1] + 3) % 300] * (BLOCK - 1), BLOCK)
        n_rejected += BLOCK - 1 - verdict.n_accepted
        ids.extend(verdict.ids)
    assert n_rejected
    session.prepare(1)
    session.close()
    turn = [*PROMPT, *ids, *MORE]
    cold, _ = run(engine, turn, None)
    warm, steps = run(engine, turn)
    assert warm.n_cached == len(PROMPT) + len(ids) - 1  # the last token was never forwarded
    assert steps[0].first_pos == warm.n_cached
    assert all(step.done % CHUNK == 0 for step in steps[:-1])
    assert warm.anchor_id == cold.anchor_id
    np.testing.assert_allclose(next_scores(engine, warm), next_scores(engine, cold), atol=CLOSE)
    (first, rows), (wanted_first, wanted) = warm.feature_rows(0), cold.feature_rows(0)
    assert first == wanted_first
    np.testing.assert_allclose(np.array(rows), np.array(wanted), atol=CLOSE * 10)


def test_rollback_after_a_hit_is_exact(engine):
    """Two wrong tails after a hit leave the same bits behind."""
    run(engine, PROMPT)[0].close()
    found = []
    for tail in (5, 9):
        session, _ = run(engine, [*PROMPT, *MORE[:9]])
        assert session.n_cached == len(PROMPT)
        verdict = session.verify([(session.anchor_id + tail) % 300] * (BLOCK - 1), BLOCK)
        assert verdict.n_accepted < BLOCK - 1
        session.verify((), 1)
        found.append((session.anchor_id, numbers(session)))
    assert found[0][0] == found[1][0]
    assert_equal(found[0][1], found[1][1])


def go_on(engine, session):
    for tail in (1, 2, 3):
        session.verify([(session.anchor_id + tail) % 300] * (BLOCK - 1), BLOCK)
    mx.eval(session._state.arrays())


def prefix_numbers(engine, ids):
    """All that the longest prefix of `ids` holds."""
    scope = next(iter(engine.prefixes._kept))[0]
    return arrays_of(engine.prefixes.find(scope, ids).state)


def test_nobody_who_goes_on_changes_a_prefix(engine):
    ids = [*PROMPT, *MORE]
    live, _ = run(engine, PROMPT)
    before = prefix_numbers(engine, ids)
    go_on(engine, live)
    assert_equal(before, prefix_numbers(engine, ids))
    warm, _ = run(engine, ids)
    go_on(engine, warm)
    assert warm.n_cached == len(PROMPT)
    assert_equal(before, prefix_numbers(engine, ids[: len(PROMPT) + 1]))


def test_one_shared_piece_would_be_seen(engine, monkeypatch):
    """The test above catches a twin that shares any single piece with its prefix."""
    ids = [*PROMPT, *MORE]
    run(engine, PROMPT)
    prefix = list(engine.prefixes._kept.values())[-1]
    before = arrays_of(prefix.context.state)
    for name in prefix.context.state.pieces:
        engine.prefixes = PrefixCache(64 * MIB)
        run(engine, PROMPT)
        kept = list(engine.prefixes._kept.values())[-1].context
        find = engine.prefixes.find

        def sharing(scope, ids, find=find, kept=kept, name=name):
            context = find(scope, ids)
            context.state.pieces[name] = kept.state.pieces[name]
            return context

        monkeypatch.setattr(engine.prefixes, "find", sharing)
        warm, _ = run(engine, ids)
        go_on(engine, warm)
        after = arrays_of(kept.state)
        assert any(
            before[key].shape != after[key].shape or (before[key] != after[key]).any()
            for key in before
        ), name


def test_chunks_that_overlap_leave_the_same_prefixes(engine):
    """A prefix taken while the next chunk was committed already."""
    own = engine.plan
    run(engine, PROMPT)
    wanted = [arrays_of(prefix.context.state) for prefix in engine.prefixes._kept.values()]
    engine.prefixes = PrefixCache(64 * MIB)
    engine.plan = VerifyPlan(overlaps=True)
    try:
        run(engine, PROMPT)
    finally:
        engine.plan = own
    found = [arrays_of(prefix.context.state) for prefix in engine.prefixes._kept.values()]
    assert len(found) == 3
    for some, others in zip(found, wanted, strict=True):
        assert_equal(some, others)


def test_without_taps_nothing_is_taken_of_a_session_with_them(engine):
    run(engine, PROMPT)
    assert run(engine, [*PROMPT, *MORE], taps=False)[0].n_cached == 0
    assert run(engine, [*PROMPT, *MORE], "another")[0].n_cached == 0
    assert run(engine, [*PROMPT, *MORE])[0].n_cached == len(PROMPT)


def test_a_rebuild_runs_from_the_start_and_keeps_it_anew(engine):
    """A prefix that spoiled the session would spoil every later one."""
    run(engine, PROMPT)[0].close()
    session, _ = run(engine, [*PROMPT, *MORE])
    assert engine.prefixes.counters()["prefix_entries"] > 3
    steps = list(session.rebuild())
    assert steps[0].first_pos == 0
    assert engine.prefixes.counters()["prefix_entries"] == 1
    assert run(engine, [*PROMPT, *MORE, session.anchor_id])[0].n_cached == 63


def test_a_session_that_failed_leaves_nothing(engine, monkeypatch):
    session, _ = run(engine, PROMPT)
    session.verify((), 1)
    n_kept = engine.prefixes.counters()["prefix_entries"]
    monkeypatch.setattr(session._host.model, "logits", lambda hidden: hidden * float("nan"))
    with pytest.raises(Exception, match="finite"):
        session.verify((), 1)
    session.close()
    assert engine.prefixes.counters()["prefix_entries"] == n_kept


def test_a_stop_inside_a_block_ends_the_state_there(engine):
    """A following turn stands behind the stop: a state that went on could not be used for it."""
    ids = plain_decode(engine, PROMPT, BLOCK)
    stop = next(at for at in range(2, BLOCK) if ids[at] not in ids[:at])
    sampling = replace(GREEDY, stop_ids=(ids[stop],), ignore_eos=True)
    session = engine.open(sampling, taps=True, owner="me")
    list(session.prefill(PROMPT))
    verdict = session.verify(ids[1:BLOCK], BLOCK)
    assert verdict.n_accepted == BLOCK - 1
    assert [session.base, *verdict.ids] == [len(PROMPT) + stop, *ids[1 : stop + 1]]
    assert verdict.features.shape[0] == stop
    session.close()
    turn = [*PROMPT, *ids[: stop + 1], *MORE]
    warm, cold = run(engine, turn)[0], run(engine, turn, None)[0]
    assert warm.n_cached == len(PROMPT) + stop
    np.testing.assert_allclose(next_scores(engine, warm), next_scores(engine, cold), atol=CLOSE)
