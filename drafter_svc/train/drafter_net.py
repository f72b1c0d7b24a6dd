"""A trainable DFlash / DFlash2 drafter in torch, parameters under the published names.

Knows the block forward with many anchors at once. Does not know the target beyond its taps,
embedding and head. Blocks never see each other, nor a context row at or after their anchor.

Shapes: B sequences, S context rows, N anchors, K rows per block, H hidden.
Source: DFlash (arXiv 2602.06036); conventions of the z-lab `dflash` package.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from drafter_svc.train.recipe import DrafterDims, TargetDims
from drafter_svc.train.target_blocks import Rope, SharedExpert, linear, rope_table, rotate


def tap_layers(layers: int, taps: int) -> list[int]:
    """The default rule: spread evenly from layer 1 to the third from last; zero-based."""
    if taps == 1:
        return [layers // 2]
    return [round(1 + i * (layers - 4) / (taps - 1)) for i in range(taps)]


def taps_of(dims: DrafterDims, target: TargetDims) -> list[int]:
    """The layers whose outputs the drafter is fed, zero-based."""
    named = list(dims.target_layer_ids)
    return named or tap_layers(target.num_hidden_layers, dims.num_taps)


class RMSNorm(nn.Module):
    """RMSNorm with a plain weight (not 1 + w as in the target)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis in float32 and return x's dtype."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


class BlockConv(nn.Module):
    """Grouped dynamic convolution along the rows of a block, around one sub-layer."""

    def __init__(self, hidden: int, dims: DrafterDims):
        super().__init__()
        self.taps, self.group = dims.conv_kernel_size, dims.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.taps, hidden))
        self.kernel_projection = linear(hidden, 2 * self.taps * (hidden // self.group))

    def _apply_side(self, x: Tensor, dynamic: Tensor, side: int) -> Tensor:
        kernel = self.base_kernel[side].to(x.dtype) + dynamic.repeat_interleave(self.group, -1)
        rows = x.shape[-2]
        shifted = (functional.pad(x, (0, 0, t, 0))[..., :rows, :] for t in range(self.taps))
        return sum(kernel[..., t, :] * z for t, z in enumerate(shifted))

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Filter the sub-layer's input [..., K, H]; also the kernel that `finish` needs."""
        both = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        return self._apply_side(x, both[..., 0, :, :], 0), both[..., 1, :, :]

    def finish(self, y: Tensor, dynamic: Tensor) -> Tensor:
        """Filter the sub-layer's output [..., K, H]."""
        return self._apply_side(y, dynamic, 1)


class BlockAttention(nn.Module):
    """Attention of block rows over projected context rows and their own block."""

    def __init__(self, hidden: int, dims: DrafterDims):
        super().__init__()
        self.heads, self.kv_heads = dims.num_attention_heads, dims.num_key_value_heads
        self.q_proj = linear(hidden, self.heads * dims.head_dim)
        self.k_proj = linear(hidden, self.kv_heads * dims.head_dim)
        self.v_proj = linear(hidden, self.kv_heads * dims.head_dim)
        self.o_proj = linear(self.heads * dims.head_dim, hidden)
        self.q_norm = RMSNorm(dims.head_dim, dims.rms_norm_eps)
        self.k_norm = RMSNorm(dims.head_dim, dims.rms_norm_eps)

    def _rows(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, -1))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        return rotate(self.k_norm(k).transpose(1, 2), rope), v

    def forward(
        self, y: Tensor, context: Tensor, seen: Tensor, block_rope: Rope, context_rope: Rope
    ) -> Tensor:
        """Attend from y [B, N, K, H] to context [B, S, H] where seen bool [B, 1, N*K, S], and to y.

        Scores of context and of the own block are kept apart and share one softmax, so that the
        cost does not grow with the square of the number of blocks.
        """
        blocks, block = y.shape[1:3]
        q = self.q_proj(y.flatten(1, 2)).unflatten(-1, (self.heads, -1))
        q = rotate(self.q_norm(q).transpose(1, 2), block_rope) * q.shape[-1] ** -0.5
        k_context, v_context = self._rows(context, context_rope)
        k_block, v_block = (
            t.unflatten(2, (blocks, block)) for t in self._rows(y.flatten(1, 2), block_rope)
        )
        group = self.heads // self.kv_heads
        k_context, v_context, k_block, v_block = (
            t.repeat_interleave(group, 1) for t in (k_context, v_context, k_block, v_block)
        )
        far = (q @ k_context.mT).float().masked_fill(~seen, float("-inf"))
        near = (q.unflatten(2, (blocks, block)) @ k_block.mT).float().flatten(2, 3)
        top = torch.maximum(far.amax(-1, keepdim=True), near.amax(-1, keepdim=True)).detach()
        far, near = (far - top).exp(), (near - top).exp()
        total = far.sum(-1, keepdim=True) + near.sum(-1, keepdim=True)
        near = near.unflatten(2, (blocks, block)).to(v_block.dtype) @ v_block
        out = far.to(v_context.dtype) @ v_context + near.flatten(2, 3)
        out = (out / total).to(y.dtype)
        return self.o_proj(out.transpose(1, 2).flatten(-2)).unflatten(1, (blocks, block))


class DrafterLayer(nn.Module):
    """One Qwen3-style block; version 2 has a convolution around each sub-layer."""

    def __init__(self, hidden: int, dims: DrafterDims):
        super().__init__()
        self.input_layernorm = RMSNorm(hidden, dims.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(hidden, dims.rms_norm_eps)
        self.self_attn = BlockAttention(hidden, dims)
        self.mlp = SharedExpert(hidden, dims.intermediate_size)
        if dims.version == 2:
            self.attention_conv = BlockConv(hidden, dims)
            self.mlp_conv = BlockConv(hidden, dims)
        self.convolves = dims.version == 2

    def forward(
        self, x: Tensor, context: Tensor, seen: Tensor, block_rope: Rope, context_rope: Rope
    ) -> Tensor:
        """Map block rows [B, N, K, H] to block rows."""
        y = self.input_layernorm(x)
        if not self.convolves:
            x = x + self.self_attn(y, context, seen, block_rope, context_rope)
            return x + self.mlp(self.post_attention_layernorm(x))
        y, kernel = self.attention_conv.prepare(y)
        y = self.self_attn(y, context, seen, block_rope, context_rope)
        x = x + self.attention_conv.finish(y, kernel)
        y, kernel = self.mlp_conv.prepare(self.post_attention_layernorm(x))
        return x + self.mlp_conv.finish(self.mlp(y), kernel)


class CandidateSelector(nn.Module):
    """A bigram correction over the best candidates of each slot."""

    def __init__(self, hidden: int, vocab: int, dims: DrafterDims):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab, dims.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, dims.selector_rank))
        self.hidden_projection = linear(hidden, dims.selector_rank)

    def scores(self, h: Tensor, unary: Tensor, candidates: Tensor, previous: Tensor) -> Tensor:
        """Score candidates int64 [..., C] after `previous` int64 [...]; h [..., H]."""
        path = (
            functional.embedding(previous, self.predecessor_codebook)
            * self.hidden_projection(h).float()
        )
        ends = functional.embedding(candidates, self.successor_codebook)
        return unary + (path[..., None, :] * ends).sum(-1)


class DrafterNet(nn.Module):
    """The drafter after its target's embedding and before its target's head."""

    def __init__(self, dims: DrafterDims, target: TargetDims):
        super().__init__()
        hidden = target.hidden_size
        self.dims = dims
        self.fc = linear(len(taps_of(dims, target)) * hidden, hidden)
        self.hidden_norm = RMSNorm(hidden, dims.rms_norm_eps)
        self.norm = RMSNorm(hidden, dims.rms_norm_eps)
        self.layers = nn.ModuleList(
            DrafterLayer(hidden, dims) for _ in range(dims.num_hidden_layers)
        )
        if dims.version == 2:
            self.candidate_selector = CandidateSelector(hidden, target.vocab_size, dims)

    def visible(self, anchors: Tensor, context: Tensor) -> Tensor:
        """Mask bool [B, 1, N*K, S] of the context rows each block row may attend to.

        Rows stand at positions context int64 [B, S]; one below 0 holds nothing.
        """
        block = self.dims.block_size
        slots = torch.arange(block, device=anchors.device)
        queries = (anchors[..., None] + slots).flatten(1)[..., None]
        context = context[:, None]
        before = context < anchors.repeat_interleave(block, 1)[..., None]
        inside = (context >= 0) & (queries - context < self.dims.sliding_window)
        return (before & inside)[:, None]

    def forward(
        self,
        taps: Tensor,
        anchors: Tensor,
        anchor_ids: Tensor,
        embedding: Tensor,
        first: Tensor | None = None,
    ) -> Tensor:
        """Draft one block per anchor.

        Args:
            taps: [B, S, T * H] of T taps, the rows of positions first .. first + S - 1.
            anchors: int64 [B, N] absolute positions.
            anchor_ids: int64 [B, N].
            embedding: [V, H], the target's.
            first: int64 [B], position of the first row of `taps`; None is 0.

        Returns:
            [B, N, K, H] final hidden rows; row 0 of each block is the anchor's and says nothing.
        """
        dims, block = self.dims, self.dims.block_size
        context = self.hidden_norm(self.fc(taps))
        slots = torch.arange(block, device=anchors.device)
        ids = torch.where(slots == 0, anchor_ids[..., None], dims.mask_token_id)
        x = functional.embedding(ids, embedding).to(context.dtype)
        positions = (anchors[..., None] + slots).flatten(1)
        where = torch.arange(taps.shape[1], device=anchors.device).expand(taps.shape[:2])
        where = where if first is None else where + first[:, None]
        ropes = [rope_table(p, dims.head_dim, dims.rope_theta) for p in (positions, where)]
        block_rope, context_rope = ((cos[:, None], sin[:, None]) for cos, sin in ropes)
        seen = self.visible(anchors, where)
        for layer in self.layers:
            x = layer(x, context, seen, block_rope, context_rope)
        return self.norm(x)

    def walk(self, h: Tensor, logits: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Greedy drafts of each block.

        Args:
            h: [..., K - 1, H] hidden rows of the slots.
            logits: float32 [..., K - 1, V].
            previous: int64 [...], the anchors' ids.

        Returns:
            int64 drafts [..., K - 1] and float32 confidences [..., K - 1] (the chosen share).
        """
        top_k = self.dims.selector_top_k if self.dims.version == 2 else 1
        unary, candidates = logits.topk(top_k, -1)
        if self.dims.version == 1:
            return candidates[..., 0], logits.softmax(-1).amax(-1)
        ids, shares = [], []
        for slot in range(logits.shape[-2]):
            row = (h[..., slot, :], unary[..., slot, :], candidates[..., slot, :], previous)
            share, pick = self.candidate_selector.scores(*row).softmax(-1).max(-1, keepdim=True)
            previous = candidates[..., slot, :].gather(-1, pick).squeeze(-1)
            ids.append(previous)
            shares.append(share.squeeze(-1))
        return torch.stack(ids, -1), torch.stack(shares, -1)


def start_weights(net: DrafterNet, seed: int) -> None:
    """Fill a fresh drafter: convolutions start as the identity, sub-layers write nothing."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name.endswith("base_kernel"):
                p.zero_()
                p[:, 0] = 1.0
            elif name.endswith(("kernel_projection.weight", "o_proj.weight", "down_proj.weight")):
                p.zero_()
            elif name == "norm.weight":
                p.fill_(0.1)  # the target's head is trained for smaller rows than rms 1
            elif "codebook" in name:
                p.copy_(torch.randn(p.shape, generator=g) * 0.05)
            elif p.dim() >= 2:
                p.copy_(torch.randn(p.shape, generator=g) * 0.5 * p.shape[-1] ** -0.5)
