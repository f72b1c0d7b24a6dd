"""Loading is strict: every published spelling works, and whatever does not fit is named."""

import json

import numpy as np
import pytest
from support.target_cases import CLOSE, feed_parts
from support.tiny import (
    PREFIX,
    TEXT,
    make_tiny_target,
    random_weights,
    split_fused_experts,
    write_safetensors,
)

from common.errors import ConfigError, ModelMismatch
from target_svc.load import EngineOptions, load_engine
from target_svc.models.qwen4_exp import load

SMALL = {"num_hidden_layers": 4}


@pytest.fixture
def folder(tmp_path):
    """A four-layer target."""
    return make_tiny_target(tmp_path / "target", **SMALL)


def rewrite(folder, edit):
    """Write the folder's weights again after `edit` changed their dictionary."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    tensors = random_weights(text, 0)
    edit(tensors)
    write_safetensors(folder / "model.safetensors", tensors)


def edit_config(folder, **changes):
    """Change fields of text_config."""
    config = json.loads((folder / "config.json").read_text())
    config["text_config"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))


def logits_of(folder):
    """Logits of 30 tokens."""
    return feed_parts(load(folder), [np.arange(8, 38)])


@pytest.mark.parametrize("options", [{"split_experts": True}, {"shards": 3}, {"dtype": "F32"}])
def test_published_spellings_load_to_the_same_network(folder, tmp_path, options):
    """Experts stacked in the wrong order, a shard left out, a row read from the wrong part."""
    other = make_tiny_target(tmp_path / "other", **options, **SMALL)
    limit = 0.5 if "dtype" in options else CLOSE  # float32 was never rounded to bfloat16
    assert np.abs(logits_of(folder) - logits_of(other)).max() < limit


@pytest.mark.parametrize(
    "spelling", ["full_attention", "indexed_attention", "qwen_sparse_attention"]
)
def test_all_names_of_the_attention_layer_are_known(folder, spelling):
    """A checkpoint saved again by another library."""
    types = [spelling if kind == "full_attention" else kind for kind in TEXT["layer_types"][:4]]
    edit_config(folder, layer_types=types)
    assert load(folder).args.layer_types[3] == spelling


def test_vision_and_mtp_tensors_are_dropped_by_name(folder):
    """A published checkpoint refused for what a text target does not run."""
    extra = np.ones((2, 2), np.float32)
    rewrite(folder, lambda t: t.update({"mtp.fc.weight": extra, "model.visual.x.weight": extra}))
    load(folder)


def test_missing_and_unexpected_tensors_are_named(folder):
    """A network that runs on weights it never read."""
    gone, new = PREFIX + "layers.2.mlp.gate.weight", PREFIX + "layers.2.mlp.gate.bias"

    def edit(tensors):
        tensors[new] = tensors.pop(gone)

    rewrite(folder, edit)
    with pytest.raises(ModelMismatch, match="missing") as caught:
        load(folder)
    assert gone in str(caught.value)
    assert new in str(caught.value)


def test_wrong_shapes_are_named_with_both_shapes(folder):
    """A config of another size than the weights."""
    edit_config(folder, hc_lowrank=16)
    with pytest.raises(ModelMismatch, match=r"is \[24, 256\], needs \[16, 256\]"):
        load(folder)


def test_an_expert_without_a_part_is_named(tmp_path):
    """Experts that move up by one."""
    folder = make_tiny_target(tmp_path / "t", split_experts=True, **SMALL)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    tensors = split_fused_experts(random_weights(text, 0))
    del tensors[PREFIX + "layers.0.mlp.experts.3.up_proj.weight"]
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ModelMismatch, match=r"experts\.3"):
        load(folder)


def test_a_table_with_a_part_missing_is_refused(folder):
    """Rows of one part read as rows of another."""
    part = PREFIX + "layers.1.ple.ple_embedding.ngram_embedding.shard_2.weight"
    rewrite(folder, lambda tensors: tensors.pop(part))
    with pytest.raises(ModelMismatch, match="3 parts"):
        load(folder)


def test_hash_constants_that_differ_from_the_derived_ones_are_refused(folder):
    """Row ids of another seed: fluent nonsense."""
    name = PREFIX + "layers.1.ple.ple_embedding.layer_multipliers"
    rewrite(folder, lambda tensors: tensors.update({name: np.array([1, 3, 5])}))
    with pytest.raises(ModelMismatch, match="layer_multipliers"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type 'yarn'"),
        ({"layer_types": ["linear_attention"] * 3 + ["mamba"]}, "mamba"),
        ({"output_gate_type": "tanh"}, "output_gate_type 'tanh'"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads 2"),
        ({"ple_layer_ids": [1, 2]}, "ple_layer_ids"),
    ],
)
def test_config_values_that_are_not_implemented_are_refused(folder, change, words):
    """A field read and ignored."""
    edit_config(folder, **change)
    with pytest.raises(ModelMismatch, match=words):
        load(folder)


def test_a_config_without_a_needed_field_names_it(folder):
    """A KeyError without a sentence."""
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["hc_count"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelMismatch, match="hc_count"):
        load(folder)


def test_a_target_without_a_table_runs(tmp_path):
    """The n-gram layer taken for granted."""
    folder = make_tiny_target(tmp_path / "t", ple_layer_ids=[], **SMALL)
    assert np.isfinite(logits_of(folder)).all()


def test_another_model_type_is_refused_with_the_known_ones(folder):
    """Weights of one family read by another."""
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "mamba"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelMismatch, match=r"'mamba'; implemented are \['qwen4_exp'"):
        load_engine(folder, None, EngineOptions())


def test_a_folder_that_does_not_exist_is_a_configuration_error(tmp_path):
    """Exit code 2, not a traceback."""
    with pytest.raises(ConfigError, match="not found"):
        load_engine(tmp_path / "nothing", None, EngineOptions())


def test_a_folder_without_a_tokenizer_is_a_configuration_error(folder):
    """A target that starts and cannot say a word."""
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="tokenizer"):
        load_engine(folder, None, EngineOptions())
