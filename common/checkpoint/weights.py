"""Hold tensors against what a network needs, in the dtype that the present device is fast in.

Knows names, shapes and MLX modules. Does not know files or any network's names. Invariant: nothing
is skipped in silence; a tensor is taken, or an error.
"""

from collections.abc import Mapping
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from common.checkpoint.matrix import Matrix
from common.errors import ModelMismatch

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)
_LISTED = 12  # names shown per kind in a mismatch; the count is always shown


def working_dtype(stored: mx.Dtype) -> mx.Dtype:
    """The dtype in which a stored tensor is computed with on the default device.

    float16 and bfloat16 products do not use BLAS on CPU and are many times slower there.
    """
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    return mx.float32 if on_cpu and stored in _FLOATS else stored


def require_exactly(
    tensors: Mapping[str, Matrix], shapes: Mapping[str, tuple[int, ...]], *, what: str
) -> None:
    """Check names and shapes both ways.

    Args:
        tensors: what was read.
        shapes: what the network needs, by the same names.
        what: how to call the network in the message, such as "target qwen4_exp".

    Raises:
        ModelMismatch: lists missing names, unexpected names and wrong shapes.
    """
    missing = sorted(shapes.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - shapes.keys())
    wrong = [
        f"{name} is {list(tensors[name].shape)}, needs {list(shapes[name])}"
        for name in sorted(shapes.keys() & tensors.keys())
        if tuple(tensors[name].shape) != tuple(shapes[name])
    ]
    faults = [("missing", missing), ("unexpected", unexpected), ("wrong shape", wrong)]
    parts = [f"{len(names)} {kind}: {_shorten(names)}" for kind, names in faults if names]
    if parts:
        raise ModelMismatch(
            f"weights of {what} do not fit its config; {'; '.join(parts)}; "
            "use the config.json that belongs to these weights"
        )


def load_strict(module: nn.Module, tensors: Mapping[str, mx.array]) -> None:
    """Give a module its weights; every name and shape must fit.

    Raises:
        ModelMismatch: as `require_exactly`; the module is unchanged.
    """
    parameters = cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters()))
    shapes = {name: tuple(value.shape) for name, value in parameters}
    require_exactly(tensors, shapes, what=type(module).__name__)
    module.load_weights(list(tensors.items()), strict=True)


def _shorten(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
