"""Sub-layers against plain NumPy of the same formulas, at sizes the network does not reach."""

import mlx.core as mx
import numpy as np
import pytest

from target_svc.models.blocks.attention import causal_mask
from target_svc.models.blocks.gated_delta import DeltaShape, DeltaWeights, GatedDelta
from target_svc.models.blocks.moe import Experts, ExpertWeights
from target_svc.models.blocks.norms import gated, silu
from target_svc.models.blocks.sparse_attention import keep_best
from target_svc.models.states.recurrent import RecurrentRows
from target_svc.models.states.rows import RowWindow

HIDDEN = 24
SHAPE = DeltaShape(key_heads=2, value_heads=6, key_dim=8, value_dim=4, kernel=4, gate="sigmoid")


def sigmoid(x):
    """float64."""
    return 1 / (1 + np.exp(-x))


@pytest.fixture(scope="module")
def delta_weights():
    """Float64 weights of one recurrent layer by field name."""
    rng = np.random.default_rng(0)
    out = SHAPE.value_heads * SHAPE.value_dim
    return {
        "qkv": rng.standard_normal((SHAPE.channels, HIDDEN)) / 5,
        "z": rng.standard_normal((out, HIDDEN)) / 5,
        "b": rng.standard_normal((SHAPE.value_heads, HIDDEN)) / 5,
        "a": rng.standard_normal((SHAPE.value_heads, HIDDEN)) / 5,
        "conv": rng.standard_normal((SHAPE.channels, 1, SHAPE.kernel)) * 0.4,
        "a_log": np.log(rng.random(SHAPE.value_heads) * 3 + 0.3),
        "dt_bias": rng.standard_normal(SHAPE.value_heads),
        "norm": 1 + 0.2 * rng.standard_normal(SHAPE.value_dim),
        "out": rng.standard_normal((HIDDEN, out)) / 5,
    }


def recurrence(w, x):
    """The delta rule, one row at a time, in float64."""
    u = x @ w["qkv"].T
    padded = np.concatenate([np.zeros((SHAPE.kernel - 1, SHAPE.channels)), u])
    taps = w["conv"][:, 0]
    mixed = sum(padded[j : j + len(x)] * taps[:, j] for j in range(SHAPE.kernel))
    mixed = mixed * sigmoid(mixed)
    keys = SHAPE.key_heads * SHAPE.key_dim
    unit = lambda t: t / np.sqrt((t * t).sum(-1, keepdims=True) + 1e-6)  # noqa: E731
    q = unit(mixed[:, :keys].reshape(len(x), SHAPE.key_heads, -1)) / SHAPE.key_dim**0.5
    k = unit(mixed[:, keys : 2 * keys].reshape(len(x), SHAPE.key_heads, -1))
    q, k = np.repeat(q, SHAPE.groups, 1), np.repeat(k, SHAPE.groups, 1)
    v = mixed[:, 2 * keys :].reshape(len(x), SHAPE.value_heads, -1)
    beta = sigmoid(x @ w["b"].T)
    alpha = np.exp(-np.exp(w["a_log"]) * np.logaddexp(0, x @ w["a"].T + w["dt_bias"]))
    state, rows = np.zeros((SHAPE.value_heads, SHAPE.key_dim, SHAPE.value_dim)), []
    for t in range(len(x)):
        state = state * alpha[t][:, None, None]
        error = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * error[:, None, :]
        rows.append(np.einsum("hkv,hk->hv", state, q[t]))
    out = np.stack(rows)
    out = out / np.sqrt((out * out).mean(-1, keepdims=True) + 1e-6) * w["norm"]
    z = (x @ w["z"].T).reshape(out.shape)
    return (out * sigmoid(z)).reshape(len(x), -1) @ w["out"].T, state


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 63, 64, 65, 150])
def test_chunks_equal_the_recurrence(delta_weights, rows):
    """A triangular solve that stops a power early, or a decay taken from the wrong row."""
    weights = DeltaWeights(**{k: mx.array(v.astype(np.float32)) for k, v in delta_weights.items()})
    layer = GatedDelta(weights, SHAPE, 1e-6)
    x = np.random.default_rng(rows).standard_normal((rows, HIDDEN))
    wanted, wanted_state = recurrence(delta_weights, x)
    state = RecurrentRows(1, (SHAPE.key_heads, SHAPE.groups, SHAPE.key_dim, SHAPE.value_dim))
    window = RowWindow(SHAPE.kernel - 1, SHAPE.channels, mx.float32)
    got = np.array(layer(mx.array(x.astype(np.float32)), window, state, 0)) / 2  # without the gain
    assert np.abs(got - wanted).max() < 1e-5
    state.check(rows, rows)
    state.roll_back(rows)
    got_state = np.array(state.states).reshape(wanted_state.shape)
    assert np.abs(got_state - wanted_state).max() < 1e-5


def test_strong_decay_stays_finite(delta_weights):
    """Decays kept as ratios of exponentials overflow; kept as differences they do not."""
    strong = delta_weights | {"a_log": np.full(6, 4.0), "dt_bias": np.full(6, 3.0)}
    weights = DeltaWeights(**{k: mx.array(v.astype(np.float32)) for k, v in strong.items()})
    layer = GatedDelta(weights, SHAPE, 1e-6)
    x = np.random.default_rng(1).standard_normal((64, HIDDEN))
    state = RecurrentRows(1, (SHAPE.key_heads, SHAPE.groups, SHAPE.key_dim, SHAPE.value_dim))
    window = RowWindow(SHAPE.kernel - 1, SHAPE.channels, mx.float32)
    got = np.array(layer(mx.array(x.astype(np.float32)), window, state, 0)) / 2
    assert np.abs(got - recurrence(strong, x)[0]).max() < 1e-5


@pytest.fixture(scope="module")
def expert_arrays():
    """Eight experts of 16, a shared one of 32."""
    rng = np.random.default_rng(3)
    shapes = {
        "router": (8, HIDDEN),
        "gate_up": (8, 32, HIDDEN),
        "down": (8, HIDDEN, 16),
        "shared_gate_up": (64, HIDDEN),
        "shared_down": (HIDDEN, 32),
        "shared_switch": (1, HIDDEN),
    }
    return {name: rng.standard_normal(shape) / 4 for name, shape in shapes.items()}


def experts_in_numpy(w, x, n_chosen, *, normalize):
    """Float64, one row and expert at a time; equal scores choose the lowest id."""

    def swiglu(both):
        gate, up = np.split(both, 2)
        return gate * sigmoid(gate) * up

    rows = []
    for row in x:
        scores = np.exp(w["router"] @ row)
        scores /= scores.sum()
        chosen = np.argsort(-scores, kind="stable")[:n_chosen]
        share = scores[chosen] / (scores[chosen].sum() if normalize else 1)
        routed = sum(
            s * (w["down"][e] @ swiglu(w["gate_up"][e] @ row))
            for s, e in zip(share, chosen, strict=True)
        )
        shared = w["shared_down"] @ swiglu(w["shared_gate_up"] @ row)
        rows.append(routed + sigmoid(w["shared_switch"] @ row) * shared)
    return np.stack(rows)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("n_rows", [1, 2, 5, 40])
def test_both_ways_through_the_experts_agree(expert_arrays, monkeypatch, n_rows, normalize):
    """A weight that is not exactly zero, or experts sorted without being put back."""
    weights = ExpertWeights(**{k: mx.array(v.astype(np.float32)) for k, v in expert_arrays.items()})
    x = np.random.default_rng(n_rows).standard_normal((n_rows, HIDDEN))
    wanted = experts_in_numpy(expert_arrays, x, 3, normalize=normalize)
    for limit in (0, 4096):
        monkeypatch.setattr("target_svc.models.blocks.moe._DENSE_LIMIT", limit)
        layer = Experts(weights, 3, normalize=normalize)
        assert (layer._dense is None) == (limit == 0)
        got = np.array(layer(mx.array(x.astype(np.float32)))) / 2
        assert np.abs(got - wanted).max() < 1e-5


def test_experts_with_equal_scores_are_chosen_by_lowest_id(expert_arrays):
    """A choice that depends on the sort of the device."""
    tied = expert_arrays | {"router": np.tile(expert_arrays["router"][:1], (8, 1))}
    weights = ExpertWeights(**{k: mx.array(v.astype(np.float32)) for k, v in tied.items()})
    layer = Experts(weights, 3, normalize=True)
    ids, _ = layer._choose(mx.zeros((2, 8)))
    assert np.array(ids).tolist() == [[0, 1, 2]] * 2


def test_equal_block_scores_are_kept_from_the_lowest():
    """The cut often falls inside a run of zeros; every forward must cut it alike."""
    inf = np.inf
    cases = [
        ([0, 0, 0, 0, 0], 2, [1, 1, 0, 0, 0]),
        ([0, 3, 0, 5, 0], 3, [1, 1, 0, 1, 0]),
        ([1, 0, 0, 2, -inf], 3, [1, 1, 0, 1, 0]),
        ([5, 4, 3, 2, 1], 1, [1, 0, 0, 0, 0]),
        ([2, 2, 2, 1, 2], 3, [1, 1, 1, 0, 0]),
    ]
    for scores, count, kept in cases:
        got = keep_best(mx.array([scores], dtype=mx.float32), count)
        assert np.array(got)[0].astype(int).tolist() == kept, scores


@pytest.mark.parametrize("size", [5, 5000])
def test_gates_are_the_same_function_at_every_size(size):
    """Two forms of the sigmoid that part at the ends."""
    logits = np.linspace(-90, 90, size).astype(np.float32)
    value = np.ones(size, np.float32)
    got = np.array(gated(mx.array(value), mx.array(logits)))
    wanted = sigmoid(logits.astype(np.float64))
    assert np.isfinite(got).all()
    assert np.abs(got - wanted).max() < 2e-7
    far = np.array(silu(mx.array(np.full(size, -200, np.float32))))
    assert (far == 0).all()


@pytest.mark.parametrize("rows", [2, 5, 40])
def test_causal_mask_hides_what_comes_after_each_row(rows):
    """The host's form and the device's, one column apart."""
    mask = np.array(causal_mask(7, rows))
    sees = np.arange(7 + rows)[None] <= 7 + np.arange(rows)[:, None]
    assert np.array_equal(mask, np.where(sees, 0, -np.inf))
