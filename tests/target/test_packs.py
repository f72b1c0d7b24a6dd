"""Targets packed by other tools load as what they are: same numbers, whoever stored them.

The packs in `golden/packs` have mlx-vlm's names and quantizer; their logits are mlx-vlm's own.
"""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.target_cases import feed
from support.tiny import make_tiny_target

from common.errors import ModelMismatch
from target_svc.models.qwen4_exp import load

GOLDEN = Path(__file__).parents[1] / "golden"
CENTRED = ("hc_norm", "norm_key", "norm_query", "norm_conv", "q_norm", "k_norm", "layernorm")


SMALL = {"num_hidden_layers": 4, "ple_embed_dim": 256, "indexer_budget": 1024}


@pytest.fixture(scope="module")
def packs():
    return np.load(GOLDEN / "packs.npz")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return make_tiny_target(tmp_path_factory.mktemp("hf"), seed=5, dtype="F32", **SMALL)


def rewrite(source, folder, change, **config):
    """A copy of a checkpoint with its tensors changed."""
    folder.mkdir()
    tensors = change(dict(mx.load(str(source / "model.safetensors"))))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    whole = json.loads((source / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(whole))
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    return folder


def logits_of(folder, ids):
    model = load(folder)
    return feed(model, model.new_state(), ids)


@pytest.mark.parametrize("name", ["affine", "mxfp4", "nvfp4"])
def test_a_pack_gives_its_makers_logits(packs, name):
    """Bits, groups, overrides per module, names, convolutions and norms of another tool."""
    got = logits_of(GOLDEN / "packs" / name, packs["ids"].tolist())
    assert np.abs(got - packs[name]).max() < 1e-4


IDS = list(range(20, 60))


def test_a_pack_that_adds_one_to_norms_and_keeps_its_table_apart_is_the_same(published, tmp_path):
    """Norms read as 1 + w twice, and an n-gram table looked for where it is not."""

    values = []

    def change(tensors):
        out, parts = {}, {}
        for name, value in tensors.items():
            if ".shard_" in name:
                parts[int(name.split("shard_")[1].split(".")[0])] = value
            elif "ple_embedding" in name:
                continue
            else:
                moved = name.replace("model.language_model.", "language_model.model.")
                moved = moved.replace("lm_head", "language_model.lm_head")
                moved = moved.replace("ple.conv1d.weight", "ple.conv_weight")
                is_norm = any(part in name for part in CENTRED)
                value = mx.moveaxis(value, 1, 2) if value.ndim == 3 and "conv" in name else value
                out[moved] = value + 1.0 if is_norm else value
        table = mx.concatenate([parts[k] for k in sorted(parts)])
        quantized = mx.quantize(table.astype(mx.float32), group_size=32, bits=8)
        values.append(mx.dequantize(*quantized, group_size=32, bits=8))
        side = dict(zip(("ngram.weight", "ngram.scales", "ngram.biases"), quantized, strict=True))
        facts = {"ngram_bits": 8, "ngram_group_size": 32}
        facts |= {"rows": table.shape[0], "dim": table.shape[1]}
        mx.save_safetensors(
            str(tmp_path / "ngram-table.safetensors"),
            side,
            {key: str(value) for key, value in facts.items()},
        )
        return out

    if (
        json.loads((published / "config.json").read_text())["text_config"]["ple_embed_dim"]
        // 8
        % 32
    ):
        pytest.skip("rows of the tiny table are narrower than a group")
    folder = rewrite(published, tmp_path / "pack", change, ngram_sidecar=True)
    (tmp_path / "ngram-table.safetensors").rename(folder / "ngram-table.safetensors")

    def with_values(tensors):
        names = sorted(
            (name for name in tensors if ".shard_" in name),
            key=lambda name: int(name.split("shard_")[1].split(".")[0]),
        )
        return tensors | dict(zip(names, mx.split(values[0], len(names)), strict=True))

    plain = rewrite(published, tmp_path / "plain", with_values)
    assert np.abs(logits_of(folder, IDS) - logits_of(plain, IDS)).max() < 1e-5


def test_norms_that_contradict_the_makers_mark_are_refused(published, tmp_path):
    """Silent twice-added ones: fluent nonsense."""

    def change(tensors):
        return {
            name: value + 1.0 if any(part in name for part in CENTRED) else value
            for name, value in tensors.items()
        }

    folder = rewrite(published, tmp_path / "baked", change)
    with pytest.raises(ModelMismatch, match=r"norms of target qwen4_exp.*mean \d\.\d+; .*around 0"):
        load(folder)


def test_fp8_with_block_scales_is_its_values(published, tmp_path):
    """Scales left out, or one scale stretched over another block."""
    wanted = {}

    def change(tensors):
        out = {}
        for name, value in tensors.items():
            if not name.endswith("_proj.weight") or "ple" in name or value.ndim != 2:
                out[name] = value
                continue
            rows, columns = value.shape
            blocks = -(-rows // 16), -(-columns // 32)
            scale = mx.random.uniform(0.01, 0.02, blocks, key=mx.random.key(rows))
            spread = mx.repeat(mx.repeat(scale, 16, 0), 32, 1)[:rows, :columns]
            bits = mx.to_fp8(value / spread)
            out[name], out[name + "_scale_inv"] = bits, scale
            wanted[name] = mx.from_fp8(bits, dtype=mx.float32) * spread
        return out

    fp8 = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    eighths = rewrite(published, tmp_path / "fp8", change, quantization_config=fp8)
    plain = rewrite(published, tmp_path / "plain", lambda tensors: tensors | wanted)
    assert len(wanted) >= 20
    assert (logits_of(eighths, IDS) == logits_of(plain, IDS)).all()
    with pytest.raises(ModelMismatch, match=r"scales \[\d+, \d+\] for .*blocks of \[128, 128\]"):
        load(rewrite(published, tmp_path / "other", lambda tensors: change(tensors)))


PACK_FAULTS = {
    "no table": (lambda config: config.pop("quantization"), "states no quantization"),
    "bits": (lambda config: config["quantization"].update(bits=8), "affine of 8 bits in groups of"),
    "group": (lambda config: config["quantization"].update(group_size=64), "in groups of 64"),
    "mode": (lambda config: config["quantization"].update(mode="int5"), "mode 'int5'; known are"),
    "width": (lambda config: config["quantization"].update(bits=7), "bits 7; known are"),
    "biases": (lambda config: config["quantization"].update(mode="mxfp4"), "biases are there"),
}


@pytest.mark.parametrize("fault", PACK_FAULTS)
def test_a_config_that_contradicts_the_pack_is_refused_with_both_sides(tmp_path, fault):
    """A wrong width dequantizes to noise without a word."""
    source, (spoil, words) = GOLDEN / "packs" / "affine", PACK_FAULTS[fault]
    folder = rewrite(source, tmp_path / "bad", lambda tensors: tensors)
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config")
    spoil(config)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelMismatch, match=words):
        load(folder)


def test_scales_without_their_weight_are_refused(tmp_path):
    """A shard that was left behind."""

    def change(tensors):
        tensors.pop("language_model.lm_head.weight")
        return tensors

    folder = rewrite(GOLDEN / "packs" / "affine", tmp_path / "bad", change)
    with pytest.raises(ModelMismatch, match="lm_head"):
        load(folder)
