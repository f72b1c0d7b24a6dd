"""From wire tensors to NumPy rows, for the drafter's messages.

Owns the one conversion of this process. Does not know messages or MLX.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import BadTensor
from common.wire.tensors import Tensor, to_numpy


def rows_of(tensor: Tensor) -> NDArray[Any]:
    """Feature rows float32 [S, H] of a bfloat16 or float32 tensor.

    Raises:
        BadTensor: another dtype or rank.
    """
    if tensor.dtype not in ("bfloat16", "float32") or len(tensor.shape) != 2:
        raise BadTensor(
            f"feature rows: expected bfloat16 or float32 [S, H], got {tensor.dtype} "
            f"{list(tensor.shape)}"
        )
    rows = to_numpy(tensor)
    if tensor.dtype == "float32":
        return rows
    return (rows.astype(np.uint32) << 16).view(np.float32)  # bfloat16: the upper half of float32
