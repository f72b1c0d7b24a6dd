"""Read tensors strictly, in the dtype that the present device is fast in.

Knows safetensors folders and MLX modules. Does not know any network's names. Invariant: nothing
is skipped in silence; a tensor is loaded, or dropped by the caller's own rule, or an error.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from common.checkpoint.index import index_tensors, read_config
from common.errors import ModelMismatch

__all__ = ["load_strict", "read_config", "read_tensors", "require_exactly", "working_dtype"]

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)
_LISTED = 12  # names shown per kind in a mismatch; the count is always shown


def working_dtype(stored: mx.Dtype) -> mx.Dtype:
    """The dtype in which a stored tensor is computed with on the default device.

    float16 and bfloat16 products do not use BLAS on CPU and are many times slower there.
    """
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    return mx.float32 if on_cpu and stored in _FLOATS else stored


def read_tensors(folder: Path, *, keep: Callable[[str], bool] | None = None) -> dict[str, mx.array]:
    """Read the tensors of a checkpoint folder, single file or shards.

    Args:
        folder: holds `*.safetensors`, and the shard index where there is one.
        keep: which names to read; None reads all. Others are not touched on disk.

    Returns:
        Tensors by their names on disk; float32 on CPU, the stored dtype elsewhere. Integers as
        stored. Lazy: the bytes are read when the tensors are first evaluated.

    Raises:
        ConfigError: the folder is missing or holds no weights.
        ModelMismatch: a file is damaged or a shard is missing.
    """
    wanted = {name: span for name, span in index_tensors(folder).items() if not keep or keep(name)}
    tensors: dict[str, mx.array] = {}
    for path in sorted({span.path for span in wanted.values()}):
        loaded = cast("dict[str, mx.array]", mx.load(str(path)))
        names = [name for name, span in wanted.items() if span.path == path]
        tensors |= {name: loaded[name].astype(working_dtype(loaded[name].dtype)) for name in names}
    return tensors


def require_exactly(
    tensors: Mapping[str, mx.array], shapes: Mapping[str, tuple[int, ...]], *, what: str
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
