"""What a drafter says its drafts were drawn from: taken if a draw can have given it."""

import numpy as np
import pytest

from common.errors import BadRequest
from common.wire.messages import Block, RoundKey
from target_svc.frames import sources_of

KEY = RoundKey("s", 0, 0, 3, 8, 1)


def block(q_ids=(4, 5, 6, 7), q_probs=(0.25, 0.75, 0.5, 0.5), ids=(5, 7)):
    return Block(KEY, ids, (0.5,) * len(ids), q_ids, q_probs)


def test_each_draft_gets_its_own_candidates():
    """Flat on the wire, one distribution per draft here."""
    first, second = sources_of(block())
    assert first.prob(5) == 0.75
    assert second.over(np.array([6, 7, 9])).tolist() == [0.5, 0.5, 0.0]


def test_drafts_that_were_not_drawn_have_no_source():
    """They are judged as certain ones."""
    assert sources_of(block(q_ids=(), q_probs=())) == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": (8, 7)},
        {"q_ids": (5, 5, 6, 7)},
        {"q_probs": (1.0, 0.0, 0.5, 0.5)},
        {"q_probs": (0.25, 0.5, 0.5, 0.5)},
    ],
    ids=["not a candidate", "named twice", "impossible", "sum below 1"],
)
def test_what_no_draw_can_have_given_is_refused(changes):
    """The rule would divide by it and keep what it must not."""
    with pytest.raises(BadRequest, match="slot 0 was not drawn"):
        sources_of(block(**changes))
