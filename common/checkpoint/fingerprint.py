"""Short hashes of what target and drafter must agree on.

Hashes bytes as they lie on disk, so both sides get the same value whatever device they run on.
Does not know MLX. Invariant: equal fingerprints mean equal dtype, shape and bytes.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from common.checkpoint.index import TensorSpan
from common.checkpoint.names import FP8_SCALES
from common.errors import ConfigError

_HEX: Final = 16  # 64 bits: two different tensors collide once in 2^32 pools
_CHUNK_BYTES: Final = 4 * 1024 * 1024


def fingerprint_tensor(span: TensorSpan) -> str:
    """Hash dtype, shape and stored bytes of one tensor; 16 hex digits."""
    digest = hashlib.sha256(f"{span.dtype}{list(span.shape)}".encode())
    with span.path.open("rb") as file:
        file.seek(span.offset)
        left = span.n_bytes
        while left:
            piece = file.read(min(left, _CHUNK_BYTES))
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest()[:_HEX]


def fingerprint_module(spans: Mapping[str, TensorSpan], name: str) -> str:
    """Hash a tensor and, where it is packed, the scales and biases that give it its values.

    Args:
        spans: of a whole checkpoint, by published names.
        name: of the tensor, such as "fc.weight".

    Returns:
        16 hex digits; those of `fingerprint_tensor` where nothing belongs to the tensor.
    """
    module = name.removesuffix(".weight")
    beside = [module + ".scales", module + ".biases", *(name + end for end in FP8_SCALES)]
    parts = [spans[name], *(spans[other] for other in beside if other in spans)]
    if len(parts) == 1:
        return fingerprint_tensor(parts[0])
    joined = "".join(fingerprint_tensor(span) for span in parts)
    return hashlib.sha256(joined.encode()).hexdigest()[:_HEX]


def fingerprint_tokenizer(folder: Path) -> str:
    """Hash `tokenizer.json`; 16 hex digits.

    Raises:
        ConfigError: the file is missing.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"tokenizer not found: {str(path)!r}; a checkpoint folder must hold it")
    return hashlib.sha256(path.read_bytes()).hexdigest()[:_HEX]
