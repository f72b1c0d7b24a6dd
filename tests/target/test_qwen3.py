"""qwen3 and qwen3_moe against goldens of transformers, and what their configs may say."""

import numpy as np
import pytest
from support.family_cases import PATTERNS, golden_families, residual_after, worst
from support.target_cases import CLOSE, feed_parts
from support.tiny_qwen3 import CASES, make_tiny_qwen3

from common.errors import ModelMismatch
from target_svc.models.qwen3 import load

GOLDEN = golden_families()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The golden cases' networks by name."""
    place = tmp_path_factory.mktemp("qwen3")
    return {case: load(make_tiny_qwen3(place / case, case=case)) for case in CASES}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_reference_however_rows_are_fed(models, case, pattern):
    """A norm or bias forgotten, an expert of the wrong layer, a mask off by one at a border."""
    assert worst(models[case], GOLDEN, case, pattern) < CLOSE


def test_a_chunk_may_end_anywhere(models):
    """A border that loses a row, or shows one too many."""
    for case in ("qwen3", "qwen3_moe"):
        ids, wanted = GOLDEN[f"{case}.ids"][0][:40], GOLDEN[f"{case}.logits"][0][:40]
        for border in range(1, 40):
            logits = feed_parts(models[case], [ids[:border], ids[border:]])[:, ::16]
            assert np.abs(logits - wanted).max() < CLOSE, (case, border)


@pytest.mark.parametrize("case", ["qwen3", "qwen3_moe"])
def test_a_tap_is_the_residual_after_its_layer(models, case):
    """The tap of layer L taken before its feed-forward was added, or at layer L - 1."""
    got = residual_after(models[case], GOLDEN[f"{case}.ids"][0], 1)[::8]
    assert models[case].facts.contractions == ("stream_mean",)
    assert np.abs(got - GOLDEN[f"{case}.residual"]).max() < CLOSE


def test_forms_for_a_gpu_compute_the_same_function(tmp_path, monkeypatch):
    """Fused attention and norms, which a CPU run never reaches."""
    for module in ("norms", "attention"):
        monkeypatch.setattr(f"target_svc.models.blocks.{module}.is_cpu", lambda: False)
    for case in CASES:
        model = load(make_tiny_qwen3(tmp_path / case, case=case))
        for pattern in ("all at once", "in fives"):
            assert worst(model, GOLDEN, case, pattern) < CLOSE


def test_rope_fields_may_stand_in_either_place(tmp_path, models):
    """Configs before and after they moved into `rope_parameters`."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    other = load(make_tiny_qwen3(tmp_path / "t", rope_parameters=rope, rope_theta=1.0))
    ids = [GOLDEN["qwen3.ids"][0][:50]]
    assert np.array_equal(feed_parts(other, ids), feed_parts(models["qwen3"], ids))


def test_a_copy_of_a_tied_head_is_dropped(tmp_path, models):
    """Small published checkpoints store the tied head a second time."""
    extra = {"lm_head.weight": np.ones((320, 64), np.float32)}
    other = load(make_tiny_qwen3(tmp_path / "t", case="qwen3_tied", extra=extra))
    ids = [GOLDEN["qwen3.ids"][0][:50]]
    assert np.array_equal(feed_parts(other, ids), feed_parts(models["qwen3_tied"], ids))
    assert other.facts.head_name == "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_sliding_window": True}, "use_sliding_window True; only False"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types has .'sliding_attention'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type 'yarn'; implemented are"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; only 'silu'"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path, fields, words):
    """A field ignored is another function computed in silence."""
    with pytest.raises(ModelMismatch, match=words):
        load(make_tiny_qwen3(tmp_path / "t", **fields))


def test_tensors_that_do_not_fit_are_named(tmp_path):
    """A network that runs on weights it never read."""
    folder = make_tiny_qwen3(tmp_path / "t", extra={"model.layers.0.x": np.ones(2, np.float32)})
    with pytest.raises(ModelMismatch, match=r"1 unexpected: model\.layers\.0\.x"):
        load(folder)


def test_a_field_that_is_missing_is_named(tmp_path):
    """A traceback with a bare key."""
    folder = make_tiny_qwen3(tmp_path / "t")
    config = (folder / "config.json").read_text().replace('"rms_norm_eps"', '"eps"')
    (folder / "config.json").write_text(config)
    with pytest.raises(ModelMismatch, match="lacks 'rms_norm_eps'; a qwen3 target needs it"):
        load(folder)
