"""Workers: places, clocks, draft times, quarantine."""

from dataclasses import replace

import pytest
from support.scripted import CARD

from common.coordinator.registry import Registry
from common.errors import ModelMismatch
from common.wire.messages import Hello, Ready
from common.wire.version import MAJOR, MINOR


def registry():
    return Registry(silence_s=2.0, budget_s=10.0, draft_deadline_s=0.05)


def enter(entries, name, *, capacity=2, ready=True, card=CARD, ladder_ms=()):
    role = name.split(".")[0]
    hello = Hello(role, name, MAJOR, MINOR, "test", 1, card)
    worker = entries.register(f"peer-{name}", hello, 0.0)
    if ready:
        entries.set_ready(worker, Ready(capacity, ladder_ms))
    return worker


def test_least_loaded_worker_is_picked():
    """Load is the share of places taken, not the number of sessions."""
    entries = registry()
    small, large = enter(entries, "target.1", capacity=2), enter(entries, "target.2", capacity=8)
    small.sessions |= {"a"}
    large.sessions |= {"b", "c"}
    assert entries.pick("target", 0.0) is large


def test_worker_is_never_given_more_than_it_can_hold():
    """Credits: capacity is a promise of the worker's, and its limit."""
    entries = registry()
    worker = enter(entries, "target.1", capacity=1)
    worker.sessions.add("a")
    assert entries.pick("target", 0.0) is None


def test_worker_that_is_not_ready_or_leaves_is_not_picked():
    """Loading and draining workers take nothing."""
    entries = registry()
    enter(entries, "target.1", ready=False)
    enter(entries, "target.2").is_draining = True
    assert entries.pick("target", 0.0) is None
    assert not entries.may_serve(0.0)


def test_silent_and_stuck_workers_are_not_picked():
    """Both clocks count."""
    entries = registry()
    silent, stuck = enter(entries, "target.1"), enter(entries, "target.2")
    stuck.liveness.heartbeat(3.0, progress_age_s=11.0)
    assert entries.verdict(silent, 3.0) == "silent"
    assert entries.verdict(stuck, 3.0) == "stuck"
    assert entries.pick("target", 3.0) is None


def test_loading_worker_may_be_busy_for_long():
    """Loading has the launcher's limit, not a session's."""
    entries = registry()
    worker = enter(entries, "target.1", ready=False)
    worker.liveness.heartbeat(60.0, progress_age_s=60.0)
    assert entries.verdict(worker, 60.0) == "alive"


def test_deadline_lies_past_the_moment_a_verdict_changes():
    """A timer that fires too early by a rounding error spins."""
    entries = registry()
    worker = enter(entries, "target.1")
    due = entries.next_deadline()
    assert entries.verdict(worker, due) == "silent"


def test_draft_deadline_is_three_times_p95_and_at_least_the_configured():
    """A slow drafter is given its time, a fast one not too little."""
    entries = registry()
    drafter = enter(entries, "drafter.1")
    assert entries.draft_deadline_s(drafter) == pytest.approx(0.05)
    for ms in [10.0] * 30 + [40.0] * 10:
        entries.draft_took(drafter, ms, is_in_time=True)
    assert entries.draft_deadline_s(drafter) == pytest.approx(0.12)


def test_third_strike_in_a_row_is_a_quarantine_that_grows():
    """A drafter that never answers must cost less and less."""
    entries = registry()
    drafter = enter(entries, "drafter.1")
    for _ in range(3):
        entries.strike(drafter, "late", 0.0)
    assert drafter.is_quarantined(0.9)
    assert not drafter.is_quarantined(1.1)
    for _ in range(3):
        entries.strike(drafter, "late", 2.0)
    assert drafter.is_quarantined(3.9)


def test_good_draft_clears_strikes():
    """Only strikes in a row count."""
    entries = registry()
    drafter = enter(entries, "drafter.1")
    for _ in range(5):
        entries.strike(drafter, "late", 0.0)
        entries.strike(drafter, "late", 0.0)
        entries.draft_took(drafter, 5.0, is_in_time=True)
    assert not drafter.is_quarantined(0.0)


def test_measured_ladder_reaches_the_policy():
    """The published shape is only a prior."""
    entries = registry()
    worker = enter(entries, "target.1", ladder_ms=(5.0, 6.0))
    assert worker.costs.ladder.ms(2) == pytest.approx(6.0)


def test_worker_of_another_model_changes_nothing():
    """A refused registration must leave the registry as it was."""
    entries = registry()
    enter(entries, "target.1")
    with pytest.raises(ModelMismatch, match=r"target\.1"):
        enter(entries, "drafter.1", card=replace(CARD, fc_hash="other"))
    assert [worker.name for worker in entries] == ["target.1"]


def test_draft_deadline_is_bounded_whatever_a_drafter_says():
    """A drafter that was stopped, or lies about its time, must not hold a round for minutes."""
    entries = registry()
    drafter = enter(entries, "drafter.1")
    entries.draft_took(drafter, 1e6, is_in_time=False)
    assert entries.draft_deadline_s(drafter) <= 0.8


def test_the_drafters_prior_reaches_every_target():
    """The refitted prior stays in the drafter's file, and the first rounds go by the published."""
    entries = registry()
    target = enter(entries, "target.1")
    before = target.costs.calibration.probabilities([0.9])[0]
    drafter = enter(entries, "drafter.1", ready=False)
    notes = {"prior_intercept": -3.0, "prior_slope": 1.0}
    entries.set_ready(drafter, Ready(2, (), notes=notes))
    assert target.costs.calibration.probabilities([0.9])[0] < before
    later = enter(entries, "target.2")
    assert later.costs.calibration.prior == target.costs.calibration.prior
