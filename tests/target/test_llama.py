"""llama against goldens of transformers, and what its configs may say."""

import numpy as np
import pytest
from support.family_cases import PATTERNS, golden_families, residual_after, worst
from support.target_cases import CLOSE, feed_parts
from support.tiny_llama import CASES, TEXT, make_tiny_llama

from common.errors import ModelMismatch
from target_svc.models.blocks.rope import frequencies
from target_svc.models.llama import load

GOLDEN = golden_families()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The golden cases' networks by name."""
    place = tmp_path_factory.mktemp("llama")
    return {case: load(make_tiny_llama(place / case, case=case)) for case in CASES}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_reference_however_rows_are_fed(models, case, pattern):
    """A bias forgotten, frequencies of another scaling, a mask off by one at a border."""
    assert worst(models[case], GOLDEN, case, pattern) < CLOSE


def test_a_chunk_may_end_anywhere(models):
    """A border that loses a row, or shows one too many."""
    ids, wanted = GOLDEN["llama.ids"][0][:40], GOLDEN["llama.logits"][0][:40]
    for border in range(1, 40):
        logits = feed_parts(models["llama"], [ids[:border], ids[border:]])[:, ::16]
        assert np.abs(logits - wanted).max() < CLOSE, border


def test_a_tap_is_the_residual_after_its_layer(models):
    """The tap of layer L taken before its feed-forward was added, or at layer L - 1."""
    got = residual_after(models["llama"], GOLDEN["llama.ids"][0], 1)[::8]
    assert np.abs(got - GOLDEN["llama.residual"]).max() < CLOSE


def test_forms_for_a_gpu_compute_the_same_function(tmp_path, monkeypatch):
    """Fused attention and norms, which a CPU run never reaches."""
    for module in ("norms", "attention"):
        monkeypatch.setattr(f"target_svc.models.blocks.{module}.is_cpu", lambda: False)
    for case in CASES:
        model = load(make_tiny_llama(tmp_path / case, case=case))
        for pattern in ("all at once", "in fives"):
            assert worst(model, GOLDEN, case, pattern) < CLOSE


def test_frequencies_scale_by_how_long_their_waves_are():
    """The bands of Llama 3.1: short waves kept, long ones divided, a ramp between."""
    rope = {**TEXT["rope_scaling"], "rope_theta": 500_000.0}
    rope["original_max_position_embeddings"] = 8192
    plain = frequencies({"rope_theta": 500_000.0}, 128)
    scaled = frequencies(rope, 128)
    waves = 2 * np.pi / plain
    assert np.array_equal(scaled[waves < 8192 / 4], plain[waves < 8192 / 4])
    assert np.allclose(scaled[waves > 8192], plain[waves > 8192] / 8, rtol=1e-6)
    between = (waves > 8192 / 4) & (waves < 8192)
    assert between.any()
    assert (scaled[between] < plain[between]).all()
    assert (scaled[between] > plain[between] / 8).all()


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "su"])
def test_other_rope_types_are_refused_by_name(tmp_path, kind):
    """Scaling ignored: fine on short prompts, wrong on long ones."""
    with pytest.raises(ModelMismatch, match=f"rope_type '{kind}'; implemented are"):
        load(make_tiny_llama(tmp_path / "t", rope_scaling={"type": kind, "factor": 4.0}))


def test_fields_of_the_first_configs_may_be_left_out(tmp_path, models):
    """Llama 2 named no rope_theta, head_dim or biases."""
    folder = make_tiny_llama(tmp_path / "t", case="llama_plain")
    lines = (folder / "config.json").read_text().splitlines()
    names = ("rope_theta", "rope_scaling", "head_dim", "attention_bias", "mlp_bias")
    kept = [line for line in lines if not any(f'"{name}"' in line for name in names)]
    (folder / "config.json").write_text("\n".join(kept))
    ids = [GOLDEN["llama.ids"][0][:50]]
    assert np.array_equal(feed_parts(load(folder), ids), feed_parts(models["llama_plain"], ids))


def test_stored_frequencies_are_dropped_by_name(tmp_path):
    """Old checkpoints keep a buffer that follows from the config."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load(make_tiny_llama(tmp_path / "t", extra={name: np.ones(8, np.float32)}))


def test_tensors_that_do_not_fit_are_named(tmp_path):
    """Biases that a config without `attention_bias` would leave out in silence."""
    folder = make_tiny_llama(tmp_path / "t", case="llama_biased")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"mlp_bias": true', '"mlp_bias": false'))
    with pytest.raises(
        ModelMismatch, match=r"6 unexpected: model\.layers\.0\.mlp\.down_proj\.bias"
    ):
        load(folder)


def test_all_ids_that_end_a_text_are_known(models):
    """A chat that runs on after its second end-of-turn id."""
    assert models["llama"].facts.eos_ids == (7, 6)
