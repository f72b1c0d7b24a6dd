"""What published checkpoints say of a Gated DeltaNet layer: config fields, names and shapes.

Owns their spellings, the same in every family that has such layers. Does not know arithmetic or
what stands around the layer.
"""

from collections.abc import Mapping
from typing import Any, Final

from target_svc.models.blocks.gated_delta import DeltaShape, DeltaWeights
from target_svc.models.blocks.linear import Tensors

#: Names in the order of `DeltaWeights`.
NAMES: Final = (
    "in_proj_qkv.weight",
    "in_proj_z.weight",
    "in_proj_b.weight",
    "in_proj_a.weight",
    "conv1d.weight",
    "A_log",
    "dt_bias",
    "norm.weight",
    "out_proj.weight",
)


def read_shape(text: Mapping[str, Any], gate: str) -> DeltaShape:
    """Heads and widths of a config's text part.

    Raises:
        KeyError: a field is missing; `config.reading` names it.
    """
    return DeltaShape(
        key_heads=text["linear_num_key_heads"],
        value_heads=text["linear_num_value_heads"],
        key_dim=text["linear_key_head_dim"],
        value_dim=text["linear_value_head_dim"],
        kernel=text["linear_conv_kernel_dim"],
        gate=gate,
    )


def tensor_shapes(at: str, shape: DeltaShape, hidden: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of a layer whose names begin with `at`."""
    out = shape.value_heads * shape.value_dim
    sizes: tuple[tuple[int, ...], ...] = (
        (shape.channels, hidden),
        (out, hidden),
        (shape.value_heads, hidden),
        (shape.value_heads, hidden),
        (shape.channels, 1, shape.kernel),
        (shape.value_heads,),
        (shape.value_heads,),
        (shape.value_dim,),
        (hidden, out),
    )
    return {at + name: size for name, size in zip(NAMES, sizes, strict=True)}


def take_weights(tensors: Tensors, at: str) -> DeltaWeights:
    """Take the weights of a layer whose names begin with `at`."""
    return DeltaWeights(*tensors.all_of(at, NAMES))
