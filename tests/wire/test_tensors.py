"""Tensors keep dtype, shape and bits between NumPy and the wire."""

import numpy as np
import pytest

from common.errors import BadTensor
from common.wire.tensors import check, from_ids, from_numpy, from_text, to_ids, to_numpy, to_text


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint8"])
def test_numpy_array_comes_back(dtype):
    """The bits of a feature row must not change."""
    array = np.arange(12).reshape(3, 4).astype(dtype)
    tensor = from_numpy(array)
    check(tensor)
    assert tensor.dtype == dtype
    assert np.array_equal(to_numpy(tensor), array)


def test_bfloat16_travels_as_uint16_bits():
    """NumPy has no bfloat16 and refuses MLX's buffer of it."""
    bits = np.array([[0x3F80, 0xC000]], dtype=np.uint16)
    tensor = from_numpy(bits, "bfloat16")
    check(tensor)
    assert (tensor.dtype, tensor.shape) == ("bfloat16", (1, 2))
    assert np.array_equal(to_numpy(tensor), bits)


@pytest.mark.parametrize(("dtype", "name"), [("float64", ""), ("int32", "float32"), ("uint16", "")])
def test_type_without_a_wire_name_is_refused(dtype, name):
    """A float64 row read as float32 is noise that decodes."""
    with pytest.raises(BadTensor):
        from_numpy(np.zeros(2, dtype), name)


def test_strided_array_is_packed_in_order():
    """A transposed view has the right numbers in the wrong order."""
    array = np.arange(6, dtype=np.int32).reshape(2, 3).T
    assert np.array_equal(to_numpy(from_numpy(array)), array)


def test_array_from_the_wire_is_read_only():
    """It may lie in a buffer that others still read."""
    with pytest.raises(ValueError, match="read-only"):
        to_numpy(from_ids([1, 2]))[0] = 5


def test_text_and_ids_come_back():
    """The two forms of a prompt."""
    assert to_text(from_text("déjà € \U0001f600")) == "déjà € \U0001f600"
    assert to_ids(from_ids([0, 5, 2**31 - 1])) == [0, 5, 2**31 - 1]
    assert to_ids(from_ids([])) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda: to_text(from_ids([1])),
        lambda: to_ids(from_text("x")),
        lambda: to_text(from_numpy(np.array([0xFF, 0xFE], np.uint8))),
        lambda: to_ids(from_numpy(np.array([-1], np.int32))),
    ],
)
def test_wrong_form_of_a_prompt_is_refused(call):
    """Negative ids index a table from its end."""
    with pytest.raises(BadTensor):
        call()
