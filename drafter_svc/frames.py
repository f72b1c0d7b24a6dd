"""From wire tensors to MLX arrays, for the drafter's messages.

Owns the one conversion of this process. Does not know messages. Call on the compute thread only.
"""

import mlx.core as mx

from common.errors import BadTensor
from common.wire.tensors import Tensor, to_numpy


def rows_of(tensor: Tensor) -> mx.array:
    """Feature rows [S, H] of a bfloat16 or float32 tensor; copies out of the message.

    Raises:
        BadTensor: another dtype or rank.
    """
    if tensor.dtype not in ("bfloat16", "float32") or len(tensor.shape) != 2:
        raise BadTensor(
            f"feature rows: expected bfloat16 or float32 [S, H], got {tensor.dtype} "
            f"{list(tensor.shape)}"
        )
    rows = mx.array(to_numpy(tensor))
    return rows.view(mx.bfloat16) if tensor.dtype == "bfloat16" else rows
