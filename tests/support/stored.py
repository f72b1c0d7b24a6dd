"""Write safetensors files of any stored dtype, with metadata, and quantize rows in NumPy."""

import json
from pathlib import Path

import numpy as np


def write_stored(
    path: Path,
    tensors: dict[str, tuple[str, np.ndarray]],
    metadata: dict[str, str] | None = None,
) -> None:
    """Write arrays of stored bits as they are.

    Args:
        path: of the file.
        tensors: name -> container dtype, such as "BF16", and an array of its bits.
        metadata: of the file.
    """
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, (dtype, bits) in tensors.items():
        ends = [offset, offset + bits.nbytes]
        header[name] = {"dtype": dtype, "shape": list(bits.shape), "data_offsets": ends}
        offset = ends[1]
    head = json.dumps(header).encode()
    blobs = [np.ascontiguousarray(bits).tobytes() for _, bits in tensors.values()]
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(blobs))


def quantize_rows(table: np.ndarray, group_size: int, bits: int = 4) -> dict[str, np.ndarray]:
    """Affine groups of float32 rows, 4 or 8 bits: codes uint32, scales and biases float32."""
    groups = table.reshape(len(table), -1, group_size)
    low, high = groups.min(axis=2), groups.max(axis=2)
    scales = ((high - low) / (2**bits - 1)).astype(np.float32)
    codes = np.rint((groups - low[..., None]) / scales[..., None]).astype(np.uint32)
    each = np.arange(32 // bits, dtype=np.uint32)
    words = codes.reshape(len(table), -1, len(each)) << (bits * each)
    return {"weight": words.sum(axis=2, dtype=np.uint32), "scales": scales, "biases": low}


def plain_rows(packed: dict[str, np.ndarray], group_size: int, bits: int) -> np.ndarray:
    """The float32 rows that packed ones of `quantize_rows` stand for."""
    shifts = bits * np.arange(32 // bits, dtype=np.uint32)
    codes = (packed["weight"][..., None] >> shifts) & np.uint32(2**bits - 1)
    groups = codes.reshape(len(codes), -1, group_size).astype(np.float64)
    rows = groups * packed["scales"][..., None] + packed["biases"][..., None]
    return rows.reshape(len(codes), -1).astype(np.float32)
