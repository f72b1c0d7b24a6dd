"""Counting rounds, looping rows and learning rates."""

import pytest

pytest.importorskip("torch", reason="torch (extra `train`) is not installed")

import numpy as np

from drafter_svc.train.optim import schedule
from drafter_svc.train.regenerate import loops
from drafter_svc.train.rounds import agreed, beside, lookup, replay


def test_a_round_moves_on_by_what_was_accepted_and_the_bonus() -> None:
    """Off by one here reports another acceptance length than serving has."""
    ids = [9, 8, 7, 1, 2, 3, 4, 5, 6, 7]
    drafts = np.array([[1, 2, 0], [0, 0, 0], [0, 0, 0], [4, 5, 6], [5, 6, 7]])
    rounds = replay(ids, 2, 4, lambda anchor: drafts[anchor - 2].tolist())
    assert rounds.lengths == [3, 4]
    assert beside(ids, rounds, 4, lambda anchor: [1]).lengths == [2, 1]


def test_copied_means_that_the_last_three_ids_were_there_before() -> None:
    """The split is only comparable if it is defined by the text, not by a drafter."""
    ids = [1, 2, 3, 4, 1, 2, 3, 5]
    rounds = replay([*ids, 9], 6, 2, lambda anchor: [])
    assert rounds.anchors == [6, 7]
    assert rounds.novel == [False, True]
    assert lookup(ids, 6, 2) == [4, 1]
    assert agreed([4, 1], [4, 2]) == 1


def test_rows_that_repeat_themselves_are_seen() -> None:
    """Loops beyond their share teach the drafter to copy and nothing else."""
    rows = np.stack([np.arange(300) % 5, np.arange(300)]).astype(np.uint16)
    assert loops(rows).tolist() == [True, False]


def test_the_rate_warms_up_holds_and_decays() -> None:
    """A run that ends undecayed is worse than a shorter one."""
    assert schedule(0.01, 0.02, 0.5) == pytest.approx(0.5)
    assert schedule(0.3, 0.02, 0.5) == 1.0
    assert schedule(0.75, 0.02, 0.5) == pytest.approx(0.5)
