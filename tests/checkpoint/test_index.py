"""Reading safetensors folders strictly."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.tiny import write_safetensors, write_sharded

from common.checkpoint.fingerprint import (
    fingerprint_module,
    fingerprint_tensor,
    fingerprint_tokenizer,
)
from common.checkpoint.index import index_tensors, read_config
from common.checkpoint.network import read_network
from common.checkpoint.weights import load_strict, require_exactly
from common.errors import ConfigError, ModelMismatch

TENSORS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
    "b.weight": np.arange(4, dtype=np.float32),
    "c.ids": np.array([1, 2, 3]),
}


@pytest.fixture
def folder(tmp_path):
    """One bfloat16 file."""
    write_safetensors(tmp_path / "model.safetensors", TENSORS)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_single_file_and_shards_read_alike(folder, tmp_path):
    """A shard index that is ignored."""
    other = tmp_path / "sharded"
    other.mkdir()
    write_sharded(other, TENSORS, dtype="BF16", shards=2)
    (other / "config.json").write_text("{}")
    one, two = read_network(folder).tensors, read_network(other).tensors
    assert one.keys() == two.keys() == TENSORS.keys()
    for name in TENSORS:
        assert np.array_equal(np.array(one[name]), np.array(two[name]))


def test_floats_become_float32_on_cpu_and_integers_stay(folder):
    """bfloat16 products on CPU, which are many times slower."""
    mx.set_default_device(mx.cpu)
    tensors = read_network(folder).tensors
    assert tensors["a.weight"].dtype == mx.float32
    assert tensors["c.ids"].dtype == mx.int64
    assert np.abs(np.array(tensors["a.weight"]) - TENSORS["a.weight"]).max() < 4e-3


def test_only_wanted_names_are_read(folder):
    """A table of 95 GiB pulled into memory."""
    read = read_network(folder, keep=lambda name: name.startswith("b")).tensors
    assert list(read) == ["b.weight"]


def test_mapped_bits_are_the_stored_ones(folder):
    """An offset that forgets the header."""
    span = index_tensors(folder)["a.weight"]
    bits = span.map_bits()
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    assert bits.shape == (2, 3)
    assert np.abs(values - TENSORS["a.weight"]).max() < 4e-3


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:100], "damaged header|spans"),
        (lambda data: data[:-4], "spans"),
        (lambda data: b"\xff" * 8 + data[8:], "damaged header"),
        (lambda data: data[:8] + b"{" * (len(data) - 8), "header"),
    ],
)
def test_damaged_files_are_named(folder, damage, words):
    """Garbage weights out of half a download."""
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelMismatch, match=words):
        index_tensors(folder)


def test_a_missing_shard_is_named(tmp_path):
    """A network made of the shards that happened to be there."""
    write_sharded(tmp_path, TENSORS, dtype="BF16", shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelMismatch, match="model-00002-of-00002"):
        index_tensors(tmp_path)


def test_a_name_in_two_files_is_refused(folder):
    """The last file wins in silence."""
    write_safetensors(folder / "more.safetensors", {"b.weight": TENSORS["b.weight"]})
    with pytest.raises(ModelMismatch, match=r"'b\.weight' is in"):
        index_tensors(folder)


def test_missing_folders_and_files_are_configuration_errors(tmp_path):
    """A traceback instead of exit code 2."""
    for call in (read_config, index_tensors, fingerprint_tokenizer):
        with pytest.raises(ConfigError):
            call(tmp_path / "nothing")
        with pytest.raises(ConfigError):
            call(tmp_path)
    (tmp_path / "config.json").write_text("[1, 2")
    with pytest.raises(ConfigError, match="not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        read_config(tmp_path)


def test_all_faults_of_a_checkpoint_are_listed_at_once():
    """One fault per attempt."""
    tensors = {"a": mx.zeros((2,)), "x": mx.zeros((1,)), "c": mx.zeros((3, 4))}
    with pytest.raises(ModelMismatch) as caught:
        require_exactly(tensors, {"a": (2,), "b": (1,), "c": (4, 3)}, what="drafter")
    text = str(caught.value)
    for part in ("drafter", "1 missing: b", "1 unexpected: x", "c is [3, 4], needs [4, 3]"):
        assert part in text


def test_modules_are_loaded_strictly():
    """A module that keeps its random start."""
    module = nn.Linear(3, 2, bias=False)
    load_strict(module, {"weight": mx.ones((2, 3))})
    assert np.array(module.weight).sum() == 6
    with pytest.raises(ModelMismatch, match="unexpected: bias"):
        load_strict(module, {"weight": mx.ones((2, 3)), "bias": mx.ones((2,))})


def test_fingerprints_see_every_byte_shape_and_dtype(folder, tmp_path):
    """Two models that look alike to the pairing check."""
    first = index_tensors(folder)["a.weight"]
    seen = {fingerprint_tensor(first)}
    variants = [
        ({"a.weight": TENSORS["a.weight"].T.copy()}, "BF16"),
        ({"a.weight": TENSORS["a.weight"] + 0.01}, "BF16"),
        ({"a.weight": TENSORS["a.weight"]}, "F32"),
    ]
    for index, (tensors, dtype) in enumerate(variants):
        place = tmp_path / str(index)
        place.mkdir()
        write_safetensors(place / "model.safetensors", tensors, dtype=dtype)
        seen.add(fingerprint_tensor(index_tensors(place)["a.weight"]))
    assert len(seen) == 4
    assert all(len(value) == 16 for value in seen)
    spans = index_tensors(folder)
    pair = [spans["a.weight"], spans["b.weight"]]
    packed = dict(zip(("a.weight", "a.scales"), pair, strict=True))
    assert fingerprint_module(packed, "a.weight") not in seen
    assert fingerprint_module(packed | {"a.biases": first}, "a.weight") not in {
        *seen,
        fingerprint_module(packed, "a.weight"),
    }
    assert fingerprint_module({"a.weight": first, "b.scales": first}, "a.weight") in seen


def test_fingerprint_does_not_depend_on_where_the_tensor_lies(folder, tmp_path):
    """The same tensor in another order of the file must pair."""
    other = tmp_path / "other"
    other.mkdir()
    write_safetensors(other / "w.safetensors", dict(reversed(TENSORS.items())))
    one, two = index_tensors(folder)["a.weight"], index_tensors(other)["a.weight"]
    assert one.offset != two.offset
    assert fingerprint_tensor(one) == fingerprint_tensor(two)
    (folder / "config.json").write_text(json.dumps({"a": 1}))
    assert read_config(folder) == {"a": 1}
