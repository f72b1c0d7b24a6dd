"""Between MLX arrays and wire tensors, for the target's messages.

Owns the conversions of this process. Does not know messages. bfloat16 leaves MLX through its
bits, since NumPy has no such dtype. Evaluates; call on the compute thread only.
"""

from collections.abc import Sequence
from typing import Final, TypedDict

import mlx.core as mx
import numpy as np

from common.errors import BadRequest, BadTensor
from common.wire.messages import Block
from common.wire.tensors import Tensor, from_numpy, to_numpy
from target_svc.accept import TokenLogprobs
from target_svc.rules import Source

SUM_TOLERANCE: Final = 1e-6  # of probabilities that were summed in another process


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


def sources_of(block: Block) -> tuple[Source, ...]:
    """What each draft of a block was drawn from; empty where they were not drawn.

    Raises:
        BadRequest: a draft is not among its candidates, a candidate stands there twice, or the
            probabilities do not sum to 1: no draw can have given this.
    """
    if not block.q_ids:
        return ()
    shape = len(block.ids), -1
    named = np.array(block.q_ids, np.int64).reshape(shape)
    probs = np.array(block.q_probs, np.float64).reshape(shape)
    sums = probs.sum(axis=1)
    for slot, token in enumerate(block.ids):
        chance = probs[slot][named[slot] == token]
        is_draw = chance.size == 1 and chance[0] > 0 and abs(sums[slot] - 1) < SUM_TOLERANCE
        if not is_draw or len(set(named[slot].tolist())) < named.shape[1]:
            raise BadRequest(
                f"draft {token} at slot {slot} was not drawn from what the block names"
            )
    return tuple(Source(named[slot], probs[slot] / sums[slot]) for slot in range(len(sums)))
