"""Without a GPU: the text of the kernels, and MLX's own update in their place, against NumPy."""

import logging

import mlx.core as mx
import numpy as np
import pytest
from support.host_kernels import COMPILER, host_kernels
from support.plain_delta import PlainKernels

from target_svc.models.blocks import delta_kernel
from target_svc.models.blocks.delta_kernel import delta_kernels, fit_sizes
from target_svc.models.blocks.delta_library import LibraryDelta

SHAPES = [((1, 3), (16, 32), False), ((2, 2), (48, 16), True)]


def sizes_of(heads, dims, is_silu):
    return fit_sizes(heads, dims, 4, is_silu=is_silu, floor=1e-3, unit_eps=1e-6)


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def on_host(request, tmp_path_factory):
    """The Metal kernels of one shape, compiled for the host."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        yield host_kernels(sizes_of(*request.param), tmp_path_factory.mktemp("kernels"), patch)


@pytest.fixture(params=SHAPES, ids=str)
def library(request):
    return LibraryDelta(sizes_of(*request.param))


def inputs(sizes, rows):
    """Padded, projected, constants, state and norm, random."""
    rng = np.random.default_rng(rows)
    shape = sizes.key_heads, sizes.groups, sizes.key_dim, sizes.value_dim

    def draw(*size):
        return mx.array(rng.standard_normal(size).astype(np.float32))

    constants = draw(sizes.taps, sizes.channels), -mx.abs(draw(sizes.value_heads))
    padded = draw(sizes.taps - 1 + rows, sizes.channels)
    projected = draw(rows, sizes.projected)
    return padded, projected, (*constants, draw(sizes.value_heads)), draw(*shape), draw(shape[3])


def near(got, wanted):
    got, wanted = np.array(got), np.array(wanted)
    assert np.abs(got - wanted).max() < 5e-6 * max(1.0, np.abs(wanted).max())


def check_all_calls(form, rows, keeps):
    """Every call of `form` against NumPy; what no thread wrote is not a number and fails."""
    plain = PlainKernels(form.sizes)
    padded, projected, constants, before, norm = inputs(form.sizes, rows)
    packed = plain.prepare(padded, projected, constants)
    near(form.prepare(padded, projected, constants), packed)
    for keep in keeps:
        for settles in (False, True):
            got = form.run(packed, packed, keep, before, settles=settles)
            wanted = plain.run(packed, packed, keep, before, settles=settles)
            near(got[0], wanted[0])
            near(got[1], wanted[1])
    out = wanted[0]
    near(form.replay(packed, rows, before), plain.replay(packed, rows, before))
    near(form.finish(out, projected, norm), plain.finish(out, projected, norm))


@pytest.mark.parametrize(("rows", "keeps"), [(1, [0, 1]), (4, [0, 2, 4])])
def test_the_metal_text_run_lane_by_lane_computes_the_plain_form(on_host, rows, keeps):
    """An index that reads another head's number, a lane left out of a sum, a state not written."""
    check_all_calls(on_host, rows, keeps)


def test_rows_replayed_by_the_metal_text_keep_their_bits(on_host):
    """A state written a row early or late, or a replay that rounds in another order."""
    padded, projected, constants, before, _ = inputs(on_host.sizes, 5)
    packed = on_host.prepare(padded, projected, constants)
    together, after = on_host.run(packed, packed, 0, before, settles=True)
    out, kept = on_host.run(packed[3:], packed, 3, before, settles=False)
    last, settled = on_host.run(packed[3:], packed[3:], 0, kept, settles=True)
    assert (np.array(out) == np.array(together)[3:]).all()
    assert (np.array(last) == np.array(out)).all()
    assert (np.array(settled) == np.array(after)).all()


@pytest.mark.parametrize(("rows", "keeps"), [(1, [0, 1]), (9, [0, 2, 9]), (70, [0, 70])])
def test_mlx_own_update_computes_the_plain_form(library, rows, keeps):
    """A state handed over without transposing it, or gates in the wrong order."""
    check_all_calls(library, rows, keeps)


def test_a_metal_device_that_refuses_the_kernels_gets_mlx_own_update(monkeypatch, caplog):
    """A text that some compiler does not take must cost speed, not the start."""
    sizes = sizes_of((1, 2), (32, 16), False)

    def refuse(**_):
        raise RuntimeError("unknown word in line 7")

    monkeypatch.setattr(delta_kernel, "device_language", lambda: "metal")
    monkeypatch.setattr(delta_kernel.mx.fast, "metal_kernel", refuse)
    with caplog.at_level(logging.WARNING, logger=delta_kernel.__name__):
        assert isinstance(delta_kernels(sizes), LibraryDelta)
    assert "MLX's own update instead: unknown word in line 7" in caplog.text


def test_a_cuda_device_that_refuses_the_kernels_gets_the_matrix_form(monkeypatch, caplog):
    """There MLX's own update of a prompt is slower than products."""
    sizes = sizes_of((1, 4), (32, 16), False)

    def refuse(**_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(delta_kernel, "device_language", lambda: "cuda")
    monkeypatch.setattr(delta_kernel.mx.fast, "cuda_kernel", refuse)
    with caplog.at_level(logging.WARNING, logger=delta_kernel.__name__):
        assert delta_kernels(sizes) is None
    assert "matrix form instead: no compiler" in caplog.text
