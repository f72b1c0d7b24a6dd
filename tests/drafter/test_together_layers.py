"""Several sessions in one forward: every kind of layer, and windows that wrapped long ago."""

import numpy as np
import pytest
from support.tiny_drafter import H, make_stand_in_target, make_tiny_drafter

from drafter_svc import device, host
from drafter_svc.drafter import Drafter, DraftJob
from drafter_svc.load import load

SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = [
    (True, [FULL, SLIDING]),
    (True, [FULL, FULL]),
    (False, [SLIDING, FULL]),  # version 1: the sliding layer is causal, the full one is not
    (False, [FULL, FULL]),
]
LENGTHS = (3, 16, 41, 130)
STEPS = (1, 5, 8, 2, 7, 3)  # rows of successive rounds; the window is 16


@pytest.fixture(scope="module", params=KINDS, ids=lambda k: f"v{1 + k[0]}-{k[1][0][0]}{k[1][1][0]}")
def folders(request, tmp_path_factory):
    is_second, kinds = request.param
    target = make_stand_in_target(tmp_path_factory.mktemp("target"))
    folder = tmp_path_factory.mktemp("drafter")
    return make_tiny_drafter(folder, target, 5, is_second=is_second, layer_types=kinds), target


@pytest.fixture(scope="module", params=[host, device], ids=["host", "device"])
def drafter(request, folders):
    return Drafter(load(*folders, request.param))


def fed_by_rounds(drafter, n):
    """A session whose rows came a few at a time, as rounds bring them."""
    context = drafter.open(f"s{n}", 400)
    rows = np.random.default_rng(n).standard_normal((n, H)).astype(np.float32)
    index = 0
    while context.end < n:
        stop = min(n, context.end + STEPS[index % len(STEPS)])
        drafter.append(context, rows[context.end : stop], context.end)
        index += 1
    return context


def test_each_gets_what_it_gets_alone(drafter):
    """A mask of a neighbour's length, a row of a neighbour's ring, a full layer cut to a window."""
    jobs = [
        DraftJob(fed_by_rounds(drafter, n), 3 + 5 * place, 7) for place, n in enumerate(LENGTHS)
    ]
    blocks = drafter.draft_all(jobs)
    for job, block in zip(jobs, blocks, strict=True):
        alone = drafter.draft(job.context, job.anchor_id, job.n_drafts)
        assert block.draft_ids == alone.draft_ids
        assert block.confidences == pytest.approx(alone.confidences, abs=1e-5)
    assert len({block.draft_ids for block in blocks}) == len(blocks)


def test_a_round_later_it_still_holds(drafter):
    """Drafting together leaves nothing behind in any context."""
    contexts = [fed_by_rounds(drafter, n) for n in LENGTHS]
    twins = [fed_by_rounds(drafter, n) for n in LENGTHS]
    drafter.draft_all([DraftJob(context, 9, 7) for context in contexts])
    for context, twin in zip(contexts, twins, strict=True):
        rows = np.random.default_rng(7).standard_normal((6, H)).astype(np.float32)
        drafter.append(context, rows, context.end)
        drafter.append(twin, rows, twin.end)
    blocks = drafter.draft_all([DraftJob(context, 11, 7) for context in contexts])
    for twin, block in zip(twins, blocks, strict=True):
        alone = drafter.draft(twin, 11, 7)
        assert block.draft_ids == alone.draft_ids
        assert block.confidences == pytest.approx(alone.confidences, abs=1e-5)
