"""Packs made by mlx-lm and mlx-vlm themselves: modes, groups, mixed widths, joined names.

The packs lie in `golden/maker_packs`, in bfloat16 as their makers save them; the logits are the
makers' own networks in float32.
"""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.target_cases import feed

from common.errors import ModelMismatch
from target_svc.models import glm5_next, qwen3_5

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(path.name for path in (GOLDEN / "maker_packs").iterdir())
LIMIT = 1e-5  # float32, of logits up to 4.5


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "maker_packs.npz") as stored:
        return dict(stored)


def load(name, folder=None):
    family = glm5_next if name.startswith("glm") else qwen3_5
    return family.load(folder or GOLDEN / "maker_packs" / name)


def changed(name, folder, change):
    """A copy of a pack with its tensors changed."""
    source = GOLDEN / "maker_packs" / name
    tensors = dict(mx.load(str(source / "model.safetensors")))
    change(tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


def test_there_are_packs_of_both_makers_in_every_mode():
    """A golden folder that is empty tests nothing."""
    tables = [
        json.loads((GOLDEN / "maker_packs" / name / "config.json").read_text())["quantization"]
        for name in CASES
    ]
    own = [entry for table in tables for entry in table.values() if isinstance(entry, dict)]
    assert {table["mode"] for table in tables} == {"affine", "mxfp4", "nvfp4"}
    assert {table["group_size"] for table in tables} >= {16, 32, 64}
    assert {entry["bits"] for entry in own} >= {3, 4, 6, 8}
    assert {name.split("_")[0] for name in CASES} == {"lm", "vlm", "glm"}


@pytest.mark.parametrize("name", CASES)
def test_a_pack_gives_its_makers_logits(golden, name):
    """Values rounded to the scales' 16 bits, a mode inherited by a module that names none, and
    parts cut at the wrong rows."""
    model = load(name)
    got = feed(model, model.new_state(), golden["ids"].tolist())
    assert np.abs(got - golden[name]).max() < LIMIT


def test_joined_rows_that_the_config_does_not_explain_are_refused(tmp_path):
    """A config of another size: heads would be cut where there is no border."""

    def change(tensors):
        at = "language_model.model.layers.0.self_attn.o_norm.weight"
        tensors[at.replace("o_norm", "qkv_conv.conv")] = mx.zeros((150, 4, 1))

    with pytest.raises(ModelMismatch, match=r"qkv_conv.* has 150 rows; by the config .*\[64, 64"):
        load("glm", changed("glm_affine", tmp_path, change))


def test_absorbed_keys_without_their_values_are_refused(tmp_path):
    """Half of a latent projection."""

    def change(tensors):
        for part in ("weight", "scales", "biases"):
            tensors.pop(f"language_model.model.layers.1.self_attn.unembed_out.{part}", None)

    with pytest.raises(ModelMismatch, match=r"unembed_out\.weight must be there"):
        load("glm", changed("glm_affine", tmp_path, change))
