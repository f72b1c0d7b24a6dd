"""Give MLX a fast BLAS on Linux CPU.

The Linux wheel of MLX links a reference BLAS that makes eight rows cost eight times one row. A
library whose plain `cblas_*` symbols are global before `mlx.core` is imported answers instead.
`scipy-openblas32` is that library for every x86-64 and arm64 CPU, but spells its symbols
`scipy_cblas_*`, so an in-memory copy is loaded whose symbol table says the plain names.
Invariant: this module never imports MLX, and must run before anything that does.

Source: System V ABI, symbol table; the GNU hash section as read by glibc's `do_lookup_x`.
"""

import ctypes
import importlib.util
import logging
import os
import struct
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

_PACKAGE: Final = "scipy_openblas32"
_PREFIX: Final = b"scipy_"
_RENAMED: Final = b"scipy_cblas_"
_SYMBOL: Final = struct.Struct("<IBBHQQ")  # Elf64_Sym: name, info, other, section, value, size
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_SHT_DYNSYM: Final = 11
_SHT_GNU_HASH: Final = 0x6FFFFFF6


@dataclass(frozen=True, slots=True)
class BlasReport:
    """What `load_openblas` did, for start-up lines and the doctor."""

    loaded: bool  # the library's symbols now win over MLX's own
    path: str  # the library, or "" where none was found
    note: str  # one sentence for a human

    def notes(self) -> dict[str, str]:
        """For `ps` and `bench`."""
        return {"blas": "openblas" if self.loaded else "built in", "blas_note": self.note}


@cache
def load_openblas() -> BlasReport:
    """Load OpenBLAS with plain global symbols; call before the first import of MLX.

    Thread count and spin time are taken by the library from `OPENBLAS_NUM_THREADS` and
    `OPENBLAS_THREAD_TIMEOUT`, which must be set before this process starts.

    Returns:
        The report; a missing library is a warning in the log, never an exception. A second call
        returns the first report.
    """
    if sys.platform != "linux":
        return BlasReport(False, "", "not needed on this platform")
    path = _find()
    if path is None:
        return _warn("", f"{_PACKAGE} is not installed; install it or expect slow verifies")
    if "mlx.core" in sys.modules:
        return _warn(
            str(path), "mlx.core is loaded already; call load_openblas before importing it"
        )
    try:
        _load_global(with_plain_names(path.read_bytes()))
    except (OSError, ValueError, struct.error) as error:
        return _warn(str(path), f"it cannot be loaded ({error}); reinstall {_PACKAGE}")
    return BlasReport(True, str(path), "OpenBLAS answers MLX's matrix products")


def with_plain_names(library: bytes) -> bytes:
    """Rename `scipy_cblas_x` to `cblas_x` in an ELF64 library's dynamic symbol table.

    A name is an offset into a string table, so dropping the prefix means moving the offset past
    it. The hash section is rewritten to match: one bucket that holds all symbols in their order,
    with the filter in front of it filled anew.

    Raises:
        ValueError: not a little-endian ELF64 library with a GNU hash section.
    """
    if library[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a little-endian ELF64 library")
    image = bytearray(library)
    sections = _sections(image)
    symbols = next((entry for entry in sections if entry[1] == _SHT_DYNSYM), None)
    hashes = next((entry for entry in sections if entry[1] == _SHT_GNU_HASH), None)
    if symbols is None or hashes is None:
        raise ValueError("no dynamic symbol table with a GNU hash section")
    strings = sections[symbols[6]][4]
    names = []
    for at in range(symbols[4], symbols[4] + symbols[5], _SYMBOL.size):
        (offset,) = struct.unpack_from("<I", image, at)
        if image.startswith(_RENAMED, strings + offset):
            offset += len(_PREFIX)
            struct.pack_into("<I", image, at, offset)
        names.append(bytes(image[strings + offset : image.index(0, strings + offset)]))
    _rewrite_hashes(image, hashes[4], names)
    return bytes(image)


def _sections(image: bytearray) -> list[tuple[int, ...]]:
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count = struct.unpack_from("<HH", image, 0x3A)
    if table + size * count > len(image):
        raise ValueError(f"section table ends at {table + size * count} of {len(image)} bytes")
    return [_SECTION.unpack_from(image, table + size * index) for index in range(count)]


def _rewrite_hashes(image: bytearray, at: int, names: list[bytes]) -> None:
    n_buckets, first, n_words, shift = struct.unpack_from("<IIII", image, at)
    hashes = [_gnu_hash(name) for name in names[first:]]
    words = [0] * n_words
    for value in hashes:
        words[(value // 64) % n_words] |= 1 << (value % 64) | 1 << ((value >> shift) % 64)
    chain = [value & ~1 for value in hashes]
    chain[-1] |= 1  # the low bit ends a chain
    struct.pack_into("<IIII", image, at, min(n_buckets, 1), first, n_words, shift)
    body = struct.pack(f"<{n_words}QI{len(chain)}I", *words, first, *chain)
    image[at + 16 : at + 16 + len(body)] = body


def _gnu_hash(name: bytes) -> int:
    value = 5381
    for byte in name:
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value


def _load_global(image: bytes) -> None:
    handle = os.memfd_create("openblas-plain-names")
    try:
        with os.fdopen(os.dup(handle), "wb") as file:
            file.write(image)
        ctypes.CDLL(f"/proc/self/fd/{handle}", mode=ctypes.RTLD_GLOBAL)
    finally:
        os.close(handle)


def _find() -> Path | None:
    spec = importlib.util.find_spec(_PACKAGE)
    places = spec.submodule_search_locations if spec is not None else None
    paths = [Path(place) / "lib" / "libscipy_openblas.so" for place in places or ()]
    return next((path for path in paths if path.is_file()), None)


def _warn(path: str, note: str) -> BlasReport:
    logger.warning("OpenBLAS not used: %s", note)
    return BlasReport(False, path, note)
