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
        self, y: Tensor, context: Tensor, mask: Tensor, block_rope: Rope, context_rope: Rope
    ) -> Tensor:
        """Attend from y [B, Q, H] to context [B, S, H] and y under mask bool [B, 1, Q, S + Q]."""
        q = self.q_proj(y).unflatten(-1, (self.heads, -1))
        q = rotate(self.q_norm(q).transpose(1, 2), block_rope)
        k_context, v_context = self._rows(context, context_rope)
        k_block, v_block = self._rows(y, block_rope)
        group = self.heads // self.kv_heads
        k = torch.cat([k_context, k_block], 2).repeat_interleave(group, 1)
        v = torch.cat([v_context, v_block], 2).repeat_interleave(group, 1)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class DrafterLayer(nn.Module):
    """One Qwen3-style block; version 2 has a convolution around each sub-layer."""

    def __init__(self, hidden: int, dims: DrafterDims):
        super().__init__()
        self.block = dims.block_size
        self.input_layernorm = RMSNorm(hidden, dims.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(hidden, dims.rms_norm_eps)
        self.self_attn = BlockAttention(hidden, dims)
        self.mlp = SharedExpert(hidden, dims.intermediate_size)
        if dims.version == 2:
            self.attention_conv = BlockConv(hidden, dims)
            self.mlp_conv = BlockConv(hidden, dims)
        self.convolves = dims.version == 2

    def forward(
        self, x: Tensor, context: Tensor, mask: Tensor, block_rope: Rope, context_rope: Rope
    ) -> Tensor:
        """Map block rows [B, N*K, H] to block rows."""
        y = self.input_layernorm(x)
        if not self.convolves:
            x = x + self.self_attn(y, context, mask, block_rope, context_rope)
            return x + self.mlp(self.post_attention_layernorm(x))
        y, kernel = self.attention_conv.prepare(y.unflatten(1, (-1, self.block)))
        y = self.self_attn(y.flatten(1, 2), context, mask, block_rope, context_rope)
        y = self.attention_conv.finish(y.unflatten(1, (-1, self.block)), kernel)
        x = x + y.flatten(1, 2)
        y = self.post_attention_layernorm(x).unflatten(1, (-1, self.block))
        y, kernel = self.mlp_conv.prepare(y)
        return x + self.mlp_conv.finish(self.mlp(y), kernel).flatten(1, 2)


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
        self.fc = linear(dims.num_taps * hidden, hidden)
        self.hidden_norm = RMSNorm(hidden, dims.rms_norm_eps)
        self.norm = RMSNorm(hidden, dims.rms_norm_eps)
        self.layers = nn.ModuleList(
            DrafterLayer(hidden, dims) for _ in range(dims.num_hidden_layers)
        )
        if dims.version == 2:
            self.candidate_selector = CandidateSelector(hidden, target.vocab_size, dims)

    def visible(self, anchors: Tensor, rows: int, first: int = 0) -> Tensor:
        """Mask bool [B, 1, N*K, rows + N*K] of what each block row may attend to."""
        block, blocks = self.dims.block_size, anchors.shape[1]
        slots = torch.arange(block, device=anchors.device)
        context = torch.arange(first, first + rows, device=anchors.device)
        queries = (anchors[..., None] + slots).flatten(1)[..., None]
        before = context < anchors.repeat_interleave(block, 1)[..., None]
        seen = before & (queries - context < self.dims.sliding_window)
        owner = torch.arange(blocks, device=anchors.device).repeat_interleave(block)
        own = (owner[:, None] == owner).expand(anchors.shape[0], -1, -1)
        return torch.cat([seen, own], -1)[:, None]

    def forward(
        self, taps: Tensor, anchors: Tensor, anchor_ids: Tensor, embedding: Tensor, first: int = 0
    ) -> Tensor:
        """Draft one block per anchor.

        Args:
            taps: [B, S, num_taps * H], the rows of positions first .. first + S - 1.
            anchors: int64 [B, N] absolute positions.
            anchor_ids: int64 [B, N].
            embedding: [V, H], the target's.
            first: position of the first context row.

        Returns:
            [B, N, K, H] final hidden rows; row 0 of each block is the anchor's and says nothing.
        """
        dims, rows = self.dims, taps.shape[1]
        block = dims.block_size
        context = self.hidden_norm(self.fc(taps))
        ids = anchor_ids[..., None].expand(-1, -1, block)
        slots = torch.arange(block, device=ids.device)
        ids = torch.where(slots == 0, ids, dims.mask_token_id)
        x = functional.embedding(ids.flatten(1), embedding).to(context.dtype)
        positions = (anchors[..., None] + slots).flatten(1)
        block_rope = rope_table(positions, dims.head_dim, dims.rope_theta)
        block_rope = (block_rope[0][:, None], block_rope[1][:, None])
        where = torch.arange(first, first + rows, device=ids.device)
        context_rope = rope_table(where, dims.head_dim, dims.rope_theta)
        mask = self.visible(anchors, rows, first)
        for layer in self.layers:
            x = layer(x, context, mask, block_rope, context_rope)
        return self.norm(x).unflatten(1, (-1, block))

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
