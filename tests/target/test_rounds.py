"""Rounds at the target: graphs that stand ready, and states that are made again."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from support.scripted_drafts import GREEDY, drafted_decode, plain_decode, prefill
from support.target_actor import Actor

from common.errors import EngineError, NotFinite, RollBackRefused
from common.wire.messages import Failed
from target_svc.load import EngineOptions, load_engine
from target_svc.models.states.rows import RowWindow

COUNT = 40
WIDEST_ROUND = 4  # of those with faults; the prompt's last chunk has 5 rows
PROMPT = np.random.default_rng(2).integers(8, 490, 45).tolist()


@pytest.fixture(scope="module")
def engine(folders, drafter):
    """Prompts run in chunks of 20 rows; graphs are built ahead."""
    return load_engine(folders["main"], drafter, EngineOptions(prefill_chunk=20, prebuilds=True))


@pytest.fixture(scope="module")
def plain(engine):
    """The reference output."""
    return plain_decode(engine, PROMPT, COUNT + 16)


def drafts_of(plain, ids, count, wrong_from):
    """The target's own continuation of `ids`, wrong from one position on."""
    drafts = plain[len(ids) : len(ids) + count]
    return [*drafts[:wrong_from], *[(token + 1) % 512 for token in drafts[wrong_from:]]]


# --------------------------------------------------------------------------- built ahead


def test_a_graph_built_ahead_changes_no_token(engine, plain, monkeypatch):
    """A build that stands on the state before a commit, or one that a miss leaves standing."""
    real, widths = engine.open, [8, 8, 3, 1, 1, 8, 5, 16]

    def open_prepared(sampling, *, taps):
        session = real(sampling, taps=taps)
        verify, seen = session.verify, [1]

        def prepared(drafts, rows):
            session.prepare(seen[-1])
            seen.append(rows)
            return verify(drafts, rows)

        session.verify = prepared
        return session

    monkeypatch.setattr(engine, "open", open_prepared)
    assert plain_decode(engine, PROMPT, COUNT) == plain[:COUNT]
    turns = iter(widths * 9)
    propose = lambda turn, ids, count: drafts_of(plain, ids, next(turns) - 1, turn % 5)  # noqa: E731
    ids, accepted = drafted_decode(engine, PROMPT, COUNT, propose, rows=16)
    assert ids == plain[:COUNT]
    assert len(accepted) > 3


@pytest.mark.parametrize(
    ("prepared", "rows", "is_prebuilt"),
    [(4, 4, True), (4, 3, False), (3, 4, False), (None, 1, True)],
)
def test_a_graph_serves_its_own_width(engine, prepared, rows, is_prebuilt):
    """A verdict on rows that were never filled, or a graph that is never used."""
    session, _ = prefill(engine, PROMPT, taps=True)
    session.prepare(prepared)
    verdict = session.verify([9] * (rows - 1), rows)
    assert verdict.is_prebuilt == is_prebuilt
    assert verdict.build.endswith(" prebuilt") == is_prebuilt
    assert verdict.first_ms <= verdict.build_ms


def test_a_wider_graph_serves_where_it_costs_no_more(engine, plain, monkeypatch):
    """Seven rows that cost what eight cost need no graph of their own."""
    monkeypatch.setattr(engine, "_ladder", {7: 2.0, 8: 1.9, 9: 3.0})
    assert (engine.fits(8, 7), engine.fits(9, 8), engine.fits(7, 8)) == (True, False, False)
    session, _ = prefill(engine, PROMPT, taps=True)
    session.prepare(8)
    verdict = session.verify(plain[1:7], 7)
    assert verdict.is_prebuilt
    assert (verdict.rows_run, verdict.ids) == (7, tuple(plain[1:8]))
    assert session.verify((), 1).ids == (plain[8],)


def test_only_a_session_that_may_verify_prepares(engine):
    """A graph on a state whose prompt is still running would be in the way of the next chunk."""
    session = engine.open(GREEDY, taps=False)
    session.prepare()
    assert not session.can_prepare()
    list(session.prefill(PROMPT))
    assert session.can_prepare()
    session.prepare()
    assert not session.can_prepare()
    session.close()
    assert not session.can_prepare()


def test_a_width_is_guessed_once_two_rounds_agree(engine):
    """Graphs built in vain, or a round whose rows are known that waits without one."""
    session, _ = prefill(engine, PROMPT)
    session.verify([9] * 3, 4)
    assert not session.can_prepare()
    assert session.can_prepare(8)
    session.verify([9] * 3, 4)
    assert session.can_prepare()
    session.prepare()
    assert session.verify([9] * 3, 4).is_prebuilt


def test_the_service_builds_while_it_waits(engine, plain):
    """A switch that changes nothing."""
    actor = Actor(engine)
    actor.open(PROMPT)
    verdicts = [actor.round(()) for _ in range(4)]
    assert [verdict.build.endswith("prebuilt") for verdict in verdicts] == [True] * 4
    verdicts = [actor.round(drafts_of(plain, actor.ids, 3, 3)) for _ in range(3)]
    assert [verdict.build.endswith("prebuilt") for verdict in verdicts] == [False, False, True]
    assert actor.ids == plain[: len(actor.ids)]
    assert actor.service.heartbeat()[2]["prebuilt"] == 5


# --------------------------------------------------------------------------- built meanwhile


@pytest.fixture
def overlapping(engine, monkeypatch):
    """The same engine, whose plain rounds build the next graph while they run."""
    monkeypatch.setattr(engine, "plan", replace(engine.plan, overlaps=True))
    return engine


def test_a_graph_built_while_a_round_runs_changes_no_token(overlapping, plain):
    """A row committed that was not run yet, or a plain round's graph filled for a drafted one."""
    assert plain_decode(overlapping, PROMPT, COUNT) == plain[:COUNT]
    actor = Actor(overlapping)
    actor.open(PROMPT)
    widths = (1, 1, 1, 4, 4, 1, 1, 4)
    verdicts = [actor.round(drafts_of(plain, actor.ids, rows - 1, 1)) for rows in widths]
    prebuilt = [verdict.build.endswith("prebuilt") for verdict in verdicts]
    assert prebuilt == [True, True, True, False, False, False, True, False]
    assert actor.ids == plain[: len(actor.ids)]
    assert len(actor.features()) == len(PROMPT) + len(actor.ids) - 1


def test_chunks_that_overlap_give_the_same_steps(overlapping, plain):
    """A chunk's features handed out under the next one's position, or a last step that is lost."""
    _, steps = prefill(overlapping, PROMPT, taps=True)
    assert [(step.done, step.first_pos, len(step.features)) for step in steps] == [
        (20, 0, 20),
        (40, 20, 20),
        (45, 40, 5),
    ]
    assert [step.anchor_id for step in steps] == [None, None, plain[0]]


def test_scores_that_are_not_finite_after_a_commit_ask_for_a_rebuild(
    overlapping, plain, monkeypatch
):
    """A state one token ahead of the ids, and a next round that runs on it."""
    session, _ = prefill(overlapping, PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr(overlapping.model, "logits", lambda hidden: hidden * mx.nan)
        with pytest.raises(NotFinite):
            session.verify((), 1)
    with pytest.raises(EngineError, match="state holds 46 tokens of 45; rebuild"):
        session.verify((), 1)
    list(session.rebuild())
    assert session.verify((), 1).ids == (plain[1],)


# --------------------------------------------------------------------------- made again


class Faults:
    """Refuses the n-th checks of convolution windows in rounds, counted from where it is made."""

    def __init__(self, monkeypatch, turns):
        self.n_checks = self.n_refused = 0
        real = RowWindow.check

        def check(piece, rows, keep):
            if rows <= WIDEST_ROUND:
                self.n_checks += 1
                if self.n_checks in turns:
                    self.n_refused += 1
                    raise RollBackRefused("planted: the window holds 0 rows; it needs 3")
            real(piece, rows, keep)

        monkeypatch.setattr(RowWindow, "check", check)


def decode(engine, plain, rounds=8):
    """Rounds of four rows, of which one to four are kept."""
    actor = Actor(engine)
    actor.open(PROMPT)
    for turn in range(rounds):
        if isinstance(actor.round(drafts_of(plain, actor.ids, 3, turn % 4)), Failed):
            break
    return actor


@pytest.mark.parametrize("turns", [{1}, {9, 30}, {1, 2}])
def test_a_round_that_cannot_be_rolled_back_costs_time_and_nothing_else(
    engine, plain, monkeypatch, turns
):
    """A request that ends, another text, or a drafter that is fed a row twice or not at all."""
    undisturbed = decode(engine, plain)
    with monkeypatch.context() as patch:
        faults = Faults(patch, turns)
        disturbed = decode(engine, plain, rounds=10)
    assert faults.n_refused == len(turns)
    assert disturbed.service.heartbeat()[2]["rebuilds"] == len(turns)
    assert disturbed.ids == plain[: len(disturbed.ids)]
    count = min(len(disturbed.features()), len(undisturbed.features()))
    assert count > len(PROMPT) + 10
    assert np.abs(disturbed.features()[:count] - undisturbed.features()[:count]).max() < 2e-5


def test_a_third_refusal_in_a_row_ends_the_request(engine, plain, monkeypatch):
    """A fault that is not the state's, and a request that is prefilled for ever."""
    Faults(monkeypatch, {1, 2, 3})
    actor = decode(engine, plain, rounds=1)
    assert actor.of(Failed)[0].code == "roll_back_refused"
    assert actor.service.heartbeat()[:2] == ("ready", 0)


def test_a_refused_round_leaves_the_session_as_it_was(engine, plain, monkeypatch):
    """A roll back that is refused half way."""
    session, _ = prefill(engine, PROMPT, taps=True)
    with monkeypatch.context() as patch:
        Faults(patch, {1})
        with pytest.raises(RollBackRefused, match="planted"):
            session.verify(plain[1:4], 4)
    assert session.base == len(PROMPT)
    assert session.verify(plain[1:4], 4).ids == tuple(plain[1:5])


def test_a_repeated_verify_during_a_rebuild_does_not_run_the_round_twice(
    engine, plain, monkeypatch
):
    """The coordinator asks again after a second, and a rebuild may take longer."""
    actor = Actor(engine)
    actor.open(PROMPT)
    Faults(monkeypatch, {1})
    service, work = actor.service, actor.work
    actor.work = lambda: (service.work(0.0), _repeat(actor), work())
    verdict = actor.round(plain[1:4])
    assert verdict.rows_run == 1
    assert actor.service.heartbeat()[2]["stale_verify"] == 1
    assert actor.ids == plain[:2]


def _repeat(actor):
    order = actor.last_order
    actor.service.on_message(actor.coordinator, order, 0.0)


def test_a_rebuild_needs_an_anchor(engine):
    """A session whose prompt has not run has nothing to be made again from."""
    with pytest.raises(EngineError, match="no anchor"):
        next(engine.open(GREEDY, taps=False).rebuild())


def test_a_block_wider_than_any_verify_is_cut(engine, plain, monkeypatch):
    """Advice that ends a request."""
    monkeypatch.setattr(engine, "max_rows", 3)
    actor = Actor(engine)
    actor.open(PROMPT)
    verdict = actor.round(plain[1:9])
    assert (verdict.rows_run, verdict.ids) == (3, tuple(plain[1:4]))


@pytest.mark.parametrize("kept", range(1, 5))
def test_a_text_that_ends_inside_a_block_ends_the_state_there(engine, plain, kept):
    """Four drafts are right, a stop string ends within them: the state goes on as if just kept."""
    session, _ = prefill(engine, PROMPT)
    base = session.base
    verdict = session.verify(plain[1:5], 5, ends=lambda ids: ids[:kept])
    assert verdict.ids == tuple(plain[1 : 1 + kept])
    assert session.base == base + kept
    assert session.anchor_id == plain[kept]
    following = [token for _ in range(3) for token in session.verify((), 1).ids]
    assert following == plain[1 + kept : 4 + kept]
