"""The BLAS that MLX's products go to."""

import struct
import subprocess
import sys

import numpy as np
import pytest

from common.checkpoint.blas import BlasReport, load_openblas, with_plain_names

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the wheel of MLX differs elsewhere")


@on_linux
def test_products_go_through_openblas_and_are_right():
    """A library that loads and is not used, or answers with the wrong integer width."""
    code = (
        "from common.checkpoint.blas import load_openblas; report = load_openblas()\n"
        "assert report.loaded, report.note\n"
        "import ctypes, numpy as np, mlx.core as mx\n"
        "ctypes.CDLL(None).cblas_sgemm  # among the global symbols\n"
        "x = np.random.default_rng(0).standard_normal((33, 257)).astype(np.float32)\n"
        "y = np.array(mx.array(x) @ mx.array(x).T)\n"
        "assert np.abs(y - x @ x.T).max() < 1e-3\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@on_linux
def test_a_call_after_mlx_says_that_it_came_too_late():
    """A slow target that reports a fast BLAS."""
    code = (
        "import mlx.core\n"
        "from common.checkpoint.blas import load_openblas\n"
        "report = load_openblas(); print(report.loaded, report.note)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("False mlx.core is loaded already")


def test_report_is_the_same_every_time():
    """The second caller being told that it came too late."""
    assert load_openblas() is load_openblas()
    assert set(load_openblas().notes()) == {"blas", "blas_note"}


@pytest.mark.parametrize("image", [b"", b"\x7fELF\x01\x01" + b"\0" * 90, b"MZ" + b"\0" * 90])
def test_files_of_another_kind_are_refused(image):
    """An index error out of a Windows library."""
    with pytest.raises(ValueError, match="ELF64"):
        with_plain_names(image)


def test_an_elf_file_cut_short_is_an_error_load_openblas_catches():
    """A damaged wheel must cost speed, not the start."""
    with pytest.raises((ValueError, struct.error)):
        with_plain_names(b"\x7fELF\x02\x01" + b"\xff" * 80)


def test_notes_name_the_blas_in_use():
    """`ps` shows it."""
    assert BlasReport(False, "", "why").notes() == {"blas": "built in", "blas_note": "why"}
    assert np.dtype(np.float32).itemsize == 4
