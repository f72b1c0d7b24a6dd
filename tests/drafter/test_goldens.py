"""Blocks equal z-lab's `dflash` package: logits, candidates and drafts."""

from pathlib import Path

import numpy as np
import pytest
from support.drafter_cases import CASES, LENGTHS, anchor_of, config_of, taps_of
from support.tiny_drafter import (
    fuse,
    make_stand_in_target,
    make_tiny_drafter,
    tiny_tensors,
)

from drafter_svc import device, host
from drafter_svc.drafter import Drafter
from drafter_svc.load import load

GOLDEN = Path(__file__).parents[1] / "golden" / "drafter.npz"


@pytest.fixture(scope="module")
def goldens():
    with np.load(GOLDEN) as file:
        return dict(file)


@pytest.fixture(scope="module", params=[host, device], ids=["host", "device"])
def kernels(request):
    return request.param


@pytest.fixture(scope="module", params=CASES)
def loaded(request, tmp_path_factory, kernels):
    """One case: its name, its golden settings and the loaded drafter."""
    case = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    target = make_stand_in_target(folder / "target")
    drafter = make_tiny_drafter(
        folder / "drafter", target, case.seed, is_second=case.is_second, **case.changes
    )
    return request.param, case, load(drafter, target, kernels)


def splits(length, seed):
    """Random cuts of a context, one of them with single rows and one in one piece."""
    rng = np.random.default_rng(seed)
    cuts = np.flatnonzero(rng.random(length - 1) < (1.0, 0.0, 0.3)[seed]) + 1
    return np.split(np.arange(length), cuts)


def open_at(drafter, first_pos):
    context = drafter.open("golden", 2000)
    context.reset(first_pos)
    return context


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("split", range(3))
def test_a_block_equals_the_reference(loaded, goldens, length, split):
    """Stops: any difference of norm, rotation, mask, window, convolution, head or selector."""
    name, case, parts = loaded
    config = config_of(case)
    features = fuse(tiny_tensors(config, case.seed), taps_of(config, length))
    drafter = Drafter(parts)
    context = open_at(drafter, case.first_pos)

    for piece in splits(length, split):
        drafter.append(context, features[piece], case.first_pos + int(piece[0]))
    anchor = anchor_of(length)
    hidden = parts.model.hidden(anchor, context)
    logits = parts.model.logits(hidden)
    block = drafter.draft(context, anchor, drafter.n_drafts)

    expected = {
        key: goldens[f"{name}/{length}/{key}"] for key in ("logits", "candidates", "drafts")
    }
    np.testing.assert_allclose(np.array(logits), expected["logits"], atol=1e-4, rtol=0)
    assert block.draft_ids == tuple(expected["drafts"].tolist())
    if case.is_second:
        candidates, _ = parts.model.selector.lattice(hidden, logits, anchor)
        assert np.array(candidates).tolist() == expected["candidates"].tolist()


def test_the_goldens_tell_long_contexts_from_short_ones(goldens):
    """Stops: goldens in which the context has no influence, so that any mask would pass."""
    for name in CASES:
        drafts = {goldens[f"{name}/{length}/logits"].tobytes() for length in LENGTHS}
        assert len(drafts) == len(LENGTHS)
