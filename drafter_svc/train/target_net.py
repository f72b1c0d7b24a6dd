"""The layers of the trainable target put together: experts, n-gram layer, decoder, whole net.

Knows the order of the forward pass and the taps. Does not know data, optimisers or files.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from drafter_svc.train.indexed_attention import GatedAttention
from drafter_svc.train.ngram import head_sizes, layer_multipliers, ngram_row_ids, table_rows
from drafter_svc.train.recipe import TargetDims
from drafter_svc.train.target_blocks import (
    DepthwiseConv,
    Experts,
    GatedDeltaNet,
    HyperConnection,
    Rope,
    SharedExpert,
    ZeroCentredNorm,
    keep,
    linear,
    rope_table,
    write,
)

STARTS_AT_ZERO = (
    "ple.conv1d.weight",
    "o_proj.weight",
    "out_proj.weight",
    "down_proj",
    "down_proj.weight",
)


class SparseMoE(nn.Module):
    """Top-k experts with renormalised weights, beside the shared expert."""

    def __init__(self, dims: TargetDims):
        super().__init__()
        self.top_k = dims.num_experts_per_tok
        self.gate = linear(dims.hidden_size, dims.num_experts)
        self.experts = Experts(dims)
        self.shared_expert = SharedExpert(dims.hidden_size, dims.shared_expert_intermediate_size)
        self.shared_expert_gate = linear(dims.hidden_size, 1)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [B, T, E], 0 where an expert is not chosen, and the balance loss (a scalar)."""
        probs = functional.softmax(self.gate(x).float(), -1)
        chosen = torch.zeros_like(probs)
        for _ in range(self.top_k):  # the lowest id wins a tie
            best = probs.masked_fill(chosen > 0, -1.0).argmax(-1, keepdim=True)
            chosen = chosen.scatter(-1, best, 1.0)
        kept = probs * chosen
        share = chosen.mean((0, 1)) / self.top_k
        balance = probs.shape[-1] * (share * probs.mean((0, 1))).sum()
        return kept / kept.sum(-1, keepdim=True), balance

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map [B, T, H] to [B, T, H]; also the balance loss."""
        weights, balance = self.route(x)
        shared = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return self.experts(x, weights) + shared, balance


class NgramTable(nn.Module):
    """The table of n-gram rows and the buffers that say how a row id is made."""

    def __init__(self, dims: TargetDims):
        super().__init__()
        heads = (dims.ngram_size - 1) * dims.heads_per_ngram
        sizes = torch.tensor(head_sizes(dims))
        self.register_buffer("layer_multipliers", torch.tensor(layer_multipliers(dims)))
        self.register_buffer("ngram_heads_vocab_sizes", sizes)
        self.register_buffer("ngram_heads_offsets", sizes.cumsum(0) - sizes)
        self.ngram_embedding = nn.Embedding(table_rows(dims), dims.ple_embed_dim // heads)


class NgramLayer(nn.Module):
    """PLE: hashed n-gram rows, gated per stream and convolved, added to every stream."""

    def __init__(self, dims: TargetDims):
        super().__init__()
        self.dims = dims
        width, eps = dims.hc_count * dims.hidden_size, dims.rms_norm_eps
        self.ple_embedding = NgramTable(dims)
        self.key_proj = linear(dims.ple_embed_dim, width)
        self.value_proj = linear(dims.ple_embed_dim, dims.hidden_size)
        self.norm_key = ZeroCentredNorm(width, eps, dims.hc_count)
        self.norm_query = ZeroCentredNorm(width, eps, dims.hc_count)
        self.norm_conv = ZeroCentredNorm(width, eps, dims.hc_count)
        self.conv1d = DepthwiseConv(width, dims.ple_conv_kernel_size, dims.ngram_size)

    def rows(self, ids: Tensor, cache: dict[str, Any] | None) -> Tensor:
        """Table rows of [B, T] ids, concatenated over the heads: [B, T, ple_embed_dim]."""
        table, dims = self.ple_embedding, self.dims
        before = ids.new_full((ids.shape[0], dims.ngram_size - 1), dims.eos_token_id)
        before = before if cache is None else cache.get("ids", before)
        buffers = [table.layer_multipliers, table.ngram_heads_vocab_sizes]
        row_ids = ngram_row_ids(ids, before, dims, [*buffers, table.ngram_heads_offsets])
        if cache is not None:
            keep(cache, "ids", torch.cat([before, ids], 1)[:, ids.shape[1] :])
        return table.ngram_embedding(row_ids).flatten(-2)

    def forward(self, x: Tensor, ids: Tensor, cache: dict[str, Any] | None = None) -> Tensor:
        """Add the n-gram memory of ids [B, T] to x [B, T, S*H]."""
        dims = self.dims
        rows = self.rows(ids, cache).to(x.dtype)
        split = (dims.hc_count, dims.hidden_size)
        key = self.norm_key(self.key_proj(rows)).unflatten(-1, split).float()
        query = self.norm_query(x).unflatten(-1, split).float()
        dot = (key * query).sum(-1, keepdim=True) * dims.hidden_size**-0.5
        dot = dot.abs().clamp_min(1e-6).sqrt() * dot.sign()
        value = self.value_proj(rows)[..., None, :]
        gated = (torch.sigmoid(dot).to(x.dtype) * value).flatten(-2)
        before = None if cache is None else cache.get("ple_conv")
        mixed, window = self.conv1d(self.norm_conv(gated), before)
        if cache is not None:
            keep(cache, "ple_conv", window)
        return x + gated + functional.silu(mixed)


class DecoderLayer(nn.Module):
    """One read-mix-write with attention and one with experts."""

    def __init__(self, dims: TargetDims, index: int):
        super().__init__()
        self.linear = dims.layer_types[index] == "linear_attention"
        if self.linear:
            self.linear_attn = GatedDeltaNet(dims)
        else:
            self.self_attn = GatedAttention(dims)
        self.mlp = SparseMoE(dims)
        self.attn_hyper_connection = HyperConnection(dims)
        self.mlp_hyper_connection = HyperConnection(dims)
        if index + 1 in dims.ple_layer_ids:
            self.ple = NgramLayer(dims)

    def forward(
        self, x: Tensor, rope: Rope, cache: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map streams [B, T, S*H] to streams; also the losses of balance and of the indexer.

        The n-gram part is apart.
        """
        mixed, shares = self.attn_hyper_connection(x)
        if self.linear:
            y, lesson = self.linear_attn(mixed, rope, cache), x.new_zeros((), dtype=torch.float32)
        else:
            y, lesson = self.self_attn(mixed, rope, cache)
        x = write(x, y, shares)
        mixed, shares = self.mlp_hyper_connection(x)
        out, balance = self.mlp(mixed)
        return write(x, out, shares), balance, lesson


@dataclass(slots=True)
class TargetState:
    """What decoding keeps: one cache per layer, and how many tokens were seen (int64 scalar)."""

    layers: list[dict[str, Any]]
    position: Tensor


@dataclass(slots=True)
class TargetOutput:
    """What a forward gives.

    Attributes:
        hidden: rows before the head [B, T, H].
        streams: the same before the last read [B, T, S*H]; the MTP head starts from them.
        taps: those asked for, [B, T, H] each.
        balance: of the experts, summed over layers.
        lesson: of the indexers, summed over layers.
    """

    hidden: Tensor
    streams: Tensor
    balance: Tensor
    lesson: Tensor
    taps: list[Tensor] = field(default_factory=list)


class TargetNet(nn.Module):
    """The whole target. `state_dict` keys are the published ones after `model.language_model.`."""

    def __init__(self, dims: TargetDims):
        super().__init__()
        self.dims = dims
        self.embed_tokens = nn.Embedding(dims.vocab_size, dims.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(dims, i) for i in range(dims.num_hidden_layers))
        self.hyper_connection_mixer = HyperConnection(dims, inject=False)

    def attention(self) -> list[GatedAttention]:
        """The layers with an indexer."""
        return [layer.self_attn for layer in self.layers if not layer.linear]

    def select(self, sparse: bool, teach: bool = False) -> None:
        """Attend to the indexers' choice or to everything; train the indexers or not."""
        for block in self.attention():
            block.sparse, block.teach = sparse, teach

    def new_state(self, room: int) -> TargetState:
        """An empty state for `forward` that may come to hold `room` tokens."""
        position = torch.zeros((), dtype=torch.int64, device=self.embed_tokens.weight.device)
        return TargetState([{"room": room, "position": position} for _ in self.layers], position)

    def forward(
        self,
        ids: Tensor,
        taps: Sequence[int] = (),
        state: TargetState | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> TargetOutput:
        """Run [B, T] ids.

        Args:
            ids: int64 [B, T].
            taps: layers whose output is wanted, averaged over the streams: [B, T, H] each.
            state: continue from here and advance it; None starts at position 0.
            dtype: of the streams.
        """
        dims = self.dims
        positions = torch.arange(ids.shape[1], device=ids.device)
        positions = positions if state is None else positions + state.position
        rotary = int(dims.head_dim * dims.partial_rotary_factor)
        rope = rope_table(positions, rotary, dims.rope_theta)
        x = self.embed_tokens(ids).to(dtype).repeat(1, 1, dims.hc_count)
        zero = x.new_zeros((), dtype=torch.float32)
        out = TargetOutput(hidden=x, streams=x, balance=zero, lesson=zero)
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            cache = None if state is None else state.layers[index]
            if index + 1 in dims.ple_layer_ids:
                x = layer.ple(x, ids, cache)
            x, balance, lesson = layer(x, rope, cache)
            out.balance, out.lesson = out.balance + balance, out.lesson + lesson
            if index in taps:
                tapped[index] = x.unflatten(-1, (dims.hc_count, -1)).mean(-2)
        if state is not None:
            state.position.add_(ids.shape[1])
        out.taps = [tapped[index] for index in taps]
        out.streams, out.hidden = x, self.hyper_connection_mixer(x)[0]
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores float32 [..., V] by the tied head."""
        return functional.linear(hidden, self.embed_tokens.weight.to(hidden.dtype)).float()


def start_weights(net: nn.Module, seed: int) -> None:
    """Fill a fresh net: small normals, zero outputs of blocks, decays spread over the heads.

    Output projections start at zero, so every stream starts as the embedding alone.
    Source: decay range of the gated delta net's reference initialisation.
    """
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name.endswith("A_log"):
                p.copy_(torch.empty(p.shape).uniform_(1.0, 16.0, generator=g).log())
            elif name.endswith("dt_bias"):
                low, high = torch.tensor(1e-3).log(), torch.tensor(1e-1).log()
                dt = (torch.rand(p.shape, generator=g) * (high - low) + low).exp()
                p.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus
            elif name.endswith("linear_attn.conv1d.weight"):
                p.copy_(torch.randn(p.shape, generator=g) * 0.3)
            elif name.endswith(STARTS_AT_ZERO):
                p.zero_()
            elif name == "embed_tokens.weight" or name.endswith("ngram_embedding.weight"):
                p.copy_(torch.randn(p.shape, generator=g) * 0.1)
            elif p.dim() >= 2:
                p.copy_(torch.randn(p.shape, generator=g) * 0.5 * p.shape[-1] ** -0.5)
