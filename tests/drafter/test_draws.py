"""Drafts that are drawn, and the distributions they are said to be drawn from."""

from types import SimpleNamespace

import numpy as np
import pytest
from support.tiny_drafter import H, make_stand_in_target, make_tiny_drafter

from drafter_svc import device, host
from drafter_svc.drafter import Drafter
from drafter_svc.draws import Drawing
from drafter_svc.load import load

B = 8
TRIALS = 2000


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    target = make_stand_in_target(tmp_path_factory.mktemp("target"))
    drafter = make_tiny_drafter(tmp_path_factory.mktemp("drafter"), target, 3, is_second=True)
    return drafter, target


@pytest.fixture(scope="module", params=[host, device], ids=["host", "device"])
def drafter(request, folders):
    return Drafter(load(*folders, request.param))


def opened(drafter, n=20):
    context = drafter.open("s", 100)
    rows = np.random.default_rng(1).standard_normal((n, H)).astype(np.float32)
    drafter.append(context, rows, 0)
    return context


def by_slot(block):
    """Candidates and probabilities [n, K] of a block."""
    shape = len(block.draft_ids), -1
    return np.array(block.q_ids).reshape(shape), np.array(block.q_probs).reshape(shape)


def test_a_drawn_block_names_what_each_draft_was_drawn_from(drafter):
    """The acceptance rule divides by this probability."""
    block = drafter.draft(opened(drafter), 5, B - 1, Drawing(0.8, 7, 20))
    ids, probs = by_slot(block)
    assert probs.sum(axis=1) == pytest.approx(1)
    for slot, token in enumerate(block.draft_ids):
        assert probs[slot][ids[slot] == token] > 0
        assert len(set(ids[slot])) == len(ids[slot])


def test_the_best_drafts_name_nothing(drafter):
    """They were not drawn: a distribution beside them would be a lie."""
    block = drafter.draft(opened(drafter), 5, B - 1)
    assert block.q_ids == block.q_probs == ()


def test_draws_repeat_with_the_seed_and_the_position_alone(drafter):
    """A round that is asked for again, or begins elsewhere, draws the same numbers."""
    context = opened(drafter)
    first = drafter.draft(context, 5, B - 1, Drawing(1.5, 7, 20))
    assert drafter.draft(context, 5, B - 1, Drawing(1.5, 7, 20)).draft_ids == first.draft_ids
    assert drafter.draft(context, 5, 3, Drawing(1.5, 7, 20)).draft_ids == first.draft_ids[:3]
    assert drafter.draft(context, 5, 3, Drawing(1.5, 7, 20)).q_probs == first.q_probs[: 3 * 16]
    others = {drafter.draft(context, 5, B - 1, Drawing(1.5, s, 20)).draft_ids for s in range(9)}
    assert len(others) > 1


def test_first_drafts_follow_the_named_distribution(drafter):
    """Drawn from anything else, the output is no longer the target's."""
    context, counts = opened(drafter), {}
    for seed in range(TRIALS // 10):
        block = drafter.draft(context, 5, 1, Drawing(2.0, seed, 20))
        counts[block.draft_ids[0]] = counts.get(block.draft_ids[0], 0) + 1
    ids, probs = by_slot(block)
    expected = probs[0] * (TRIALS // 10)
    seen = np.array([counts.get(int(token), 0) for token in ids[0]])
    assert seen.sum() == TRIALS // 10
    assert (((seen - expected) ** 2) / expected).sum() < 60  # 15 degrees: odds 1e-7


def test_later_drafts_are_drawn_given_the_one_before(drafter):
    """q of a slot is a conditional one: another predecessor, other probabilities."""
    context, seen = opened(drafter), {}
    for seed in range(60):
        block = drafter.draft(context, 5, 2, Drawing(3.0, seed, 20))
        probs = tuple(by_slot(block)[1][1].round(12))
        assert seen.setdefault(block.draft_ids[0], probs) == probs
    assert len(seen) > 2
    assert len(set(seen.values())) > 1


def test_picks_follow_their_probabilities_and_never_leave_them():
    """Inverse of the cumulative sum, at its ends too."""
    scores = np.array([0.0, 1.0, -2.0, 1.0], np.float32)
    counts = np.zeros(4)
    for seed in range(TRIALS):
        index, probs = Drawing(0.7, seed, 3).pick(0, scores)
        counts[index] += 1
    expected = probs * TRIALS
    assert (((counts - expected) ** 2) / expected).sum() < 35  # 3 degrees: odds 1e-7
    certain = np.array([-1e9, 0.0, -1e9], np.float32)
    assert {Drawing(0.01, seed, 0).pick(4, certain)[0] for seed in range(50)} == {1}


def test_what_has_no_share_is_never_drawn(monkeypatch):
    """Shares that round to a sum under 1, and a number beyond it: the last candidate, however bad.

    A target refuses such a block and drops its drafter.
    """
    dice = SimpleNamespace(random=lambda: 1 - 2**-53)
    monkeypatch.setattr(np.random, "default_rng", lambda key: dice)
    for seed in range(200):
        scores = np.random.RandomState(seed).standard_normal(16).astype(np.float32)
        scores[-1] = -1e4
        index, probs = Drawing(0.7, seed, 3).pick(0, scores)
        assert probs[index] > 0


def test_a_block_names_no_more_candidates_than_a_message_holds(drafter, monkeypatch):
    """A wide selector's block that cannot be sent, every round anew."""
    monkeypatch.setattr("drafter_svc.drafter.MAX_ITEMS", 2 * 16 + 1)
    block = drafter.draft(opened(drafter), 5, B - 1, Drawing(0.8, 7, 20))
    assert len(block.draft_ids) == len(block.confidences) == 2
    assert len(block.q_ids) == len(block.q_probs) == 2 * 16
    assert len(drafter.draft(opened(drafter), 5, B - 1).draft_ids) == B - 1
