"""Row ids of the n-gram table: an integer function of token ids.

Knows the hash, the head sizes and the look-back rule. Does not know the table's values.
Must agree with the serving side as integers; the published buffers are stored and compared.

Source: `qwen4_exp` as published; splitmix64 by Vigna.
"""

import math

import torch
from torch import Tensor

from drafter_svc.train.recipe import TargetDims

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _splitmix64(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def layer_multipliers(dims: TargetDims, index: int = 0) -> list[int]:
    """One odd multiplier per shift; products with an id stay below 2^63."""
    half = max(1, ((1 << 63) - 1) // dims.vocab_size // 2)
    seed = dims.seed + 10007 * index
    shifts = range(1, dims.ngram_size + 1)
    return [2 * (_splitmix64((seed + _GAMMA * s) & _MASK) % half) + 1 for s in shifts]


def head_sizes(dims: TargetDims, index: int = 0) -> list[int]:
    """Consecutive primes from the base up, one per head; later tables continue the list."""
    heads = (dims.ngram_size - 1) * dims.heads_per_ngram
    found: list[int] = []
    value = dims.ngram_vocab_size_base
    while len(found) < heads * (index + 1):
        if value > 1 and all(value % d for d in range(2, math.isqrt(value) + 1)):
            found.append(value)
        value += 1
    return found[heads * index :]


def table_rows(dims: TargetDims, index: int = 0) -> int:
    """Rows of the whole table, padding included."""
    unit = dims.make_ngram_vocab_size_divisible_by
    return -(-sum(head_sizes(dims, index)) // unit) * unit


def ngram_row_ids(ids: Tensor, before: Tensor, dims: TargetDims, buffers: list[Tensor]) -> Tensor:
    """Row ids for each token.

    Args:
        ids: int64 [B, T].
        before: int64 [B, ngram_size - 1], the ids just before; eos at the start of a sequence.
        dims: sizes.
        buffers: multipliers, head sizes, head offsets; int64.

    Returns:
        int64 [B, T, heads].
    """
    multipliers, sizes, offsets = buffers
    history = torch.cat([before, ids], 1)
    length = ids.shape[1]
    context = dims.ngram_size - 1
    cut = torch.zeros_like(ids, dtype=torch.bool)
    mix = ids * multipliers[0]
    mixes = []
    for shift in range(1, dims.ngram_size):
        seen = history[:, context - shift : context - shift + length]
        cut = cut | (seen == dims.eos_token_id)  # the look-back stops at an eos and stays there
        back = torch.where(cut, dims.eos_token_id, seen)
        mix = mix ^ (back * multipliers[shift])
        mixes.append(mix[..., None].expand(-1, -1, dims.heads_per_ngram))
    return torch.cat(mixes, -1) % sizes + offsets
