"""What a drafter does with the features it is sent, beside a real target and coordinator.

Everything is real but the network, which is the in-process mesh. The target is tiny and random, so
hardly a draft is accepted; what is compared are the blocks, draft by draft.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from support.real_workers import RealDrafter, RealTarget
from support.tiny import make_tiny_target
from support.tiny_drafter import make_tiny_drafter
from support.world import World

from common.net.inproc import Faults
from common.wire.messages import Block, Done, Features, Link, LinkLost, Resync
from common.wire.tensors import from_numpy
from drafter_svc.drafter import load_drafter
from target_svc.load import EngineOptions, load_engine

FULL, SLIDING = "full_attention", "sliding_attention"
PROMPT = np.random.default_rng(2).integers(8, 490, 45).tolist()
COUNT = 40
HOP_S = 0.01  # every message takes it, so that a request takes seconds of virtual time


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_tiny_target(tmp_path_factory.mktemp("target"), seed=3, dtype="F32")


@pytest.fixture(scope="module", params=["sliding", "mixed"])
def pair(request, tmp_path_factory, target):
    """An engine and a drafter; prompts run in chunks of 20 rows."""
    changes = {"layer_types": [SLIDING, FULL]} if request.param == "mixed" else {}
    folder = make_tiny_drafter(tmp_path_factory.mktemp("drafter"), target, 3, **changes)
    engine = load_engine(target, folder, EngineOptions(prefill_chunk=20))
    return engine, load_drafter(folder, target)


class Stage:
    """One target, one drafter, one client on a mesh."""

    def __init__(self, pair):
        self.engine, self._loaded = pair
        self.world = World()
        self.world.mesh.fault_all(Faults(delay_s=(HOP_S, HOP_S)))
        self.target = RealTarget(self.world, self.engine)
        self.drafters = []
        self.start_drafter()
        self.client = self.world.client()
        self.world.settle()

    def start_drafter(self):
        self.drafters.append(RealDrafter(self.world, self._loaded))

    def run(self, name="a", prompt=PROMPT, count=COUNT, **options):
        """One request to its end: its ids and stats."""
        self.client.submit(name, prompt, count, **options)
        self.world.finish()
        end = self.client.ends[name]
        assert isinstance(end, Done), end
        return self.client.replies[name], json.loads(end.stats)

    def blocks(self, session=None):
        """Blocks by the anchor's position, of one session or of the only one."""
        return {
            block.key.base: block
            for drafter in self.drafters
            for block in drafter.of(Block)
            if session in (None, block.key.session)
        }


def are_alike(blocks, others):
    """Whether blocks are those of another run, as far as this one drafted."""
    return all(
        base in others
        and block.ids == others[base].ids
        and np.allclose(block.confidences, others[base].confidences, atol=1e-4)
        for base, block in blocks.items()
    )


@pytest.fixture(scope="module")
def undisturbed(pair):
    """Ids, stats and blocks of a run that nothing happens to."""
    stage = Stage(pair)
    ids, stats = stage.run()
    assert stats["drafted_rounds"] == stats["rounds"] - 1 > 20  # the last token is never drafted
    return ids, stats, stage.blocks()


def features_only(spoil, *, first=0, count=1):
    """Spoil some of the Features messages, counted from `first`."""
    seen = []

    def apply(message):
        if not isinstance(message, Features):
            return message
        seen.append(message)
        return spoil(message) if first <= len(seen) - 1 < first + count else message

    return apply


def wider(message):
    rows = np.zeros((message.rows.shape[0], message.rows.shape[1] + 1), np.float32)
    return replace(message, rows=from_numpy(rows))


def endless(message):
    rows = np.full(message.rows.shape, np.nan, np.float32)
    return replace(message, rows=from_numpy(rows))


def far(message):
    return replace(message, first_pos=message.first_pos + 4090)


@pytest.mark.parametrize(
    ("spoil", "first"), [(wider, 0), (endless, 0), (wider, 9)], ids=["prompt", "NaN", "round"]
)
def test_bad_features_reset_the_link_and_the_request_is_drafted_again(
    pair, undisturbed, spoil, first
):
    """Stops: bad rows in the context, a request that ends, or one that never drafts again.

    A row that was on its way to the lost link may come first on the new one, and a block be drafted
    on it alone; the stored rows then take its place.
    """
    ids, _, blocks = undisturbed
    stage = Stage(pair)
    stage.target.spoil = features_only(spoil, first=first)
    got, stats = stage.run()
    assert got == ids
    (lost,) = stage.drafters[0].of(LinkLost)
    assert "is needed" in lost.reason or "NaN" in lost.reason
    assert len({link.ticket for link in stage.drafters[0].of(Link)}) == 2
    assert stats["plain_rounds"] > 1 or first < 2
    assert stats["drafted_rounds"] > 5
    found = stage.blocks()
    again = min(base for base in found if base - 1 not in found and base > 45)
    assert len(found) > 5
    assert are_alike({base: block for base, block in found.items() if base != again}, blocks)


def test_features_that_stay_bad_cost_drafts_and_nothing_else(pair, undisturbed):
    """Stops: a link that is made and lost without an end, at the pace of the network."""
    stage = Stage(pair)
    stage.target.spoil = features_only(wider, count=10**6)
    got, stats = stage.run()
    assert got == undisturbed[0]
    assert stats["drafts_sent"] == 0
    assert stats["plain_rounds"] == stats["rounds"]
    assert len(stage.drafters[0].of(LinkLost)) < 10


@pytest.mark.parametrize("first", [1, 12], ids=["chunk", "round"])
def test_a_gap_is_asked_for_and_drafting_goes_on_the_same(pair, undisturbed, first):
    """Stops: rows that close up over a hole, and are rotated and read one message off."""
    ids, stats, blocks = undisturbed
    stage = Stage(pair)
    stage.target.spoil = features_only(lambda _: None, first=first)
    got, disturbed = stage.run()
    (request,) = stage.drafters[0].of(Resync)
    assert request.from_pos > 0
    assert got == ids
    assert stage.drafters[0].of(LinkLost) == []
    assert disturbed["drafted_rounds"] >= stats["drafted_rounds"] - 3
    assert are_alike(stage.blocks(), blocks)


def test_rows_beyond_the_session_are_a_gap_like_any_other(pair, undisturbed):
    """Stops: a wrong position that is believed, where it moves the context out of reach."""
    ids, _, blocks = undisturbed
    stage = Stage(pair)
    stage.target.spoil = features_only(far, first=6)
    got, stats = stage.run()
    assert got == ids
    assert len(stage.drafters[0].of(Resync)) == 1
    assert stats["drafted_rounds"] > 20
    assert are_alike(stage.blocks(), blocks)


def test_a_restarted_drafter_is_fed_the_last_rows_and_drafts_the_same(pair, undisturbed):
    """Stops: a re-feed that is rotated from 0, one row short, or never asked for."""
    ids, _, blocks = undisturbed
    stage = Stage(pair)

    def end_and_start(message):
        if isinstance(message, Block) and len(stage.drafters[0].of(Block)) == 12:
            stage.world.mesh.at(0.0, lambda: stage.world.mesh.kill("drafter.1"))
            stage.world.mesh.at(0.01, stage.start_drafter)
        return message

    stage.drafters[0].spoil = end_and_start
    got, stats = stage.run()
    assert got == ids
    assert stats["plain_rounds"] > 1
    assert len(stage.drafters[1].of(Block)) > 5
    assert are_alike(stage.blocks(), blocks)
    fed = [m for m in stage.target.of(Features) if m.first_pos + m.rows.shape[0] > 45]
    window = stage.engine.card.wire.window
    if window:
        assert any(m.rows.shape[0] == window - 1 and m.first_pos > 0 for m in fed)
    else:
        assert sum(m.first_pos == 0 for m in stage.target.of(Features)) == 2


def test_requests_at_once_are_drafted_as_if_alone(pair, undisturbed):
    """Stops: rows of one request in the context of another, whatever the order they come in."""
    ids, _, blocks = undisturbed
    stage = Stage(pair)
    others = [np.random.default_rng(seed).integers(8, 490, 30 + seed).tolist() for seed in range(3)]
    for number, prompt in enumerate(others):
        stage.client.submit(f"other-{number}", prompt, 12)
    got, stats = stage.run()
    assert got == ids
    assert stats["drafted_rounds"] > 20
    sessions = {block.key.session for block in stage.drafters[0].of(Block)}
    assert len(sessions) == 4
    assert sum(are_alike(stage.blocks(session), blocks) for session in sessions) == 1
