"""Packed products on this machine's GPU: MLX's own kernels against the values they stand for."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.target_cases import arrays_of, feed, feed_parts, fork

from common.checkpoint.matrix import Packed
from common.checkpoint.packed import PackFormat
from target_svc.models.blocks.linear import GatheredLinear, Linear, holds_packed, multiplies
from target_svc.models.blocks.norms import is_cpu
from target_svc.models.family import run_rows
from target_svc.models.qwen4_exp import load
from target_svc.rollback import commit

pytestmark = [pytest.mark.device, pytest.mark.timeout(300)]
GOLDEN = Path(__file__).parents[1] / "golden"
FORMS = [
    PackFormat("affine", 4, 64),
    PackFormat("affine", 8, 64),
    PackFormat("affine", 3, 32),
    PackFormat("affine", 6, 32),
    PackFormat("mxfp4", 4, 32),
    PackFormat("nvfp4", 4, 16),
]
LIMIT = 1e-3  # float32; of products and logits up to 4, whose sums run in another order
SHARE = 2e-2  # bfloat16, of the largest value


def drawn(form, dtype, *shape):
    """A random packed matrix, and rows for it."""
    if not multiplies(form, dtype, shape[-2:]):
        pytest.skip(f"this device does not multiply {form} in {dtype}")
    values = mx.random.normal(shape, key=mx.random.key(1)).astype(dtype) / 16
    parts = mx.quantize(values, group_size=form.group, bits=form.bits, mode=form.mode)
    weight, scales, biases = (*parts, None)[:3]
    x = mx.random.normal((64, shape[-1]), key=mx.random.key(2)).astype(dtype)
    return Packed(weight, scales, biases, form, dtype), x


def exact(matrix):
    """Its values in float32, not rounded to the scales' dtype."""
    scales, biases = matrix.scales, matrix.biases
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return Packed(matrix.weight, scales, biases, matrix.form, mx.float32).values()


def near(got, wanted, dtype):
    got, wanted = (np.array(value.astype(mx.float32)) for value in (got, wanted))
    limit = LIMIT if dtype == mx.float32 else SHARE * np.abs(wanted).max()
    assert np.abs(got - wanted).max() < limit


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_products_for_every_number_of_rows(form, dtype):
    """A kernel that is taken for some numbers of rows only, and reads another format."""
    matrix, x = drawn(form, dtype, 192, 256)
    packed, plain = Linear(matrix), Linear(exact(matrix))
    for rows in (1, 2, 4, 8, 15, 16, 33, 64):
        near(packed(x[:rows]), plain(x[:rows].astype(mx.float32)), dtype)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_chosen_experts(form, dtype):
    """Experts in order and out of it, few rows and many."""
    matrix, x = drawn(form, dtype, 6, 192, 256)
    packed, plain = GatheredLinear(matrix), GatheredLinear(exact(matrix))
    for rows in (1, 8, 64):
        ids = mx.array(np.random.default_rng(rows).integers(0, 6, (rows, 2)), dtype=mx.uint32)
        few = x[:rows, None, None, :]
        near(packed(few, ids), plain(few.astype(mx.float32), ids), dtype)
        order = mx.argsort(ids.flatten())
        sorted_rows, chosen = x[order // 2][:, None, :], ids.flatten()[order]
        wanted = plain(sorted_rows.astype(mx.float32), chosen)
        near(packed(sorted_rows, chosen, is_sorted=True), wanted, dtype)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_row_does_not_depend_on_the_others(form):
    """What roll-back rests on: equal rows have equal bits whatever stands beside them."""
    matrix, x = drawn(form, mx.bfloat16, 192, 256)
    product = Linear(matrix)
    for rows in (2, 8, 16):
        one = x[:rows]
        other = mx.concatenate([one[:1], x[40 : 40 + rows - 1]])
        assert (product(one)[0] == product(other)[0]).all(), rows


@pytest.fixture(scope="module", params=["affine", "mxfp4", "nvfp4"])
def pack(request, gpu):
    """Name and model of a pack of qwen4_exp; auto keeps it packed here."""
    assert not is_cpu()
    model = load(GOLDEN / "packs" / request.param, keep_packed=None)
    if not holds_packed(model):
        pytest.skip(f"this device does not multiply {request.param}")
    return request.param, model


@pytest.mark.parametrize("size", [1, 8, 16, 48])
def test_scores_of_a_pack_are_its_maker_s(pack, size):
    """A whole network whose matrices stay packed."""
    name, model = pack
    with np.load(GOLDEN / "packs.npz") as golden:
        ids, wanted = golden["ids"].tolist(), golden[name]
    parts = [ids[at : at + size] for at in range(0, len(ids), size)]
    assert np.abs(feed_parts(model, parts) - wanted).max() < 5 * LIMIT


@pytest.mark.parametrize("keep", [1, 3, 8])
def test_two_wrong_tails_leave_the_same_bits(pack, keep):
    """Rejected rows must leave nothing, though rows of another number may round otherwise."""
    _, model = pack
    text = np.random.default_rng(4).integers(8, 256, 60).tolist()
    state = model.new_state()
    feed(model, state, text[:33])
    after = []
    for wrong in (9, 200):
        one = fork(state)
        rows = [*text[33 : 33 + keep], *[wrong] * (8 - keep)]
        mx.eval(run_rows(model, rows, one), *one.arrays())
        commit(one, keep)
        after.append({**arrays_of(one), "next": feed(model, one, text[33 + keep : 41 + keep])})
    for piece, numbers in after[0].items():
        assert np.array_equal(numbers, after[1][piece]), piece
