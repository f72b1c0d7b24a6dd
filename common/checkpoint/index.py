"""Find every tensor of a checkpoint folder by name, without reading its bytes.

Knows the safetensors container: eight bytes of length, a JSON header, then data. Does not know
MLX or any network. Invariant: a span lies inside its file, checked when the index is built.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError, ModelMismatch

_MAX_HEADER_BYTES: Final = 100 * 1024 * 1024  # the container's own limit
_SHARD_INDEX: Final = "model.safetensors.index.json"

#: Container dtype -> NumPy dtype of the stored bits; bfloat16 has none, so its bits are uint16.
_BITS: Final[dict[str, str]] = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "|u1",
    "BOOL": "|b1",
    "F8_E4M3": "|u1",
    "F8_E5M2": "|u1",
}


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Where one tensor's bytes lie."""

    path: Path
    dtype: str  # container spelling, such as "BF16"
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    n_bytes: int

    def map_bits(self) -> NDArray[Any]:
        """Memory-map the stored bits read-only, in the tensor's shape; bfloat16 comes as uint16."""
        bits = np.dtype(_BITS[self.dtype])
        return np.memmap(self.path, dtype=bits, mode="r", offset=self.offset, shape=self.shape)


def read_config(folder: Path) -> dict[str, Any]:
    """Read `config.json` of a checkpoint folder.

    Raises:
        ConfigError: the folder or the file is missing, or the file is not a JSON object.
    """
    if not folder.is_dir():
        raise ConfigError(f"checkpoint folder not found: {str(folder)!r}; give an existing folder")
    return _read_object(folder / "config.json")


def index_tensors(folder: Path) -> dict[str, TensorSpan]:
    """Index all safetensors files of a folder; a shard index, where present, names the files.

    Raises:
        ConfigError: the folder holds no safetensors file.
        ModelMismatch: a file is damaged, a shard is missing, or two files hold one name.
    """
    spans: dict[str, TensorSpan] = {}
    for path in _files(folder):
        for name, span in _read_header(path)[0].items():
            if name in spans:
                raise ModelMismatch(
                    f"tensor {name!r} is in {spans[name].path.name!r} and in {path.name!r}; "
                    "a name may occur once"
                )
            spans[name] = span
    return spans


def index_file(path: Path) -> tuple[dict[str, TensorSpan], dict[str, str]]:
    """Index one safetensors file; returns its tensors by name, and its metadata.

    Raises:
        ConfigError: the file is missing.
        ModelMismatch: the file is damaged.
    """
    if not path.is_file():
        raise ConfigError(f"file not found: {str(path)!r}; the checkpoint's config names it")
    return _read_header(path)


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(f"checkpoint folder not found: {str(folder)!r}; give an existing folder")
    if (folder / _SHARD_INDEX).is_file():
        weight_map = _read_object(folder / _SHARD_INDEX).get("weight_map", {})
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"no *.safetensors file in {str(folder)!r}; give a complete checkpoint")
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ModelMismatch(f"shards missing in {str(folder)!r}: {missing}; copy them there")
    return files


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"file not found: {str(path)!r}; a checkpoint folder must hold it")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"not JSON: {str(path)!r} ({error}); copy the file again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"not a JSON object: {str(path)!r}; copy the file again")
    return value


def _read_header(path: Path) -> tuple[dict[str, TensorSpan], dict[str, str]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ModelMismatch(
                f"damaged header in {str(path)!r}: {length} bytes in a file of {size}; "
                "copy the file again"
            )
        raw = file.read(length)
    start = 8 + length
    try:
        header = json.loads(raw)
        metadata = dict(header.pop("__metadata__", None) or {})
        spans = {name: _span(path, name, entry, start, size) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelMismatch(
            f"unreadable header in {str(path)!r} ({type(error).__name__}: {error}); "
            "copy the file again"
        ) from error
    return spans, metadata


def _span(path: Path, name: str, entry: dict[str, Any], start: int, size: int) -> TensorSpan:
    begin, end = entry["data_offsets"]
    shape, dtype = tuple(int(n) for n in entry["shape"]), str(entry["dtype"])
    if dtype not in _BITS:
        raise ModelMismatch(f"tensor {name!r} has dtype {dtype!r}; known are {sorted(_BITS)}")
    n_bytes = math.prod(shape) * np.dtype(_BITS[dtype]).itemsize
    if begin < 0 or end - begin != n_bytes or start + end > size:
        raise ModelMismatch(
            f"tensor {name!r} in {path.name!r} spans {begin}..{end} of {size - start} bytes; "
            f"{dtype} {list(shape)} needs {n_bytes}"
        )
    return TensorSpan(path, dtype, shape, start + begin, n_bytes)
