"""Quantized tensors as they lie on disk, and their values.

Owns which formats are known, the check of a stored tensor against the format its config states,
and the values of FP8. Does not know networks. Formats: MLX packs (affine of 2 to 8 bits, mxfp4,
mxfp8, nvfp4; a default and overrides per module) and Hugging Face FP8 (E4M3 with block scales).
Invariant: bits and group come from the config and are proved by the shapes; a tensor whose shapes
say something else is an error.

Source: MLX `mx.quantize`; Hugging Face `FineGrainedFP8Config`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from common.checkpoint.names import module_path
from common.errors import ModelMismatch

_MODES: Final = ("affine", "mxfp4", "mxfp8", "nvfp4")
_AFFINE_BITS: Final = (2, 3, 4, 5, 6, 8)
_WORD: Final = 32  # bits of a stored item
_BLOCK: Final = (128, 128)  # of FP8 scales, where the config names none


@dataclass(frozen=True, slots=True)
class PackFormat:
    """How one module is quantized.

    Raises:
        ModelMismatch: a mode or a width that is not known.
    """

    mode: str
    bits: int
    group: int

    def __post_init__(self) -> None:
        """Check mode and bits."""
        if self.mode not in _MODES:
            raise ModelMismatch(f"quantization mode {self.mode!r}; known are {list(_MODES)}")
        if self.mode == "affine" and self.bits not in _AFFINE_BITS:
            raise ModelMismatch(f"quantization bits {self.bits}; known are {list(_AFFINE_BITS)}")


class PackFormats:
    """The quantization table of a config.json: a default, and modules that differ.

    Args:
        config: of a checkpoint; without a table nothing is quantized.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        table = config.get("quantization") or config.get("quantization_config") or {}
        if not isinstance(table, Mapping):
            raise ModelMismatch(f"quantization: {table!r:.40}; it must be a JSON object")
        self._default = _format(table, {}) if "bits" in table else None
        self._own = {
            module_path(path): _format(entry, table)
            for path, entry in table.items()
            if isinstance(entry, Mapping) and "bits" in entry
        }

    def of(self, module: str) -> PackFormat:
        """The format of a module, by any spelling of its path.

        Raises:
            ModelMismatch: the module is stored quantized and the config states no format for it.
        """
        found = self._own.get(module_path(module), self._default)
        if found is None:
            raise ModelMismatch(
                f"{module} has scales, but config.json states no quantization; "
                "use the config.json that belongs to these weights"
            )
        return found


def _format(entry: Mapping[str, Any], default: Mapping[str, Any]) -> PackFormat:
    """A module that names no mode is affine, whatever the others are: so its maker loads it."""
    sizes = [entry.get(field, default.get(field)) for field in ("bits", "group_size")]
    if any(type(size) is not int or size < 1 for size in sizes):
        raise ModelMismatch(
            f"quantization has bits {sizes[0]!r} and group_size {sizes[1]!r}; "
            "both must be whole numbers of at least 1"
        )
    return PackFormat(str(entry.get("mode", "affine")), *sizes)


def check_packed(
    module: str, weight: mx.array, scales: mx.array, biases: mx.array | None, form: PackFormat
) -> None:
    """Hold a packed tensor against the format that the config states for it.

    Args:
        module: its path, for the message.
        weight: uint32 [.., out, in * bits / 32].
        scales: [.., out, in / group].
        biases: like scales, in mode "affine" only.
        form: what the config states.

    Raises:
        ModelMismatch: shapes or dtype contradict the format.
    """
    width, groups = weight.shape[-1] * _WORD, scales.shape[-1] * form.group
    is_affine = form.mode == "affine"
    if weight.dtype != mx.uint32 or width % form.bits or width // form.bits != groups:
        raise ModelMismatch(
            f"{module}: weight {list(weight.shape)} {weight.dtype} and scales "
            f"{list(scales.shape)}; {form.mode} of {form.bits} bits in groups of {form.group} "
            f"needs uint32 [.., {groups * form.bits // _WORD}] for these scales"
        )
    if is_affine != (biases is not None):
        raise ModelMismatch(
            f"{module}: biases {'are missing' if is_affine else 'are there'}; "
            f"mode {form.mode!r} {'needs them' if is_affine else 'has none'}"
        )


def block_shape(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share one FP8 scale."""
    table = config.get("quantization_config") or {}
    rows, columns = table.get("weight_block_size") or _BLOCK
    return int(rows), int(columns)


def from_fp8(
    name: str, bits: mx.array, scale: mx.array, block: tuple[int, int], dtype: mx.Dtype
) -> mx.array:
    """Values of E4M3 numbers times their scales.

    Args:
        name: of the tensor, for the message.
        bits: uint8 [.., rows, columns].
        scale: one for all, or [.., ceil(rows / block rows), ceil(columns / block columns)].
        block: rows and columns of one scale.
        dtype: of the result.

    Raises:
        ModelMismatch: the scales do not cover the tensor.
    """
    values = mx.from_fp8(bits, dtype=mx.float32)
    if scale.size == 1:
        return (values * scale.astype(mx.float32).reshape(())).astype(dtype)
    rows, columns = bits.shape[-2:]
    wanted = (*bits.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    if tuple(scale.shape) != wanted:
        raise ModelMismatch(
            f"{name}: scales {list(scale.shape)} for {list(bits.shape)}; blocks of {list(block)} "
            f"need {list(wanted)}"
        )
    spread = mx.repeat(mx.repeat(scale.astype(mx.float32), block[0], axis=-2), block[1], axis=-1)
    return (values * spread[..., :rows, :columns]).astype(dtype)
