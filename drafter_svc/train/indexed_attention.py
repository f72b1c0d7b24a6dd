"""Full attention of the trainable target: gated heads over the blocks that an indexer keeps.

Knows one layer in training, in reading a prompt and in decoding. Does not know the stack.
The selection is a hard mask without gradient; the indexer learns from the attention itself, by the
cross entropy of its scores to the attention's mass per block. Same rule as in serving: only
complete blocks compete, by score, then lowest block; the open block is always seen.

Shapes: B sequences, T tokens, Q queries, N blocks of `ratio` tokens, H hidden.
Source: the indexer's training signal is that of DeepSeek-V3.2 (2025), section 2.1.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from drafter_svc.train.recipe import TargetDims
from drafter_svc.train.target_blocks import Rope, ZeroCentredNorm, linear, rope_table, rotate

LESSON_STRIDE = 17  # queries between two lessons of the indexer; odd, so every place in a block


def keep_best(scores: Tensor, count: int) -> Tensor:
    """Mark the `count` best of float32 [..., N], of equals the lowest index; bool [..., N]."""
    if scores.shape[-1] <= count:
        return torch.ones_like(scores, dtype=torch.bool)
    cut = scores.topk(count, -1, sorted=False).values.amin(-1, keepdim=True)
    above, level = scores > cut, scores == cut
    left = count - above.sum(-1, keepdim=True, dtype=torch.int32)
    return above | (level & (level.cumsum(-1, dtype=torch.int32) <= left))


def complete_blocks(positions: Tensor, blocks: int, ratio: int) -> Tensor:
    """Which blocks are complete for queries at int64 [Q]: bool [Q, blocks]."""
    order = torch.arange(blocks, device=positions.device)
    return order < (positions[:, None] + 1) // ratio


class Indexer(nn.Module):
    """Scores blocks of tokens for a query."""

    def __init__(self, dims: TargetDims):
        super().__init__()
        self.heads, self.width = dims.indexer_n_heads, dims.indexer_head_dim
        self.ratio, self.budget = dims.indexer_compress_ratio, dims.indexer_budget
        self.rotary, self.theta = int(dims.head_dim * dims.partial_rotary_factor), dims.rope_theta
        rows = (self.heads + dims.indexer_kv_heads) * self.width
        self.index_qk_proj = linear(dims.hidden_size, rows)
        self.q_layernorm = ZeroCentredNorm(self.width, dims.rms_norm_eps)
        self.k_layernorm = ZeroCentredNorm(self.width, dims.rms_norm_eps)

    def chooses(self, tokens: int) -> bool:
        """Whether among so many tokens any block is dropped."""
        return tokens // self.ratio > self.budget // self.ratio

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Raw queries [B, T, heads, d] and raw keys [B, T, d] of x [B, T, H]."""
        both = self.index_qk_proj(x)
        q, k = both.split([self.heads * self.width, self.width], -1)
        return q.unflatten(-1, (self.heads, self.width)), k

    def pool(self, raw: Tensor, first: Tensor) -> Tensor:
        """Keys float32 [B, N, d] of blocks that start at positions `first` [N]; raw [B, N*r, d]."""
        means = raw.float().unflatten(1, (-1, self.ratio)).mean(2).to(raw.dtype)
        rope = rope_table(first, self.rotary, self.theta)
        return rotate(self.k_layernorm(means.float())[:, None], rope)[:, 0]

    def scores(self, queries: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
        """Scores float32 [B, Q, N] of raw queries [B, Q, heads, d] at positions [Q]."""
        rope = rope_table(positions, self.rotary, self.theta)
        q = rotate(self.q_layernorm(queries.float()).transpose(1, 2), rope)
        with torch.autocast(q.device.type, enabled=False):
            dots = q @ keys[:, None].float().mT
        return dots.relu().sum(1) * self.width**-0.5

    def visible(self, scores: Tensor, positions: Tensor, length: int) -> Tensor:
        """Tokens bool [B, Q, length] that queries at positions [Q] attend to."""
        candidate = complete_blocks(positions, scores.shape[-1], self.ratio)
        scores = scores.masked_fill(~candidate, float("-inf"))
        kept = keep_best(scores, self.budget // self.ratio) | ~candidate
        kept = kept.repeat_interleave(self.ratio, -1)[..., :length]
        kept = functional.pad(kept, (0, length - kept.shape[-1]), value=True)
        return kept & (torch.arange(length, device=positions.device) <= positions[:, None])


class GatedAttention(nn.Module):
    """Grouped-query attention whose queries come packed per head with an output gate.

    Attributes:
        sparse: attend to the indexer's choice only; False is dense causal attention.
        teach: also give the indexer's loss (in training, without a cache).
    """

    def __init__(self, dims: TargetDims):
        super().__init__()
        self.heads, self.kv_heads = dims.num_attention_heads, dims.num_key_value_heads
        self.head_dim = dims.head_dim
        self.q_proj = linear(dims.hidden_size, self.heads * self.head_dim * 2)
        self.k_proj = linear(dims.hidden_size, self.kv_heads * self.head_dim)
        self.v_proj = linear(dims.hidden_size, self.kv_heads * self.head_dim)
        self.o_proj = linear(self.heads * self.head_dim, dims.hidden_size)
        self.q_norm = ZeroCentredNorm(self.head_dim, dims.rms_norm_eps)
        self.k_norm = ZeroCentredNorm(self.head_dim, dims.rms_norm_eps)
        self.indexer = Indexer(dims)
        self.sparse, self.teach = True, False

    def forward(
        self, x: Tensor, rope: Rope, cache: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend causally over [B, T, H] and the rows in the cache; also the indexer's loss.

        A cache names its `room` (rows it may come to hold) and `position` (int64 scalar, rows
        it holds now); a prompt is read at position 0, later calls bring one row each.
        """
        packed = self.q_proj(x).unflatten(-1, (self.heads, 2 * self.head_dim))
        q, gate = packed.chunk(2, -1)
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, -1))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        q = rotate(self.q_norm(q).transpose(1, 2), rope)
        k = rotate(self.k_norm(k).transpose(1, 2), rope)
        loss = x.new_zeros((), dtype=torch.float32)
        if cache is not None and "k" in cache:
            out = self._decode(q, k, v, x, cache)
        else:
            if cache is not None:
                self._fill(k, v, x, cache)
            out = self._whole(q, k, v, x)
            if self.teach and x.shape[1] > LESSON_STRIDE:
                loss = self._lesson(q.detach(), k.detach(), x.detach())
        out = out.transpose(1, 2) * torch.sigmoid(gate)
        return self.o_proj(out.flatten(-2)), loss

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        group, length = self.heads // self.kv_heads, x.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        if not self.sparse or not self.indexer.chooses(length):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        with torch.no_grad():
            queries, raw = self.indexer.split(x)
            positions = torch.arange(length, device=x.device)
            scores = self.indexer.scores(queries, positions, self._pooled(raw))
            mask = self.indexer.visible(scores, positions, length)[:, None]
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def _pooled(self, raw: Tensor) -> Tensor:
        ratio = self.indexer.ratio
        blocks = raw.shape[1] // ratio
        first = torch.arange(0, blocks * ratio, ratio, device=raw.device)
        return self.indexer.pool(raw[:, : blocks * ratio], first)

    def _lesson(self, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        """Cross entropy of the indexer's scores to the attention's mass per complete block."""
        ratio, length = self.indexer.ratio, x.shape[1]
        positions = torch.arange(LESSON_STRIDE, length, LESSON_STRIDE, device=x.device)
        queries, raw = self.indexer.split(x)
        keys = self._pooled(raw)
        blocks = keys.shape[1]
        candidate = complete_blocks(positions, blocks, ratio)
        with torch.no_grad():
            group = self.heads // self.kv_heads
            rows = q[:, :, positions] * self.head_dim**-0.5
            dots = rows @ k.repeat_interleave(group, 1).mT
            later = torch.arange(length, device=x.device) > positions[:, None]
            mass = dots.float().masked_fill(later, float("-inf")).softmax(-1).mean(1)
            mass = mass[..., : blocks * ratio].unflatten(-1, (blocks, ratio)).sum(-1) * candidate
            mass = mass / mass.sum(-1, keepdim=True).clamp_min(1e-9)
        scores = self.indexer.scores(queries[:, positions], positions, keys)
        logs = scores.masked_fill(~candidate, float("-inf")).log_softmax(-1)
        return -(mass * logs.masked_fill(~candidate, 0.0)).sum(-1).mean()

    # ------------------------------------------------------------------ decoding

    def _fill(self, k: Tensor, v: Tensor, x: Tensor, cache: dict[str, Any]) -> None:
        """Open the cache with the rows of a prompt."""
        ratio, used, room = self.indexer.ratio, x.shape[1], cache["room"]
        raw = self.indexer.split(x)[1]
        rows = -(-room // ratio) * ratio
        for name, value in (("k", k), ("v", v)):
            cache[name] = value.new_zeros(*value.shape[:2], room, value.shape[3])
            cache[name][:, :, :used] = value
        cache["raw"] = raw.new_zeros(raw.shape[0], rows, raw.shape[2])
        cache["raw"][:, :used] = raw
        pooled = self._pooled(raw)
        cache["pooled"] = pooled.new_zeros(raw.shape[0], rows // ratio, raw.shape[2])
        cache["pooled"][:, : pooled.shape[1]] = pooled

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, cache: dict[str, Any]) -> Tensor:
        """One row [B, heads, 1, D] against the cache, which it enters first."""
        if x.shape[1] != 1:
            raise NotImplementedError("append one token at a time after the prompt")
        at, room = cache["position"].view(1), cache["k"].shape[2]
        cache["k"].index_copy_(2, at, k.to(cache["k"].dtype))
        cache["v"].index_copy_(2, at, v.to(cache["v"].dtype))
        mask = (torch.arange(room, device=x.device) <= at)[None, None]
        if self.sparse and self.indexer.chooses(room):
            mask = self._choose(x, at, room, cache)
        group = self.heads // self.kv_heads
        rows = q.unflatten(1, (self.kv_heads, group)).squeeze(3) * self.head_dim**-0.5
        dots = (rows.to(cache["k"].dtype) @ cache["k"].mT).float()
        share = dots.masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype)
        return (share @ cache["v"]).flatten(1, 2)[:, :, None]

    def _choose(self, x: Tensor, at: Tensor, room: int, cache: dict[str, Any]) -> Tensor:
        """Mask bool [B, 1, 1, room]; the block that the row may complete is pooled anew."""
        ratio = self.indexer.ratio
        queries, raw = self.indexer.split(x)
        cache["raw"].index_copy_(1, at, raw.to(cache["raw"].dtype))
        block = at // ratio
        rows = block * ratio + torch.arange(ratio, device=x.device)
        pooled = self.indexer.pool(cache["raw"].index_select(1, rows), block * ratio)
        cache["pooled"].index_copy_(1, block, pooled)
        scores = self.indexer.scores(queries, at, cache["pooled"])
        return self.indexer.visible(scores, at, room)[:, None]
