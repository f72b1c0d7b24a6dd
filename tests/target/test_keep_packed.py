"""Packs that stay packed: their products against the dequantized ones, and what roll-back rests on.

On CPU MLX multiplies every mode row by row, so rows have the same bits for any number of rows; on a
GPU only for the same number (`tests/device/test_packed.py`), and nothing here asks for more where
it compares rounds.
"""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.target_cases import arrays_of, feed, feed_parts, fork

from common.checkpoint.index import read_config
from common.checkpoint.matrix import Packed, join, rows_of, scaled, stack, values_of
from common.checkpoint.packed import PackFormat
from common.errors import ConfigError
from common.settings import TargetConfig
from target_svc.__main__ import options_of
from target_svc.load import FAMILIES
from target_svc.models.blocks import linear
from target_svc.models.blocks.linear import (
    Embedding,
    GatheredLinear,
    Linear,
    Tensors,
    holds_packed,
)
from target_svc.models.blocks.moe import Experts, ExpertWeights
from target_svc.models.family import arrays_in, run_rows
from target_svc.rollback import commit

GOLDEN = Path(__file__).parents[1] / "golden"
PACKS = [
    *(f"packs/{name}" for name in ("affine", "mxfp4", "nvfp4")),
    *(f"maker_packs/{path.name}" for path in sorted((GOLDEN / "maker_packs").iterdir())),
]
LIMIT = 2e-5  # float32, of logits up to 4.5; both ways sum the same values in another order
FORMS = [
    PackFormat("affine", 4, 64),
    PackFormat("affine", 3, 32),
    PackFormat("affine", 8, 32),
    PackFormat("mxfp4", 4, 32),
    PackFormat("nvfp4", 4, 16),
]
ROWS = 8


def load(name, keep_packed):
    folder = GOLDEN / name
    family = FAMILIES[read_config(folder)["model_type"]]
    return family(folder, keep_packed=keep_packed)


def pack(values, form):
    weight, scales, biases = (*mx.quantize(values, form.group, form.bits, form.mode), None)[:3]
    return Packed(weight, scales, biases, form, mx.float32)


def draw(*shape, seed=0):
    return mx.random.normal(shape, key=mx.random.key(seed))


def near(got, wanted, limit=5e-5):
    assert np.abs(np.array(got) - np.array(wanted)).max() < limit


# --------------------------------------------------------------------------- whole networks


@pytest.mark.parametrize("name", PACKS)
def test_a_pack_that_stays_packed_gives_the_scores_of_its_values(name):
    """A matrix whose rows, order, gain or format were lost on the way to its product."""
    ids = np.random.default_rng(3).integers(8, 256, 40).tolist()
    packed, plain = load(name, True), load(name, False)
    assert holds_packed(packed)
    assert not holds_packed(plain)
    parts = [ids[:25], ids[25:26], ids[26:32], ids[32:]]
    near(feed_parts(packed, parts), feed_parts(plain, parts), LIMIT)


@pytest.mark.parametrize("name", ["packs/affine", "maker_packs/lm_mixed", "maker_packs/glm_mixed"])
def test_packed_weights_take_the_memory_of_the_pack(name):
    """Values that stay beside what was to replace them."""
    sizes = [
        sum(array.nbytes for array in arrays_in(list(load(name, keep).__dict__.values())))
        for keep in (True, False)
    ]
    assert sizes[0] < 0.6 * sizes[1]


@pytest.mark.parametrize("name", ["packs/nvfp4", "maker_packs/lm_moe", "maker_packs/glm_affine"])
def test_two_wrong_tails_leave_the_same_bits(name):
    """Roll-back on packed products: rejected rows must leave nothing, for any number kept."""
    model, text = load(name, True), np.random.default_rng(4).integers(8, 256, 80).tolist()
    state = model.new_state()
    feed(model, state, text[:33])
    for keep in range(1, ROWS + 1):
        after = []
        for wrong in (9, 200):
            one = fork(state)
            rows = [*text[33 : 33 + keep], *[wrong] * (ROWS - keep)]
            mx.eval(run_rows(model, rows, one))
            commit(one, keep)
            after.append({**arrays_of(one), "next": feed(model, one, text[33 + keep : 36 + keep])})
        for piece, numbers in after[0].items():
            assert np.array_equal(numbers, after[1][piece]), (keep, piece)


# --------------------------------------------------------------------------- products


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 16])
def test_products_of_every_format(form, rows):
    """Parts in another order than their outputs, or a gain that a format cannot hold."""
    x, bias = draw(rows, 128, seed=1), draw(200, seed=2)
    parts = [draw(64, 128, seed=3), draw(96, 128, seed=4), draw(40, 128, seed=5)]
    matrices = [pack(parts[0], form), pack(parts[1], FORMS[2]), parts[2]]
    wanted = [x @ values_of(matrix).T for matrix in matrices]
    near(Linear(*matrices)(x), mx.concatenate(wanted, axis=-1))
    near(Linear(*matrices, bias=bias, gain=2.0)(x), 2 * mx.concatenate(wanted, axis=-1) + bias)
    one_by_one = [Linear(matrices[0])(x[row : row + 1]) for row in range(rows)]
    assert (mx.concatenate(one_by_one) == Linear(matrices[0])(x)).all()  # on CPU


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_chosen_experts_of_every_format(form):
    """Experts gathered by another's scales."""
    experts = pack(draw(5, 64, 128), form)
    x = draw(6, 128, seed=1)
    ids = mx.array([[4, 0], [1, 1], [2, 3], [0, 4], [3, 2], [1, 0]], dtype=mx.uint32)
    got = GatheredLinear(experts, 2.0)(x[:, None, None, :], ids).squeeze(-2)
    wanted = GatheredLinear(experts.values(), 2.0)(x[:, None, None, :], ids).squeeze(-2)
    near(got, wanted)
    order = mx.argsort(ids.flatten())
    rows, chosen = x[order // 2][:, None, :], ids.flatten()[order]
    ordered = GatheredLinear(experts, 2.0)(rows, chosen, is_sorted=True).squeeze(-2)
    near(ordered[mx.argsort(order)].reshape(got.shape), wanted)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_embedding_rows_are_the_values(form):
    """Rows of a pack are looked up, not multiplied: they must be equal to the bit."""
    table, ids = pack(draw(40, 128), form), mx.array([3, 39, 3, 0])
    assert (Embedding(table)(ids) == table.values()[ids]).all()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_is_done_to_a_packed_matrix_is_done_to_its_values(form):
    """Rows taken of weights and not of scales."""
    one, two = pack(draw(48, 128), form), pack(draw(16, 128, seed=1), form)
    places = mx.array([5, 1, 40])
    assert (values_of(rows_of(one, places)) == one.values()[places]).all()
    assert (values_of(rows_of(one, slice(4, 9))) == one.values()[4:9]).all()
    both = join([one, two])
    assert isinstance(both, Packed)
    assert (both.values() == mx.concatenate([one.values(), two.values()])).all()
    assert (stack([one, one]).values() == mx.stack([one.values()] * 2)).all()
    near(values_of(scaled(one, 0.5)), 0.5 * one.values(), 1e-6)
    assert isinstance(scaled(one, 0.5), Packed) == (form.mode == "affine")
    assert not isinstance(join([one, draw(4, 128)]), Packed)


@pytest.mark.parametrize("shared", [FORMS[0], FORMS[2], None], ids=str)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("rows", [1, 40])
def test_a_shared_expert_is_one_more_or_stands_apart(shared, width, rows):
    """Shared experts of 8 bits, or wider, beside experts of 4: two products, one sum."""
    gate_up, down = pack(draw(5, 128, 128) / 11, FORMS[0]), pack(draw(5, 128, 64) / 8, FORMS[0])
    both, out = draw(2 * width, 128, seed=1) / 11, draw(128, width, seed=2) / 8
    if shared is not None:
        both, out = pack(both, shared), pack(out, shared)
    own = [draw(5, 128, seed=3) / 11, gate_up, down, both, out, draw(1, 128, seed=4) / 11]
    values = [values_of(matrix) for matrix in own]
    x = draw(rows, 128, seed=5)
    one = Experts(ExpertWeights(*own), 2, normalize=True)
    two = Experts(ExpertWeights(*values), 2, normalize=True)
    near(one(x), two(x))
    assert (one._apart is None) == (shared == FORMS[0] and width == 64)


# --------------------------------------------------------------------------- the switch


def test_auto_keeps_nothing_packed_on_a_cpu():
    """The slower of two ways taken silently."""
    assert options_of(TargetConfig(), None).keep_packed is None
    assert not holds_packed(load("packs/affine", None))


@pytest.mark.parametrize(("asked", "kept"), [("on", True), ("off", False)])
def test_the_setting_reaches_the_engine(asked, kept):
    """A key that is read and forgotten."""
    assert options_of(TargetConfig(keep_packed=asked), None).keep_packed is kept


def test_a_format_that_the_device_does_not_multiply_is_refused_or_dequantized(monkeypatch):
    """A switch that says on and quietly means off."""
    monkeypatch.setattr(linear, "multiplies", lambda form, dtype, shape: False)
    with pytest.raises(
        ConfigError, match=r"keep_packed: 'on', but .* affine of 8 bits in groups of 64"
    ):
        load("packs/mxfp4", True)
    monkeypatch.setattr(linear, "is_cpu", lambda: False)  # where auto would keep them
    tensors = Tensors({"a": pack(draw(8, 64), FORMS[3])}, keep_packed=None)
    assert isinstance(tensors.matrix("a"), mx.array)


def test_a_device_is_tried_once_for_each_format(monkeypatch):
    """A whole load that ends in a stack of a kernel that does not exist."""

    def fails(*args, **kwargs):
        raise RuntimeError("no kernel")

    linear.multiplies.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(mx, "gather_qmm", fails)
        assert not linear.multiplies(FORMS[0], mx.float32, (20, 128))
    linear.multiplies.cache_clear()
    assert all(linear.multiplies(form, mx.float32, (9001, 128)) for form in FORMS)
