"""qwen3_5, dense and with experts, against goldens of transformers, and its configs."""

import json

import numpy as np
import pytest
from support.family_cases import PATTERNS, golden_families, residual_after, worst
from support.target_cases import feed_parts
from support.tiny import split_fused_experts, write_sharded
from support.tiny_decoder import random_weights
from support.tiny_qwen3_5 import (
    CASES,
    CENTRED,
    PREFIX,
    make_tiny_qwen3_5,
    target_shapes,
    tiny_config,
)

from common.errors import ModelMismatch
from target_svc.models.qwen3_5 import load

GOLDEN = golden_families()
PARITY = 5e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The golden cases' networks by name."""
    place = tmp_path_factory.mktemp("qwen3_5")
    return {case: load(make_tiny_qwen3_5(place / case, case=case)) for case in CASES}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_reference_however_rows_are_fed(models, case, pattern):
    """A norm off by one, the gate of another family, a state that depends on how rows came."""
    assert worst(models[case], GOLDEN, case, pattern) < PARITY


def test_a_chunk_may_end_anywhere(models):
    """A border inside a convolution window or a scan chunk that loses a row."""
    ids, wanted = GOLDEN["qwen3_5.ids"][0], GOLDEN["qwen3_5.logits"][0]
    for border, end in [*((i, 40) for i in range(1, 40)), *((i, 140) for i in range(60, 70))]:
        logits = feed_parts(models["qwen3_5"], [ids[:border], ids[border:end]])[:, ::16]
        assert np.abs(logits - wanted[:end]).max() < PARITY, border


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5_moe"])
def test_a_tap_is_the_residual_after_its_layer(models, case):
    """The tap of layer L taken before its feed-forward was added, or at layer L - 1."""
    got = residual_after(models[case], GOLDEN[f"{case}.ids"][0], 1)[::8]
    assert np.abs(got - GOLDEN[f"{case}.residual"]).max() < PARITY


def test_forms_for_a_gpu_compute_the_same_function(tmp_path, monkeypatch):
    """Fused attention and norms and the solve by powers, which a CPU run never reaches."""
    for module in ("norms", "attention", "gated_delta"):
        monkeypatch.setattr(f"target_svc.models.blocks.{module}.is_cpu", lambda: False)
    for case in ("qwen3_5", "qwen3_5_moe"):
        model = load(make_tiny_qwen3_5(tmp_path / case, case=case))
        for pattern in ("all at once", "in fives"):
            assert worst(model, GOLDEN, case, pattern) < PARITY


# --------------------------------------------------------------------------- published spellings


def _same(folder, model):
    ids = [GOLDEN["qwen3_5.ids"][0][:80]]
    return np.abs(feed_parts(load(folder), ids) - feed_parts(model, ids)).max() < 1e-5


def test_a_text_part_alone_loads_under_its_own_prefix(tmp_path, models):
    """A checkpoint saved by the text class: other names, other config."""
    folder = make_tiny_qwen3_5(tmp_path / "t", prefix="model.")
    (folder / "config.json").write_text(json.dumps(tiny_config()["text_config"]))
    assert _same(folder, models["qwen3_5"])
    assert load(folder).facts.embedding_name == "model.embed_tokens.weight"


def test_layers_may_be_named_by_interval(tmp_path, models):
    """The first published configs have no layer_types."""
    assert _same(make_tiny_qwen3_5(tmp_path / "t", layer_types=None), models["qwen3_5"])


def test_a_quarter_of_a_head_turns_where_the_config_does_not_say(tmp_path, models):
    """Rope over the whole head, as in other families."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    assert _same(make_tiny_qwen3_5(tmp_path / "t", rope_parameters=rope), models["qwen3_5"])


def test_vision_and_mtp_tensors_are_dropped_by_name(tmp_path, models):
    """A published checkpoint refused for what a text target does not run."""
    names = ("mtp.fc.weight", "model.visual.blocks.0.attn.qkv.weight")
    extra = {name: np.ones((2, 2), np.float32) for name in names}
    assert _same(make_tiny_qwen3_5(tmp_path / "t", extra=extra), models["qwen3_5"])


def test_experts_may_be_stored_one_by_one(tmp_path, models):
    """As transformers saves them."""
    folder = make_tiny_qwen3_5(tmp_path / "t", case="qwen3_5_moe")
    text = tiny_config(case="qwen3_5_moe")["text_config"]
    tensors = random_weights(target_shapes(text), 0, CENTRED)
    write_sharded(folder, split_fused_experts(tensors), dtype="F32", shards=1)
    assert _same(folder, models["qwen3_5_moe"])


def test_a_pack_has_one_added_to_its_norms_and_its_kernels_turned(tmp_path, models):
    """Norms doubled or left out: both compute something."""
    folder = make_tiny_qwen3_5(tmp_path / "t")
    packed = {}
    tensors = random_weights(target_shapes(tiny_config()["text_config"]), 0, CENTRED)
    for name, value in tensors.items():
        if name.endswith(CENTRED):
            value = value + 1
        if name.endswith("conv1d.weight"):
            value = np.ascontiguousarray(np.moveaxis(value, 2, 1))
        packed[name.replace(PREFIX, "language_model.model.")] = value
    packed["language_model.lm_head.weight"] = packed.pop("lm_head.weight")
    write_sharded(folder, packed, dtype="F32", shards=1)
    assert _same(folder, models["qwen3_5"])


def test_norms_stored_with_one_added_are_refused_in_a_published_form(tmp_path):
    """A converter's leftovers, which would be used as 2 + w."""
    folder = make_tiny_qwen3_5(tmp_path / "t")
    tensors = random_weights(target_shapes(tiny_config()["text_config"]), 0)
    write_sharded(folder, tensors, dtype="F32", shards=1)
    with pytest.raises(ModelMismatch, match="stores them around 0"):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid'; only 'silu'"),
        ({"attn_output_gate": False}, "attn_output_gate False; only True"),
        ({"attention_bias": True}, "attention_bias True; only False"),
        ({"layer_types": ["linear_attention"] * 3 + ["conv"]}, r"unknown ones \['conv'\]"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers \[1\]"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type 'yarn'"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path, fields, words):
    """A field ignored is another function computed in silence."""
    folder = make_tiny_qwen3_5(tmp_path / "t")
    config = tiny_config()
    config["text_config"].update(fields)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelMismatch, match=words):
        load(folder)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    """A network that runs on weights it never read."""
    folder = make_tiny_qwen3_5(tmp_path / "t", case="qwen3_5_moe")
    config = tiny_config(case="qwen3_5_moe")
    del config["text_config"]["num_experts"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelMismatch, match=r"unexpected: .*mlp\.experts\.down_proj"):
        load(folder)
