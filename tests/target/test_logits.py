"""The network against goldens of transformers, in every way of feeding it."""

import mlx.core as mx
import numpy as np
import pytest
from support.target_cases import CLOSE, feed_parts
from support.tiny import GOLDEN_CASES

from target_svc.models.blocks.ngram import NgramRows, NgramShape
from target_svc.models.family import every, run_rows
from target_svc.models.qwen4_exp import load
from target_svc.rollback import commit

PATTERNS = {
    "all at once": lambda ids: [ids],
    "one by one": lambda ids: [ids[i : i + 1] for i in range(len(ids))],
    "in chunks": lambda ids: [ids[:24], ids[24:56], ids[56:]],
    "in fives": lambda ids: [ids[:32], *[ids[i : i + 5] for i in range(32, len(ids), 5)]],
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_logits_equal_the_reference_however_rows_are_fed(models, golden, case, pattern):
    """A term forgotten, or a state that depends on how rows were grouped."""
    logits = feed_parts(models[case], PATTERNS[pattern](golden[f"{case}.ids"]))
    wanted = golden[f"{case}.logits"]
    assert np.abs(wanted).max() > 1
    assert np.abs(logits - wanted).max() < CLOSE


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_ngram_rows_equal_the_reference_as_integers(models, golden, case):
    """A look-back that crosses the end of a text, or a hash that wraps."""
    ids = golden[f"{case}.ids"]
    history = [7, 7, *ids.tolist()]
    assert (models[case].ngram_rows.rows(history, len(ids)) == golden[f"{case}.rows"]).all()


def test_published_sizes_give_the_published_multipliers():
    """A hash that fits the tiny model only."""
    rows = NgramRows(NgramShape(248320, 248044, 3, 8, 20_000_000, 128, 1234, 0))
    assert rows.multipliers.tolist() == [23703573157769, 20109073645365, 8052911324071]
    assert rows.sizes[:3].tolist() == [20000003, 20000023, 20000033]
    assert rows.n_rows == 320001536


def _taps(model, ids, kind, layers):
    state, seen = model.new_state(), {}

    def tap(layer, streams):
        if layer in layers:
            seen[layer] = model.contract(kind, layer, streams)

    run_rows(model, ids.tolist(), state, tap=tap)
    commit(state, len(ids))
    return {layer: np.array(value) for layer, value in seen.items()}


def test_stream_mean_taps_equal_the_reference(model, golden):
    """The tap of layer L taken before its experts wrote, or at layer L - 1."""
    taps = _taps(model, golden["main.ids"], "stream_mean", (1, 3, 6))
    for layer, value in taps.items():
        wanted = golden[f"main.mean{layer}"]
        assert np.abs(value - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_next_attention_read_taps_equal_the_reference(model, golden):
    """A contraction of the right shape and the wrong content."""
    taps = _taps(model, golden["main.ids"], "next_attention_read", (1, 3, 6))
    for layer, value in taps.items():
        assert np.abs(value - golden[f"main.read{layer + 1}"]).max() < 1e-5


@pytest.mark.parametrize("layers", [1, 3])
def test_pipelined_builds_give_the_same_bits(model, golden, layers):
    """A leaf read before it is filled, when layers are handed over while the graph is built."""
    ids = golden["main.ids"].tolist()
    results = []
    for pipeline in (0, layers):
        state = model.new_state()
        mx.eval(run_rows(model, ids[:40], state))
        commit(state, 40)
        results.append(np.array(run_rows(model, ids[40:48], state, submit=every(pipeline))))
    assert (results[0] == results[1]).all()


def test_forms_for_a_gpu_compute_the_same_function(folders, golden, monkeypatch):
    """Fused norms, fused attention and the solve by powers, which a CPU run never reaches."""
    for module in ("norms", "gated_delta", "sparse_attention"):
        monkeypatch.setattr(f"target_svc.models.blocks.{module}.is_cpu", lambda: False)
    ids = golden["main.ids"]
    wanted = golden["main.logits"]
    model = load(folders["main"])
    for parts in ([ids], [ids[:32], *[ids[i : i + 5] for i in range(32, 72, 5)]]):
        assert np.abs(feed_parts(model, parts) - wanted).max() < CLOSE
