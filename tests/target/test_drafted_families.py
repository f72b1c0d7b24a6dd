"""Greedy output with drafts equals the target's own, for every family, through the engine."""

import numpy as np
import pytest
from support.family_makers import MAKERS
from support.scripted_drafts import drafted_decode, plain_decode, prefill
from support.tiny_drafter import make_tiny_drafter

from drafter_svc.drafter import load_drafter
from target_svc.load import EngineOptions, load_engine

PROMPT = np.random.default_rng(2).integers(8, 300, 45).tolist()
COUNT = 40
BLOCK = 8


@pytest.fixture(scope="module", params=MAKERS)
def pair(request, tmp_path_factory):
    """An engine of every family, its drafter with random weights, and the plain output."""
    make, fields = MAKERS[request.param]
    place = tmp_path_factory.mktemp(request.param)
    target = make(place / "target", **fields)
    drafter = make_tiny_drafter(place / "drafter", target, 3)
    options = EngineOptions(prefill_chunk=20, verify_width=BLOCK)  # one width: outright equality
    engine = load_engine(target, drafter, options)
    return engine, load_drafter(drafter, target), plain_decode(engine, PROMPT, COUNT)


def test_a_random_drafter_changes_nothing(pair):
    """A rejected draft in the output, or features that a drafter of this family cannot read."""
    engine, drafter, plain = pair
    session, steps = prefill(engine, PROMPT, taps=True)
    context = drafter.open("s", 400)
    for step in steps:
        drafter.append(context, np.array(step.features), step.first_pos)
    ids, rejected = [session.anchor_id], 0
    while len(ids) < COUNT:
        block = drafter.draft(context, session.anchor_id, BLOCK - 1)
        verdict = session.verify(block.draft_ids, BLOCK)
        drafter.append(context, np.array(verdict.features), verdict.first_pos)
        rejected += verdict.n_accepted < BLOCK - 1
        ids.extend(verdict.ids)
    assert ids[:COUNT] == plain
    assert rejected > 0


def test_right_and_half_right_drafts_change_nothing(pair):
    """A full accept that loses the bonus, or a half accept that keeps one row too many."""
    engine, _drafter, plain = pair
    longer = plain_decode(engine, PROMPT, COUNT + BLOCK)
    assert longer[:COUNT] == plain

    def propose(round_, ids, count):
        right = [*longer[len(ids) : len(ids) + count]]
        if round_ % 2:
            right[round_ % count] = (right[round_ % count] + 1) % 300
        return right

    ids, accepted = drafted_decode(engine, PROMPT, COUNT, propose, rows=BLOCK)
    assert ids == plain
    assert accepted[BLOCK - 1] > 0
    assert any(accepted[count] for count in range(BLOCK - 1))
