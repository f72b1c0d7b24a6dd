"""Drafters that a pack maker quantized: the drafts of the same weights stored plainly.

What a packed tensor stands for is worked out here in NumPy, not by MLX.
"""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.drafter_cases import (
    KEPT_IDS,
    KEPT_SLOTS,
    PACKED,
    RUN_SIZES,
    anchor_of,
    config_of,
    taps_of,
)
from support.stored import plain_rows, quantize_rows, write_stored
from support.tiny import make_tiny_target
from support.tiny_drafter import (
    H,
    fuse,
    make_stand_in_target,
    make_tiny_drafter,
    tiny_config,
    tiny_tensors,
)

from common.checkpoint.network import read_network
from common.errors import ModelMismatch
from common.wire.version import card_mismatch
from drafter_svc import device, host
from drafter_svc.drafter import Drafter
from drafter_svc.load import load
from target_svc.models import qwen4_exp
from target_svc.taps import load_taps

GOLDEN = Path(__file__).parents[1] / "golden"
GROUP, B = 32, 8
CODEBOOKS = ("predecessor_codebook", "successor_codebook")
RANK = {"selector_rank": GROUP}  # so that a row of a codebook is one group


def is_packed(name):
    """What mlx-vlm's `quantize` takes: matrices of linear layers and of the two codebooks."""
    return name.endswith((*CODEBOOKS, "proj.weight", "fc.weight", "_projection.weight"))


def bits_of(name, bits):
    """Codebooks are kept at 8 bits by a table entry of their own."""
    return 8 if name.endswith(CODEBOOKS) else bits


def stored_name(name):
    """A pack's spelling: its codebooks are embedding modules, whose weight has a suffix."""
    return name if name.endswith(".weight") else name + ".weight" * name.endswith(CODEBOOKS)


def packed_tensors(tensors, bits):
    """What lies on disk: name -> container dtype and array."""
    out = {}
    for name, tensor in tensors.items():
        if not is_packed(name):
            out[stored_name(name)] = ("F32", tensor)
            continue
        module = stored_name(name).removesuffix(".weight")
        parts = quantize_rows(tensor, GROUP, bits_of(name, bits))
        out |= {
            f"{module}.{part}": ("U32" if part == "weight" else "F32", value)
            for part, value in parts.items()
        }
    return out


def plain_twin(tensors, bits):
    """The float32 values that the packed tensors stand for."""

    def plain(name, tensor):
        wide = bits_of(name, bits)
        return plain_rows(quantize_rows(tensor, GROUP, wide), GROUP, wide)

    return {name: plain(name, t) if is_packed(name) else t for name, t in tensors.items()}


def table_of(bits, *, is_second=True):
    table = {"group_size": GROUP, "bits": bits, "mode": "affine"}
    own = {"group_size": GROUP, "bits": 8}
    books = {f"candidate_selector.{name}": own for name in CODEBOOKS} if is_second else {}
    return table | books | {"norm": False}


def make_pack(folder, target, bits, *, is_second=True, edit=None, table=None):
    """A packed drafter folder, and the plain values of its tensors."""
    changes = RANK if is_second else {}
    kept = {}
    make_tiny_drafter(folder, target, 3, is_second=is_second, edit=kept.update, **changes)
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = table or table_of(bits, is_second=is_second)
    (folder / "config.json").write_text(json.dumps(config))
    stored = packed_tensors(kept, bits)
    if edit:
        edit(stored)
    write_stored(folder / "model.safetensors", stored)
    return folder, plain_twin(kept, bits)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_stand_in_target(tmp_path_factory.mktemp("target"))


def blocks_of(drafter, n_rounds=6):
    """Logits and drafts of a session that grows past the window."""
    rows = np.random.default_rng(2).standard_normal((5 * n_rounds, H)).astype(np.float32)
    context, found = drafter.open("s", 100), []
    for start in range(0, len(rows), 5):
        drafter.append(context, rows[start : start + 5], start)
        model, anchor = drafter._model, start * 7 % 256
        logits = np.array(model.logits(model.hidden(anchor, context)))
        found.append((logits, drafter.draft(context, anchor, B - 1)))
    return found


@pytest.mark.parametrize("kernels", [host, device], ids=["host", "device"])
@pytest.mark.parametrize("is_second", [True, False], ids=["DFlash2", "DFlash"])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_pack_drafts_what_its_plain_values_draft(tmp_path, target, bits, is_second, kernels):
    """Stops: a pack that is refused, or read with another group, width or override."""
    packed, values = make_pack(tmp_path / "packed", target, bits, is_second=is_second)
    changes = {"is_second": is_second} | (RANK if is_second else {})
    plain = tmp_path / "plain"
    folders = [
        packed,
        make_tiny_drafter(plain, target, 3, edit=lambda t: t.update(values), **changes),
        make_tiny_drafter(tmp_path / "wide", target, 3, **changes),
    ]
    found, twin, wide = (blocks_of(Drafter(load(each, target, kernels))) for each in folders)
    for (logits, block), (others, other) in zip(found, twin, strict=True):
        np.testing.assert_allclose(logits, others, atol=1e-5)
        assert block.draft_ids == other.draft_ids
        np.testing.assert_allclose(block.confidences, other.confidences, atol=1e-5)
    assert max(np.abs(a - b).max() for (a, _), (b, _) in zip(found, wide, strict=True)) > 1e-3


def without(name):
    return lambda stored: stored.pop(name)


@pytest.mark.parametrize(
    ("edit", "table", "words"),
    [
        (without("fc.scales"), None, "1 wrong shape: fc.weight"),
        (without("fc.biases"), None, "fc: biases are missing"),
        (without("layers.1.mlp.up_proj.weight"), None, "up_proj.scales belongs to no weight"),
        (without("norm.weight"), None, "1 missing: norm.weight"),
        (lambda s: s.update({"x.weight": s["norm.weight"]}), None, "1 unexpected: x.weight"),
        (None, {"group_size": GROUP, "bits": 8}, "affine of 8 bits in groups of 32"),
        (None, {"group_size": 64, "bits": 4}, "4 bits in groups of 64"),
        (None, {"group_size": GROUP, "bits": 7}, "quantization bits 7"),
        (None, {"group_size": GROUP, "bits": 4, "mode": "int4"}, "quantization mode 'int4'"),
        (None, {"bits": 4}, "group_size None"),
        (None, {"norm": False}, "states no quantization"),
    ],
)
def test_a_pack_that_does_not_fit_its_table_is_refused(tmp_path, target, edit, table, words):
    """Stops: strictness given up for packs, which then draft badly and say nothing."""
    folder, _ = make_pack(tmp_path / "d", target, 4, edit=edit, table=table)
    with pytest.raises(ModelMismatch, match=words):
        load(folder, target)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_target_reads_packed_features_as_the_drafter_fingerprints_them(tmp_path, bits):
    """Stops: `fc` of a pack used as it lies, or two packs that differ in scales alone pairing."""
    target = make_tiny_target(tmp_path / "target", seed=3, dtype="F32")
    packed, values = make_pack(tmp_path / "a", target, bits)
    model = qwen4_exp.load(target)
    taps, hashes = load_taps(packed, model)
    rows = np.random.default_rng(1).standard_normal((5, 3 * H)).astype(np.float32)
    found = taps.fuse([mx.array(part) for part in np.split(rows, 3, axis=1)])
    np.testing.assert_allclose(np.array(found), fuse(values, rows), atol=1e-4)

    card = load(packed, target).card
    assert (card.fc_hash, card.norm_hash) == (hashes.fc, hashes.norm)

    def scale(stored):
        stored["fc.scales"] = ("F32", stored["fc.scales"][1] * 1.01)

    other, _ = make_pack(tmp_path / "b", target, bits, edit=scale)
    assert load_taps(other, model)[1].fc != hashes.fc
    assert "fc_hash differs" in card_mismatch(
        "target.1", card, "drafter.1", load(other, target).card
    )


def test_the_twin_is_not_the_pack():
    """Stops: a quantizer that rounds nothing, with which every test above would pass."""
    tensors = tiny_tensors(
        tiny_config({"hidden_size": H, "num_hidden_layers": 8, "vocab_size": 256})
    )
    errors = []
    for bits in (8, 4):
        twin = plain_twin({"fc.weight": tensors["fc.weight"]}, bits)
        errors.append(np.abs(twin["fc.weight"] - tensors["fc.weight"]).max())
    assert 1e-5 < errors[0] < errors[1] / 8 < 0.1


@pytest.mark.parametrize("kernels", [host, device], ids=["host", "device"])
def test_a_pack_by_mlx_vlm_drafts_what_it_drafts_there(target, kernels):
    """Stops: names, overrides or a table that only our own writer spells as the reader does.

    The pack is mlx-vlm's, 4 bits and 8 for the codebooks; so are logits and drafts.
    """
    drafter = Drafter(load(GOLDEN / "packs" / "drafter", target, kernels))
    values = read_network(GOLDEN / "packs" / "drafter").tensors
    plain = {name: np.array(values[name]) for name in ("fc.weight", "hidden_norm.weight")}
    features = fuse(plain, taps_of(config_of(PACKED), sum(RUN_SIZES)))
    context = drafter.open("s", 200)
    with np.load(GOLDEN / "drafter_runs.npz") as goldens:
        expected = zip(
            goldens["packed/mlx_vlm/logits"], goldens["packed/mlx_vlm/drafts"], strict=True
        )
        for end, (logits, drafts) in zip(np.cumsum(RUN_SIZES).tolist(), expected, strict=True):
            drafter.append(context, features[context.end : end], context.end)
            model, anchor = drafter._model, anchor_of(end)
            found = np.array(model.logits(model.hidden(anchor, context)))
            np.testing.assert_allclose(found[list(KEPT_SLOTS), KEPT_IDS], logits, atol=1e-4)
            assert list(drafter.draft(context, anchor, B - 1).draft_ids) == drafts.tolist()
