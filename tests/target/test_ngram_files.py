"""Every published form of an n-gram table gives the reference's values; whatever else is named."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.stored import quantize_rows, write_stored
from support.target_cases import CLOSE, feed_parts
from support.tiny import make_tiny_target, random_weights, write_safetensors

from common.checkpoint.index import index_tensors
from common.errors import ConfigError, ModelMismatch
from target_svc.models.blocks.mapped_rows import MappedRows, map_files
from target_svc.models.blocks.ngram_files import TableFacts, open_table
from target_svc.models.blocks.row_formats import (
    BFLOAT16_BITS,
    FLOAT16,
    FLOAT32,
    AffineRows,
    Fp8Rows,
    convert,
)
from target_svc.models.qwen4_exp import load

AT = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding."
N_ROWS, WIDTH, PARTS = 48, 32, 12
FACTS = TableFacts(layer=1, n_rows=N_ROWS, n_used=N_ROWS - 3, width=WIDTH, n_parts=PARTS)
NAMED = {"BF16": BFLOAT16_BITS, "F16": FLOAT16, "F32": FLOAT32}


@pytest.fixture(scope="module")
def golden():
    """What MLX and torch computed; see tests/golden/make_ngram_rows.py."""
    with np.load(Path(__file__).parents[1] / "golden" / "ngram_rows.npz") as stored:
        return dict(stored)


@pytest.fixture
def values():
    """A table of float32 rows."""
    return np.random.default_rng(5).standard_normal((N_ROWS, WIDTH), dtype=np.float32)


def map_stored(folder, **tensors):
    """Mapped rows of (dtype, bits), by name."""
    write_stored(folder / "rows.safetensors", tensors)
    spans = index_tensors(folder)
    files = map_files(list(spans.values()))
    return {name: MappedRows([span], files) for name, span in spans.items()}


def read_all(table):
    """Every row of a table as float32."""
    out = np.empty((table.n_rows, table.width), np.float32)
    table.gather_into(np.arange(table.n_rows)[:, None], out)
    return out


def in_parts(name, dtype, bits, spelling="shard_{}"):
    """A tensor split on rows, by published name."""
    return {
        f"{AT}{spelling.format(part)}.{name}": (dtype, rows)
        for part, rows in enumerate(np.split(bits, PARTS))
    }


def store_quantized(values):
    """Codes, scales and biases as stored."""
    dtypes = {"weight": "U32", "scales": "F32", "biases": "F32"}
    return {name: (dtypes[name], bits) for name, bits in quantize_rows(values, 32).items()}


def dequantize(values):
    """What those mean."""
    made = quantize_rows(values, 32)
    codes = (made["weight"][:, :, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    wide = codes.reshape(len(values), -1, 32).astype(np.float32)
    return (wide * made["scales"][..., None] + made["biases"][..., None]).reshape(values.shape)


# --------------------------------------------------------------------------- values


@pytest.mark.parametrize("case", ["BF16", "F16", "F32", "eight"])
@pytest.mark.parametrize("own", [False, True])
def test_affine_rows_are_those_of_the_reference_bit_by_bit(tmp_path, golden, case, own):
    """Codes from the high end, a group too late, or one rounding where MLX makes two."""
    dtype = "BF16" if case == "eight" else case
    tensors = {name: (dtype, golden[f"{case}.{name}"]) for name in ("scales", "biases")}
    mapped = map_stored(tmp_path, codes=("U32", golden[f"{case}.codes"]), **tensors)
    wanted = NAMED[dtype] if own else FLOAT32
    rows = AffineRows(mapped["codes"], mapped["scales"], mapped["biases"], 160, wanted)
    expected = golden[f"{case}.own" if own else f"{case}.float32"]
    order = np.array([3, 0, 7, 3])
    assert rows.group_size == 32
    assert np.array_equal(rows.read(order), expected[order])


@pytest.mark.parametrize(("name", "wanted"), [("float32", FLOAT32), ("bfloat16", BFLOAT16_BITS)])
def test_every_fp8_code_means_what_torch_says(tmp_path, golden, name, wanted):
    """Subnormals, the sign, or the scale forgotten."""
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    rows = Fp8Rows(
        map_stored(tmp_path, codes=("F8_E4M3", codes))["codes"], scale_of(golden), wanted
    )
    found, expected = rows.read(np.arange(2)).reshape(-1), golden[f"fp8.{name}"]
    is_number = (np.arange(256) & 127) != 127
    assert np.array_equal(found[is_number], expected[is_number])
    assert np.isnan(convert(found, FLOAT32)[~is_number]).all()


def scale_of(golden):
    """The one scale of the FP8 golden."""
    return np.float32(golden["fp8.scale"])


# --------------------------------------------------------------------------- names


@pytest.mark.parametrize("spelling", ["shard_{}", "shards.{}"])
@pytest.mark.parametrize("kind", ["plain", "affine", "fp8"])
def test_a_table_in_the_pack_is_found_by_either_spelling(tmp_path, values, spelling, kind):
    """Parts in the order of their names: 0, 1, 10, 2."""
    if kind == "plain":
        tensors, expected = in_parts("weight", "F32", values, spelling), values
    elif kind == "affine":
        stored = store_quantized(values)
        tensors = {}
        for name, (dtype, bits) in stored.items():
            tensors |= in_parts(name, dtype, bits, spelling)
        expected = dequantize(values)
    else:
        codes = (
            np.full((N_ROWS, WIDTH), 0x38, np.uint8) + np.arange(N_ROWS, dtype=np.uint8)[:, None]
        )
        scale = (AT + "weight_scale", ("F32", np.array([0.5], np.float32)))
        tensors = in_parts("weight", "F8_E4M3", codes, spelling) | dict([scale])
        expected = Fp8Rows(
            map_stored(tmp_path, codes=("F8_E4M3", codes))["codes"], np.float32(0.5), FLOAT32
        ).read(np.arange(N_ROWS))
        (tmp_path / "rows.safetensors").unlink()
        assert expected[0, 0] == 0.5
    write_stored(tmp_path / "model.safetensors", tensors)
    assert np.array_equal(read_all(open_table(index_tensors(tmp_path), FACTS)), expected)


@pytest.mark.parametrize("n_rows", [N_ROWS, N_ROWS - 3])
def test_a_table_in_a_file_of_its_own_is_read(tmp_path, values, n_rows):
    """A pack without its table, or one that stores no padding rows refused."""
    said = {"ngram_bits": "4", "ngram_group_size": "32", "rows": str(n_rows), "dim": str(WIDTH)}
    stored = {f"ngram.{name}": tensor for name, tensor in store_quantized(values[:n_rows]).items()}
    write_stored(tmp_path / "ngram-table.safetensors", stored, said)
    table = open_table({}, FACTS, external=tmp_path / "ngram-table.safetensors")
    assert np.array_equal(read_all(table), dequantize(values)[:n_rows])


@pytest.mark.parametrize(
    ("key", "value"),
    [("rows", "49"), ("dim", "64"), ("ngram_bits", "8"), ("ngram_group_size", "16")],
)
def test_a_file_that_contradicts_its_own_metadata_is_refused(tmp_path, values, key, value):
    """A table of another pack with the same shape."""
    stored = {f"ngram.{name}": tensor for name, tensor in store_quantized(values).items()}
    path = tmp_path / "ngram-table.safetensors"
    write_stored(path, stored, {key: value})
    with pytest.raises(ModelMismatch, match=key):
        open_table({}, FACTS, external=path)


def test_a_missing_table_file_is_named(tmp_path):
    """A bare FileNotFoundError."""
    with pytest.raises(ConfigError, match=r"ngram-table\.safetensors"):
        open_table({}, FACTS, external=tmp_path / "ngram-table.safetensors")


def without(tensors, name):
    """The tensors but one."""
    return {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: without(t, AT + "shard_2.weight"), "11 parts of weight"),
        (lambda t: without(t, AT + "shard_2.scales"), "11 parts of scales"),
        (lambda t: {k: v for k, v in t.items() if "biases" not in k}, "need scales and biases"),
        (lambda t: {k.replace("layers.1.", "layers.3."): v for k, v in t.items()}, "layer 1"),
        (lambda t: t | {AT + "shards.3.scales": t[AT + "shard_3.scales"]}, "part 3 .* twice"),
        (lambda t: t | {AT + "weight_scale": ("F32", np.ones(1, np.float32))}, "weight_scale"),
        (lambda t: t | {AT + "shard_0.biases": ("F32", np.ones((4, 2), np.float32))}, "differ"),
        (lambda t: {k: ("I32", v) if "weight" in k else (d, v) for k, (d, v) in t.items()}, "U32"),
    ],
)
def test_a_quantized_table_that_does_not_fit_is_refused_by_name(tmp_path, values, change, words):
    """Rows read with the groups of other rows."""
    tensors = {}
    for name, (dtype, bits) in store_quantized(values).items():
        tensors |= in_parts(name, dtype, bits)
    write_stored(tmp_path / "model.safetensors", change(tensors))
    with pytest.raises(ModelMismatch, match=words):
        open_table(index_tensors(tmp_path), FACTS)


def test_fp8_rows_without_their_scale_are_refused(tmp_path):
    """Embeddings five thousand times too large."""
    codes = np.zeros((N_ROWS, WIDTH), np.uint8)
    write_stored(tmp_path / "model.safetensors", in_parts("weight", "F8_E4M3", codes))
    with pytest.raises(ModelMismatch, match="weight_scale missing"):
        open_table(index_tensors(tmp_path), FACTS)


# --------------------------------------------------------------------------- a whole target


def test_a_target_with_an_external_table_scores_like_one_with_the_same_rows_inside(tmp_path):
    """The external file taken for weights, or the config's word for it ignored."""
    fields = {"num_hidden_layers": 4, "ple_embed_dim": 256}
    inside = make_tiny_target(tmp_path / "inside", dtype="F32", **fields)
    outside = make_tiny_target(tmp_path / "outside", dtype="F32", **fields)
    config = json.loads((outside / "config.json").read_text())
    tensors = random_weights(config["text_config"], 0)
    names = [f"{AT}shard_{part}.weight" for part in range(4)]
    whole = np.concatenate([tensors.pop(name) for name in names])
    baked = {name: value + 1 if _is_centred(name) else value for name, value in tensors.items()}
    write_safetensors(outside / "model.safetensors", baked, dtype="F32")
    stored = {f"ngram.{name}": tensor for name, tensor in store_quantized(whole).items()}
    write_stored(outside / "ngram-table.safetensors", stored)
    (outside / "config.json").write_text(json.dumps(config | {"ngram_sidecar": True}))
    parts = np.split(dequantize(whole), 4)
    tensors |= dict(zip(names, parts, strict=True))
    write_safetensors(inside / "model.safetensors", tensors, dtype="F32")
    ids = np.arange(8, 38)
    model = load(outside)
    found = feed_parts(model, [ids])
    assert np.abs(found - feed_parts(load(inside), [ids])).max() < CLOSE
    assert model.counters()["ngram_misses"] > 0


def _is_centred(name):
    """Norms to which the maker of external tables adds 1."""
    return "norm" in name.rsplit(".", 2)[-2] and "linear_attn" not in name
