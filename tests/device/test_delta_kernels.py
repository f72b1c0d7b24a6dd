"""The Gated DeltaNet kernels on this machine's GPU, against the same in NumPy."""

import mlx.core as mx
import numpy as np
import pytest
from support.plain_delta import PlainKernels

from target_svc.models.blocks.delta_kernel import delta_kernels, fit_sizes

pytestmark = [pytest.mark.device, pytest.mark.timeout(300)]  # kernels are compiled once
ROWS = (1, 2, 3, 8, 16, 65)
SHAPES = [((16, 3), (128, 128), False), ((2, 2), (64, 64), True), ((2, 3), (16, 32), False)]


@pytest.fixture(params=SHAPES, ids=str)
def kernels(request, gpu):
    """Kernels of one shape, and their plain form."""
    heads, dims, is_silu = request.param
    sizes = fit_sizes(heads, dims, 4, is_silu=is_silu, floor=1e-3, unit_eps=1e-6)
    made = delta_kernels(sizes)
    assert made is not None, "the kernels did not compile; see the log"
    return made, PlainKernels(sizes)


def inputs(sizes, rows, dtype=mx.float32):
    rng = np.random.default_rng(rows)
    shape = sizes.key_heads, sizes.groups, sizes.key_dim, sizes.value_dim

    def draw(*size):
        return mx.array(rng.standard_normal(size).astype(np.float32))

    padded = draw(sizes.taps - 1 + rows, sizes.channels).astype(dtype)
    projected = draw(rows, sizes.projected).astype(dtype)
    heads = sizes.value_heads
    constants = draw(sizes.taps, sizes.channels), -mx.abs(draw(heads)), draw(heads)
    return padded, projected, constants, draw(*shape), draw(sizes.value_dim)


def near(got, wanted, limit=2e-5):
    got, wanted = np.array(got.astype(mx.float32)), np.array(wanted.astype(mx.float32))
    assert np.abs(got - wanted).max() < limit * max(1.0, np.abs(wanted).max())


@pytest.mark.parametrize("rows", ROWS)
def test_every_kernel_computes_the_plain_form(kernels, rows):
    """Sources that compile and compute something else."""
    fast, plain = kernels
    padded, projected, constants, before, norm = inputs(fast.sizes, rows)
    packed, wanted = (k.prepare(padded, projected, constants) for k in kernels)
    near(packed, wanted)
    for settles in (False, True):
        for keep in {0, min(1, rows), rows}:
            got = fast.run(packed, packed, keep, before, settles=settles)
            want = plain.run(packed, packed, keep, before, settles=settles)
            near(got[0], want[0])
            near(got[1], want[1])
    out = plain.run(packed, packed, 0, before, settles=False)[0]
    near(fast.finish(out, projected, norm), plain.finish(out, projected, norm))
    near(fast.replay(packed, rows, before), plain.replay(packed, rows, before))


def test_rows_at_once_and_one_by_one_have_the_same_bits(kernels):
    """A verify row that differs from a decode row changes greedy text at near-ties."""
    fast, _ = kernels
    padded, projected, constants, state, _ = inputs(fast.sizes, 16)
    packed = fast.prepare(padded, projected, constants)
    together, after = fast.run(packed, packed, 0, state, settles=True)
    rows = []
    for row in range(16):
        one = packed[row : row + 1]
        out, state = fast.run(one, one, 0, state, settles=True)
        rows.append(np.array(out))
    assert (np.concatenate(rows) == np.array(together)).all()
    assert (np.array(after) == np.array(state)).all()


@pytest.mark.parametrize("keep", [1, 3, 8])
def test_replayed_rows_have_the_bits_of_rows_that_were_run(kernels, keep):
    """Deferred commit: the next round must start from what the accepted rows left."""
    fast, _ = kernels
    padded, projected, constants, before, _ = inputs(fast.sizes, 12)
    packed = fast.prepare(padded, projected, constants)
    old, fresh = packed[:8], packed[8:]
    run = fast.run(old[:keep], old, 0, before, settles=True)[1]
    wanted = fast.run(fresh, fresh, 0, run, settles=False)[0]
    got, after = fast.run(fresh, old, keep, before, settles=False)
    assert (np.array(got) == np.array(wanted)).all()
    assert (np.array(after) == np.array(run)).all()


def test_bfloat16_rows_are_read_as_they_are(kernels):
    """A kernel that takes two bytes for four."""
    fast, plain = kernels
    padded, projected, constants, before, norm = inputs(fast.sizes, 8, mx.bfloat16)
    packed = fast.prepare(padded, projected, constants)
    near(packed, plain.prepare(padded, projected, constants))
    out = plain.run(packed, packed, 0, before, settles=False)[0]
    finished = fast.finish(out, projected, norm)
    assert finished.dtype == mx.bfloat16
    near(finished, plain.finish(out, projected, norm), 1e-2)
