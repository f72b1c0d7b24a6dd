"""Convolution, rotation, top-K and the walk against plain loops."""

import mlx.core as mx
import numpy as np
import pytest

from common.errors import NotFinite
from drafter_svc import device, host
from drafter_svc.conv import BlockConv
from drafter_svc.rope import Rope, RopeConfig, pair_order
from drafter_svc.selector import CandidateSelector, walk

FORMS = pytest.mark.parametrize("kernels", [host, device], ids=["host", "device"])


def given(array, kernels):
    return kernels.taken_in(np.asarray(array, np.float32), mx.float32)


@FORMS
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_convolution_equals_its_definition(k, kernels):
    """Stops: taps in the wrong order, a wrong side, groups laid out as channels."""
    rng = np.random.default_rng(k)
    B, H, g = 5, 12, 4
    base, z = rng.standard_normal((2, k, H)), rng.standard_normal((B, H))
    projection, out = rng.standard_normal((2 * k * (H // g), H)), rng.standard_normal((B, H))
    dynamic = (z @ projection.T).reshape(B, 2, k, H // g)
    expected = np.zeros((2, B, H))
    for side, rows in enumerate((z, out)):
        for i in range(B):
            for c in range(H):
                for t in range(min(k, i + 1)):
                    weight = base[side, t, c] + dynamic[i, side, t, c // g]
                    expected[side, i, c] += weight * rows[i - t, c]

    weights = (mx.array(a.astype(np.float32)) for a in (base, projection))
    conv = BlockConv(*weights, g, kernels)
    before, after = conv.prepare(given(z, kernels))
    np.testing.assert_allclose(np.array(before), expected[0], atol=1e-4)
    finished = conv.finish(given(out, kernels), after)
    np.testing.assert_allclose(np.array(finished), expected[1], atol=1e-4)


@FORMS
def test_rotation_equals_the_split_half_formula(kernels):
    """Stops: interleaved rotary, or an order in which queries and keys disagree."""
    rng = np.random.default_rng(0)
    hd, n, first = 8, 5, 37
    x = rng.standard_normal((n, 2, hd))
    x /= np.sqrt((x**2).mean(axis=-1, keepdims=True))
    angles = np.arange(first, first + n)[:, None] / 100.0 ** (np.arange(0, hd, 2) / hd)
    angles = np.concatenate([angles] * 2, 1)[:, None]
    cos, sin = np.cos(angles), np.sin(angles)
    half = np.concatenate([-x[..., hd // 2 :], x[..., : hd // 2]], -1)
    expected = (x * cos + half * sin)[..., pair_order(hd)]

    rotation = kernels.rotation(Rope(RopeConfig(theta=100.0), hd).turns(first, n))
    factors = given(np.ones((2, hd)), kernels)
    turned = kernels.turned(given(x[..., pair_order(hd)], kernels), factors, 0.0, rotation)
    np.testing.assert_allclose(np.array(turned), expected, atol=1e-5)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_blends_between_its_two_lengths(truncate):
    """Stops: a band cut to whole dimensions where the config says not to, or a wrong magnitude."""
    hd, theta, factor, length = 32, 10000.0, 4.0, 512
    config = RopeConfig(theta, "yarn", factor, length, truncate=truncate)
    turns = Rope(config, hd).turns(1, 1)[0, 0].astype(np.complex128)

    low, high = (
        hd * np.log(length / (rotations * 2 * np.pi)) / (2 * np.log(theta)) for rotations in (32, 1)
    )
    if truncate:
        low, high = np.floor(low), np.ceil(high)
    plain = theta ** -(np.arange(0, hd, 2) / hd)
    ramp = np.clip((np.arange(hd // 2) - max(low, 0)) / (min(high, hd - 1) - max(low, 0)), 0, 1)
    expected = plain * (1 - ramp) + plain / factor * ramp
    np.testing.assert_allclose(np.angle(turns), expected, rtol=1e-5)
    np.testing.assert_allclose(abs(turns), 1 + 0.1 * np.log(factor), rtol=1e-6)


def test_rotations_go_on_where_the_kept_ones_end():
    """Stops: a table that is one position short, or another formula behind it."""
    rope = Rope(RopeConfig(theta=100.0), 8)
    across = rope.turns(4090, 12)
    assert across.shape == (12, 1, 4)
    assert (across[:6] == rope.turns(4090, 6)).all()
    assert (across[6:] == rope.turns(4096, 6)).all()


@FORMS
@pytest.mark.parametrize("V", [16, 100, 1024, 1025, 2048, 4096, 5003])
def test_two_stages_find_the_same_best_ids_as_a_sort(V, kernels):
    """Stops: a strip that hides a candidate, padding that is chosen, ids off by a strip."""
    rng = np.random.default_rng(V)
    logits = rng.permuted(np.arange(3 * V, dtype=np.float32).reshape(3, V), axis=1)
    logits[1] -= 1e6
    logits[2] = np.sort(logits[2])  # all candidates in the last strip, which may be a short one
    logits[0] = np.where(np.arange(V) % 64 == 5, logits[0] + 1e5, logits[0])  # few strips win
    found = kernels.top_ids(given(logits, kernels), 16)
    expected = np.sort(np.argsort(logits, axis=1)[:, -16:], axis=1)
    assert np.array(found).tolist() == expected.tolist()


@FORMS
def test_candidates_are_complete_when_logits_are_equal(kernels):
    """Stops: a threshold that more than K logits reach, or that NaN does not."""
    logits = np.zeros((3, 90), np.float32)
    logits[0, 7:20] = 1.0
    logits[2, 5] = np.nan
    found = np.array(kernels.top_ids(given(logits, kernels), 16))
    assert found.shape == (3, 16)
    assert all(len(set(row)) == 16 for row in found.tolist())
    assert set(range(7, 20)) <= set(found[0].tolist())


def lattice_of(seed, n=6, V=90, H=12, r=5, K=8):
    rng = np.random.default_rng(seed)
    before, after = rng.standard_normal((V, r)), rng.standard_normal((V, r))
    projection, hidden = rng.standard_normal((r, H)), rng.standard_normal((n, H))
    logits = rng.standard_normal((n, V))
    arrays = [a.astype(np.float32) for a in (before, after, projection, hidden, logits)]
    return arrays, K


@FORMS
@pytest.mark.parametrize("seed", range(5))
def test_both_walks_equal_one_that_scores_step_by_step(seed, kernels):
    """Stops: an edge read from the wrong slot or predecessor."""
    (before, after, projection, hidden, logits), K = lattice_of(seed)
    selector = CandidateSelector(*map(mx.array, (before, after, projection)), K, kernels)
    anchor = 17
    rows = given(hidden, kernels), given(logits, kernels)
    paths = [
        selector.path(*rows, anchor),
        walk(*kernels.finished(*selector.lattice(*rows, anchor))),
    ]

    previous, ids, confidences = anchor, [], []
    for slot in range(len(logits)):
        candidates = np.argsort(-logits[slot])[:K]
        gate = before[previous] * (projection @ hidden[slot])
        scores = logits[slot, candidates] + after[candidates] @ gate
        weights = np.exp(scores - scores.max())
        previous = int(candidates[scores.argmax()])
        ids.append(previous)
        confidences.append(weights.max() / weights.sum())
    for path in paths:
        assert path.draft_ids == tuple(ids)
        np.testing.assert_allclose(path.confidences, confidences, atol=1e-5)


def test_the_selector_changes_the_path():
    """Stops: edges that are computed and not used."""
    (before, after, projection, hidden, logits), K = lattice_of(0)
    selector = CandidateSelector(*map(mx.array, (before, after, projection)), K, host)
    path = walk(*selector.lattice(hidden, logits, 3))
    assert path.draft_ids != tuple(logits.argmax(axis=1).tolist())


def test_of_equal_scores_the_lowest_id_wins():
    """Stops: a tie that depends on how candidates happen to be ordered."""
    candidates = np.array([[3, 8, 9]], np.int32)
    scores = np.full((1, 3, 3), 2.0, np.float32)
    assert walk(candidates, scores).draft_ids == (3,)
    assert walk(candidates, scores).confidences == pytest.approx((1 / 3,))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_that_are_not_finite_are_reported(value):
    """Stops: argmax of NaN, which is an id like any other."""
    scores = np.zeros((2, 3, 3), np.float32)
    scores[1, 0, 0] = value
    with pytest.raises(NotFinite):
        walk(np.zeros((2, 3), np.int32), scores)


@FORMS
def test_without_a_selector_the_confidence_is_the_probability(kernels):
    """Stops: confidences on another scale for DFlash."""
    logits = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32)
    ids, confidences = kernels.finished(*kernels.best_ids(given(logits, kernels)))
    weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert ids.tolist() == logits.argmax(axis=1).tolist()
    np.testing.assert_allclose(confidences, weights.max(axis=1), atol=1e-6)
