"""What a round's times teach the policy."""

from dataclasses import replace

import pytest

from common.coordinator.events import Scene
from common.coordinator.rounds import Round, RoundSequence
from common.policy.policy import Fixed
from common.wire.messages import Drafted, DraftFailed, RoundKey, Sampling, Verified

KEY = RoundKey("7.0", 0, 0, 3, 8, 1)
SOLO, COMPANY = Scene(is_solo=True), Scene(is_solo=False)


class Recording(Fixed):
    """Keeps what it is told."""

    def __init__(self):
        self.results = []

    def observe(self, result):
        self.results.append(result)


def verdict(rows, n_accepted, *, finish="", ms=20.0):
    ids = tuple(range(n_accepted + 1))
    key = KEY if rows > 1 else RoundKey("7.0", 0, 0, 3, 8, 0)
    return Verified(key, rows, n_accepted, ids, ("",) * len(ids), finish, "", 0, ms, 3.0)


def result_of(events, *, at_start=SOLO, at_end=SOLO, n_drafts=3):
    """Run a round through events of (time, event); returns what the policy was told."""
    policy = Recording()
    current = Round(KEY, n_drafts, 10, policy, 1.0, at_start)
    current.begin()
    for now, event in events:
        current.advance(event, now, at_end)
    (result,) = policy.results
    return result


def test_alone_the_coordinators_own_clock_counts():
    """The hops belong to what drafting costs."""
    events = [(1.010, Drafted(KEY, (0.9, 0.8, 0.7), 6.0)), (1.050, verdict(4, 2))]
    result = result_of(events)
    assert result.wall_ms == pytest.approx(50.0)
    assert result.draft_ms == pytest.approx(10.0)
    assert (result.rows, result.n_accepted, result.is_drafted, result.is_solo) == (4, 2, True, True)
    assert result.confidences == (0.9, 0.8, 0.7)


def test_the_targets_doubt_reaches_the_policy():
    """Whether the next draft waits depends on it."""
    events = [(1.050, replace(verdict(1, 0), certainty=0.25))]
    assert result_of(events, n_drafts=0).certainty == 0.25


@pytest.mark.parametrize("scenes", [(COMPANY, COMPANY), (SOLO, COMPANY), (COMPANY, SOLO)])
def test_in_company_the_workers_own_times_count(scenes):
    """The wait behind other sessions says nothing about drafting."""
    events = [(1.100, Drafted(KEY, (0.9, 0.8, 0.7), 6.0)), (1.500, verdict(4, 2))]
    result = result_of(events, at_start=scenes[0], at_end=scenes[1])
    assert result.wall_ms == pytest.approx(6.0 + 20.0 + 3.0)
    assert result.draft_ms == pytest.approx(6.0)
    assert not result.is_solo


def test_failed_draft_is_told_as_a_drafted_round_of_one_row():
    """Its wait is a loss that the gate must see."""
    events = [(1.040, DraftFailed(KEY, "no_context")), (1.060, verdict(1, 0))]
    result = result_of(events)
    assert (result.is_drafted, result.rows, result.draft_ms) == (True, 1, pytest.approx(40.0))


def test_last_round_is_told_as_such():
    """An accepted prefix that max_tokens cut is no rejection."""
    events = [(1.010, Drafted(KEY, (0.9, 0.8, 0.7), 6.0)), (1.050, verdict(4, 2, finish="length"))]
    assert result_of(events).is_final


@pytest.mark.parametrize(
    ("asked", "temperature", "seed"),
    [
        ({"acceptance": "residual", "temperature": 0.7}, 0.7, 11),
        ({"acceptance": "residual", "temperature": 0.0}, 0.0, 0),
        ({"acceptance": "exact", "temperature": 0.7}, 0.0, 0),
        ({"acceptance": "typical", "temperature": 0.7}, 0.0, 0),
        ({"acceptance": "cascade", "temperature": 0.7}, 0.0, 0),
    ],
)
def test_drafts_are_drawn_where_the_rule_weighs_what_they_were_drawn_from(asked, temperature, seed):
    """Best drafts under `residual` lose acceptance; drawn ones under `exact` lose it too."""
    rounds = RoundSequence(Sampling(seed=11, **asked))
    rounds.start("7.0", 0, 3, 8)
    (command,) = rounds.begin(Fixed(), 4, 10, 1.0, SOLO)
    draft = command.message
    assert (draft.n_drafts, draft.temperature, draft.seed) == (3, temperature, seed)
