"""Between MLX arrays and wire tensors, for the target's messages.

Owns the conversions of this process. Does not know messages. bfloat16 leaves MLX through its
bits, since NumPy has no such dtype. Evaluates; call on the compute thread only.
"""

from collections.abc import Sequence
from typing import TypedDict

import mlx.core as mx
import numpy as np

from common.errors import BadTensor
from common.wire.tensors import Tensor, from_numpy, to_numpy
from target_svc.accept import TokenLogprobs


def rows_tensor(rows: mx.array) -> Tensor:
    """Feature rows [S, H], float32 or bfloat16, as a wire tensor; the buffer is the tensor's own.

    A copy, because the I/O thread reads it while this thread goes on with MLX.
    """
    if rows.dtype == mx.bfloat16:
        return from_numpy(np.array(rows.view(mx.uint16)), "bfloat16")
    return from_numpy(np.array(rows.astype(mx.float32)))


def ids_of(tensor: Tensor) -> list[int]:
    """Token ids of an int32 tensor [N].

    Raises:
        BadTensor: another dtype or rank.
    """
    if tensor.dtype != "int32" or len(tensor.shape) != 1:
        raise BadTensor(f"ids: expected int32 [N], got {tensor.dtype} {list(tensor.shape)}")
    ids: list[int] = to_numpy(tensor).tolist()
    return ids


class LogprobFields(TypedDict):
    """Log probabilities as Prefilled and Verified carry them, flat."""

    logprobs: tuple[float, ...]
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


def logprob_fields(logprobs: Sequence[TokenLogprobs]) -> LogprobFields:
    """Flatten what was decided for each id; as many top ids for every one."""
    return {
        "logprobs": tuple(one.chosen for one in logprobs),
        "top_ids": tuple(token for one in logprobs for token in one.top_ids),
        "top_logprobs": tuple(value for one in logprobs for value in one.top),
    }
