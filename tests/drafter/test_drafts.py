"""What a draft promises: it changes nothing, sessions are apart, both networks are related."""

import mlx.core as mx
import numpy as np
import pytest
from support.tiny_drafter import H, make_stand_in_target, make_tiny_drafter

from common.errors import EngineError, NotFinite
from drafter_svc import device, host
from drafter_svc.drafter import Drafter, load_drafter
from drafter_svc.kernels import kernels_of_device
from drafter_svc.load import load

B = 8


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_stand_in_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module", params=["DFlash2", "DFlash"])
def folder(request, tmp_path_factory, target):
    is_second = request.param == "DFlash2"
    return make_tiny_drafter(tmp_path_factory.mktemp("drafter"), target, 3, is_second=is_second)


@pytest.fixture(scope="module", params=[host, device], ids=["host", "device"])
def drafter(request, folder, target):
    return Drafter(load(folder, target, request.param))


def features(n, seed=0):
    return np.random.default_rng(seed).standard_normal((n, H)).astype(np.float32)


def test_a_block_has_one_confidence_per_draft(drafter):
    """Stops: a policy that is fed nonsense."""
    context = drafter.open("s", 100)
    drafter.append(context, features(20), 0)
    block = drafter.draft(context, 5, B - 1)
    assert len(block.draft_ids) == len(block.confidences) == B - 1
    assert all(0 < confidence <= 1 for confidence in block.confidences)
    assert all(0 <= token < drafter.card.vocab_size for token in block.draft_ids)


@pytest.mark.parametrize("n_drafts", range(1, B - 1))
def test_fewer_drafts_are_the_first_of_the_whole_block(drafter, n_drafts):
    """Stops: a block whose tokens depend on how many were asked for."""
    context = drafter.open("s", 100)
    drafter.append(context, features(20), 0)
    whole, part = drafter.draft(context, 5, B - 1), drafter.draft(context, 5, n_drafts)
    assert part.draft_ids == whole.draft_ids[:n_drafts]
    assert part.confidences == whole.confidences[:n_drafts]


def test_a_draft_leaves_no_trace(drafter):
    """Stops: block keys in the context, which would need a roll back."""
    rows = features(40)
    used, unused = drafter.open("a", 100), drafter.open("b", 100)
    for start in range(0, 40, 4):
        for context in (used, unused):
            drafter.append(context, rows[start : start + 4], start)
        drafter.draft(used, start, B - 1)
    first = drafter.draft(used, 5, B - 1)
    assert first.draft_ids == drafter.draft(used, 5, B - 1).draft_ids
    assert first.confidences == drafter.draft(unused, 5, B - 1).confidences


def test_interleaved_sessions_draft_as_if_alone(drafter):
    """Stops: state shared between sessions."""
    alone = {}
    for name in range(3):
        context = drafter.open(str(name), 100)
        drafter.append(context, features(30, seed=name), 0)
        alone[name] = drafter.draft(context, name, B - 1)
    together = {name: drafter.open(str(name), 100) for name in range(3)}
    for start in range(0, 30, 5):
        for name, context in together.items():
            rows = features(30, seed=name)[start : start + 5]
            drafter.append(context, rows, start)
    for name, context in together.items():
        block = drafter.draft(context, name, B - 1)
        assert block.draft_ids == alone[name].draft_ids
        np.testing.assert_allclose(block.confidences, alone[name].confidences, atol=1e-5)


def test_the_anchor_and_the_context_both_matter(drafter):
    """Stops: a network that ignores one of its inputs and still passes the tests above."""
    blocks = set()
    for seed in range(3):
        context = drafter.open("s", 100)
        drafter.append(context, features(20, seed), 0)
        blocks |= {drafter.draft(context, anchor, B - 1).confidences for anchor in (5, 77, 130)}
    assert len(blocks) == 9


def test_identity_convolution_and_a_silent_selector_make_dflash2_a_dflash(tmp_path, target):
    """Stops: anything else that differs between the two networks."""

    def silence(tensors):
        for name, tensor in tensors.items():
            if name.endswith("base_kernel"):
                tensor[:] = 0.0
                tensor[:, 0] = 1.0
            if "kernel_projection" in name or "predecessor" in name:
                tensor[:] = 0.0

    kept = {}

    def adopt(tensors):
        tensors.update({name: kept[name] for name in tensors})

    second = make_tiny_drafter(
        tmp_path / "2", target, edit=lambda t: (silence(t), kept.update(t)), is_second=True
    )
    first = make_tiny_drafter(tmp_path / "1", target, edit=adopt, is_second=False, is_causal=False)
    blocks = []
    for folder in (first, second):
        drafter = load_drafter(folder, target)
        context = drafter.open("s", 100)
        drafter.append(context, features(33), 0)
        blocks.append(drafter.draft(context, 9, B - 1).draft_ids)
    assert blocks[0] == blocks[1]


def test_host_and_device_draft_alike(folder, target):
    """Stops: a faster form that is another network."""
    forms = [Drafter(load(folder, target, kernels)) for kernels in (host, device)]
    contexts = [one.open("s", 400) for one in forms]
    rows = features(120)
    for start in range(0, 120, 3):
        blocks = []
        for one, context in zip(forms, contexts, strict=True):
            one.append(context, rows[start : start + 3], start)
            blocks.append(one.draft(context, start, B - 1))
        assert blocks[0].draft_ids == blocks[1].draft_ids
        np.testing.assert_allclose(blocks[0].confidences, blocks[1].confidences, atol=1e-4)


def test_the_form_is_that_of_the_default_device(folder, target):
    """Stops: a GPU whose drafter computes on the host."""
    forms = {}
    before = mx.default_device()
    try:
        mx.set_default_device(mx.cpu)
        forms["cpu"] = kernels_of_device()
    finally:
        mx.set_default_device(before)
    assert forms == {"cpu": host}
    assert load(folder, target).model.kernels is (host if before == mx.Device(mx.cpu) else device)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 17])
def test_padding_of_products_does_not_show(rows):
    """Stops: rows lost or mixed where BLAS is given more of them than asked for."""
    rng = np.random.default_rng(rows)
    left, right = rng.standard_normal((rows, 12)), rng.standard_normal((12, 20))
    found = host.product(left.astype(np.float32), right.astype(np.float32))
    np.testing.assert_allclose(found, left @ right, atol=1e-5)


@pytest.mark.parametrize(("anchor_id", "n_drafts"), [(-1, 7), (256, 7), (5, 0), (5, 8)])
def test_a_draft_out_of_range_is_refused(drafter, anchor_id, n_drafts):
    """Stops: an id that gathers from outside the table, which no device reports."""
    context = drafter.open("s", 100)
    with pytest.raises(EngineError, match=r"is needed|gives 1\.\.7"):
        drafter.draft(context, anchor_id, n_drafts)


@pytest.mark.parametrize("kernels", [host, device], ids=["host", "device"])
def test_weights_that_are_not_finite_are_reported(tmp_path, target, kernels):
    """Stops: NaN confidences reaching the policy."""

    def spoil(tensors):
        tensors["norm.weight"][0] = np.nan

    for is_second in (True, False):
        folder = make_tiny_drafter(
            tmp_path / str(is_second), target, edit=spoil, is_second=is_second
        )
        drafter = Drafter(load(folder, target, kernels))
        with pytest.raises(NotFinite):
            drafter.draft(drafter.open("s", 10), 5, 7)


def test_warm_up_leaves_a_usable_drafter(drafter):
    """Stops: a warm-up that needs more context than the target allows."""
    drafter.warm_up()
    context = drafter.open("s", 100)
    assert len(drafter.draft(context, 5, 3).draft_ids) == 3
