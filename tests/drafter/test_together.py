"""Several sessions in one forward: each gets what it gets alone."""

import numpy as np
import pytest
from support.tiny_drafter import H, make_stand_in_target, make_tiny_drafter

from common.errors import EngineError, NotFinite
from common.net.transport import CONTROL_PEER, Peer
from common.wire.messages import (
    Attach,
    Block,
    Close,
    Draft,
    Drafted,
    DraftFailed,
    Features,
    RoundKey,
)
from common.wire.tensors import from_numpy
from drafter_svc import device, host
from drafter_svc.drafter import Drafter, DraftJob
from drafter_svc.draws import Drawing
from drafter_svc.load import load
from drafter_svc.service import DrafterService

B = 8
LENGTHS = (1, 7, 20, 63, 150)


@pytest.fixture(scope="module", params=["DFlash2", "DFlash"])
def folders(request, tmp_path_factory):
    target = make_stand_in_target(tmp_path_factory.mktemp("target"))
    is_second = request.param == "DFlash2"
    folder = tmp_path_factory.mktemp("drafter")
    return make_tiny_drafter(folder, target, 3, is_second=is_second), target


@pytest.fixture(scope="module", params=[host, device], ids=["host", "device"])
def drafter(request, folders):
    return Drafter(load(*folders, request.param))


def opened(drafter, n, seed=0):
    context = drafter.open(f"s{n}", 400)
    rows = np.random.default_rng(seed + n).standard_normal((n, H)).astype(np.float32)
    drafter.append(context, rows, 0)
    return context


def jobs_of(drafter, lengths=LENGTHS):
    return [
        DraftJob(opened(drafter, n), 3 + 5 * index, 1 + (index + 5) % (B - 1))
        for index, n in enumerate(lengths)
    ]


def same(block, alone):
    assert block.draft_ids == alone.draft_ids
    assert block.confidences == pytest.approx(alone.confidences, abs=1e-5)


@pytest.mark.parametrize("count", range(1, len(LENGTHS) + 1))
def test_each_gets_what_it_gets_alone(drafter, count):
    """Rows of a neighbour in the attention, or in the convolution over the block's edge."""
    jobs = jobs_of(drafter)[:count]
    blocks = drafter.draft_all(jobs)
    for job, block in zip(jobs, blocks, strict=True):
        assert len(block.draft_ids) == job.n_drafts
        same(block, drafter.draft(job.context, job.anchor_id, job.n_drafts))


def test_the_order_of_the_others_does_not_matter(drafter):
    """A session's place in the forward is chance."""
    jobs = jobs_of(drafter)
    forth, back = drafter.draft_all(jobs), drafter.draft_all(jobs[::-1])[::-1]
    for one, other in zip(forth, back, strict=True):
        same(one, other)


def test_one_alone_takes_the_path_it_always_took(drafter):
    """Bit for bit: a batch of one is no batch."""
    context = opened(drafter, 20)
    block = drafter.draft_all([DraftJob(context, 5, 7)])[0]
    assert block.confidences == drafter.draft(context, 5, 7).confidences


def test_drawn_and_best_drafts_share_a_forward(drafter):
    """Requests differ in what they ask for."""
    context = opened(drafter, 20)
    drawing = Drawing(1.0, 7, 20)
    drawn, best = drafter.draft_all([DraftJob(context, 5, 7, drawing), DraftJob(context, 5, 7)])
    same(drawn, drafter.draft(context, 5, 7, drawing))
    same(best, drafter.draft(context, 5, 7))


def test_a_bad_order_fails_alone(drafter):
    """One client's mistake is no other's loss."""
    jobs = jobs_of(drafter, (7, 20))
    bad = [DraftJob(jobs[0].context, -1, 3), DraftJob(jobs[0].context, 5, 99)]
    blocks = drafter.draft_all([jobs[0], *bad, jobs[1]])
    assert [type(block) for block in blocks[1:3]] == [EngineError, EngineError]
    same(blocks[0], drafter.draft(jobs[0].context, jobs[0].anchor_id, jobs[0].n_drafts))
    same(blocks[3], drafter.draft(jobs[1].context, jobs[1].anchor_id, jobs[1].n_drafts))


def test_a_context_that_went_wrong_fails_alone(drafter, monkeypatch):
    """Its numbers meet the others' in every product."""
    jobs = jobs_of(drafter, (7, 20, 63))
    views = drafter._model._views

    def broken(context):
        seen = views(context)
        if context is jobs[1].context:
            seen = [type(v)(v.keys * float("nan"), v.values, v.mask) for v in seen]
        return seen

    monkeypatch.setattr(drafter._model, "_views", broken)
    with np.errstate(invalid="ignore"):
        blocks = drafter.draft_all(jobs)
    assert isinstance(blocks[1], NotFinite)
    monkeypatch.undo()
    for place in (0, 2):
        job = jobs[place]
        same(blocks[place], drafter.draft(job.context, job.anchor_id, job.n_drafts))


def test_nobody_gets_nothing(drafter):
    """All of them were given up meanwhile."""
    assert drafter.draft_all([]) == []


class Desk:
    """The service with its messages caught."""

    def __init__(self, drafter, names):
        self.sent = []
        self.service = DrafterService(drafter, self._send, lambda endpoint, key: Peer(endpoint))
        for index, name in enumerate(names):
            self.service.on_message(CONTROL_PEER, Attach(name, 0, "t", "ipc://x", ""), 0.0)
            rows = np.random.default_rng(index).standard_normal((9 + index, H)).astype(np.float32)
            features = Features(name, 0, 0, from_numpy(rows))
            self.service.on_message(Peer("ipc://x"), features, 0.0)

    def _send(self, peer, message):
        self.sent.append(message)
        return True

    def order(self, name, index, n_drafts=7):
        key = RoundKey(name, 0, 0, 9 + index, 5 + index, 1)
        self.service.on_message(CONTROL_PEER, Draft(key, n_drafts, 100.0), 0.0)

    def of(self, kind):
        return {m.key.session: m for m in self.sent if isinstance(m, kind)}


def test_orders_in_the_inbox_share_one_forward(drafter, monkeypatch):
    """More than fit are left for the next piece of work, in order."""
    names = [f"r{index}" for index in range(drafter.most_together + 2)]
    desk, counts = Desk(drafter, names), []
    draft_all = drafter.draft_all

    def counted(jobs):
        counts.append(len(jobs))
        return draft_all(jobs)

    monkeypatch.setattr(drafter, "draft_all", counted)
    for index, name in enumerate(names):
        desk.order(name, index)
    while desk.service.work(0.0):
        pass
    assert counts == [drafter.most_together, 2]
    assert list(desk.of(Block)) == list(desk.of(Drafted)) == names
    assert desk.service.heartbeat()[2]["drafted_together"] == len(names)
    monkeypatch.undo()
    for index, name in enumerate(names):
        alone = Desk(drafter, names)
        alone.order(name, index)
        assert not alone.service.work(0.0)
        assert alone.of(Block)[name].ids == desk.of(Block)[name].ids


def test_a_session_that_closed_meanwhile_is_left_out(drafter):
    """Its client went between the order and the forward."""
    desk = Desk(drafter, ["a", "b"])
    desk.order("a", 0)
    desk.order("b", 1)
    desk.service.on_message(CONTROL_PEER, Close("a"), 0.0)
    assert not desk.service.work(0.0)
    assert list(desk.of(Block)) == ["b"]


def test_an_order_for_an_older_round_is_stale(drafter):
    """The context has moved on: a block for the past is of no use."""
    desk = Desk(drafter, ["a"])
    desk.order("a", -2)
    assert not desk.service.work(0.0)
    assert desk.of(DraftFailed)["a"].reason == "stale"
