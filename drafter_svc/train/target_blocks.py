"""The blocks of a trainable `qwen4_exp` in torch, parameters under the published names.

Knows each block in training and in decoding, but full attention (`indexed_attention`). Does not
know the stack, data or files. A cache is a dict of tensors whose first axis is the batch; a block
writes into them in place when it decodes, so that a decoding step can be recorded and replayed.

Shapes: B sequences, T tokens, S streams, H hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from drafter_svc.train.delta_rule import delta_rule_chunked, delta_rule_step
from drafter_svc.train.recipe import TargetDims

Rope = tuple[Tensor, Tensor]  # cos, sin, float32 [T, rotary dims]


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A projection without bias: this family has none."""
    return nn.Linear(inputs, outputs, bias=False)


class ZeroCentredNorm(nn.Module):
    """RMSNorm scaled by 1 + weight; `groups` parts of the last axis have a variance each."""

    def __init__(self, size: int, eps: float, groups: int = 1):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps, self.groups = eps, groups

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., size] in float32 and return x's dtype."""
        y = x.float().unflatten(-1, (self.groups, -1))
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y.flatten(-2) * (1.0 + self.weight)).to(x.dtype)


class DepthwiseConv(nn.Module):
    """Causal depthwise convolution, weight [C, 1, K] as `nn.Conv1d` stores it, channels last."""

    def __init__(self, channels: int, kernel: int, dilation: int = 1):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, kernel))
        self.dilation = dilation
        self.window = (kernel - 1) * dilation

    def forward(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Convolve [B, T, C] after `before` [B, window, C] (None: zeros); also the new window."""
        length = x.shape[1]
        full = (
            functional.pad(x, (0, 0, self.window, 0))
            if before is None
            else torch.cat([before, x], 1)
        )
        taps = self.weight[:, 0].to(x.dtype).unbind(-1)
        rows = [full[:, j * self.dilation :][:, :length] * tap for j, tap in enumerate(taps)]
        return torch.stack(rows).sum(0), full[:, length:]


class HyperConnection(nn.Module):
    """Read one vector out of the streams, and say how much of the answer each stream gets."""

    def __init__(self, dims: TargetDims, inject: bool = True):
        super().__init__()
        self.streams = dims.hc_count
        width = dims.hc_count * dims.hidden_size
        self.hc_norm = ZeroCentredNorm(width, dims.rms_norm_eps, dims.hc_count)
        self.input_mix_weight_down = linear(width, dims.hc_lowrank)
        self.input_mix_weight_up = linear(dims.hc_lowrank, width)
        self.block_inject_weight = linear(width, dims.hc_count) if inject else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Read x [B, T, S*H]: the input of a block [B, T, H], the shares [B, T, S]."""
        normed = self.hc_norm(x)
        hidden = functional.silu(self.input_mix_weight_down(normed) / self.streams)
        gate = torch.sigmoid(self.input_mix_weight_up(hidden))
        mixed = (gate * normed).unflatten(-1, (self.streams, -1)).mean(-2)
        if self.block_inject_weight is None:
            return mixed, None
        return mixed, 2.0 * torch.sigmoid(self.block_inject_weight(normed) / self.streams)


def keep(cache: dict[str, Any], name: str, value: Tensor) -> None:
    """Put a tensor into a cache, in place where one of its shape is there."""
    if name in cache:
        cache[name].copy_(value)
    else:
        cache[name] = value.clone()


def write(x: Tensor, y: Tensor, shares: Tensor) -> Tensor:
    """Add block output y [B, T, H] to every stream of x [B, T, S*H] by its share."""
    return x + (shares[..., None] * y[..., None, :]).flatten(-2).to(x.dtype)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate the leading dims of x [B, heads, T, D], split-half pairing."""
    cos, sin = rope
    part, rest = x[..., : cos.shape[-1]].float(), x[..., cos.shape[-1] :]
    first, second = part.chunk(2, -1)
    turned = part * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([turned.to(x.dtype), rest], -1)


def rope_table(positions: Tensor, dims: int, theta: float) -> Rope:
    """Cosines and sines for float32 rotation of `dims` dims at the positions [...]."""
    steps = torch.arange(0, dims, 2, device=positions.device, dtype=torch.float32)
    angle = positions.float()[..., None] * theta ** (-steps / dims)
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


class GatedDeltaNet(nn.Module):
    """Linear attention with a recurrent state per value head."""

    def __init__(self, dims: TargetDims):
        super().__init__()
        self.key_heads, self.value_heads = dims.linear_num_key_heads, dims.linear_num_value_heads
        self.key_dim, self.value_dim = dims.linear_key_head_dim, dims.linear_value_head_dim
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self.sizes = [keys, keys, values]
        self.eps = dims.rms_norm_eps
        self.in_proj_qkv = linear(dims.hidden_size, 2 * keys + values)
        self.in_proj_z = linear(dims.hidden_size, values)
        self.in_proj_b = linear(dims.hidden_size, self.value_heads)
        self.in_proj_a = linear(dims.hidden_size, self.value_heads)
        self.conv1d = DepthwiseConv(2 * keys + values, dims.linear_conv_kernel_dim)
        self.A_log = nn.Parameter(torch.zeros(self.value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(self.value_heads))
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(self.value_dim))
        self.out_proj = linear(values, dims.hidden_size)

    def _heads(self, x: Tensor, cache: dict[str, Any] | None) -> tuple[Tensor, Tensor, Tensor]:
        before = None if cache is None else cache.get("conv")
        mixed, window = self.conv1d(self.in_proj_qkv(x), before)
        if cache is not None:
            keep(cache, "conv", window)
        q, k, v = functional.silu(mixed).float().split(self.sizes, -1)
        q, k = (t.unflatten(-1, (self.key_heads, -1)) for t in (q, k))
        q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6) * self.key_dim**-0.5
        k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + 1e-6)
        group = self.value_heads // self.key_heads
        q, k = (t.repeat_interleave(group, 2).transpose(1, 2) for t in (q, k))
        return q, k, v.unflatten(-1, (self.value_heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, rope: Rope, cache: dict[str, Any] | None = None) -> Tensor:
        """Mix [B, T, H]; `rope` is unused, so that both kinds of layer are called alike."""
        q, k, v = self._heads(x, cache)
        beta = torch.sigmoid(self.in_proj_b(x).float()).transpose(1, 2)
        rate = functional.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        log_decay = (-self.A_log.float().exp() * rate).transpose(1, 2)
        with torch.autocast(x.device.type, enabled=False):
            if cache is not None and "state" in cache and x.shape[1] == 1:
                parts = (t[:, :, 0] for t in (q, k, v, beta, log_decay))
                out = delta_rule_step(*parts, cache["state"])[:, :, None]
            else:
                state = None if cache is None else cache.get("state")
                out, state = delta_rule_chunked(q, k, v, beta, log_decay, state)
                if cache is not None:
                    keep(cache, "state", state)
        out = out.transpose(1, 2)
        out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + self.eps)
        gate = torch.sigmoid(self.in_proj_z(x).float()).unflatten(-1, (self.value_heads, -1))
        return self.out_proj((out * self.norm.weight * gate).flatten(-2).to(x.dtype))


class Experts(nn.Module):
    """Routed experts, computed densely: with few small experts one wide product is cheapest."""

    def __init__(self, dims: TargetDims):
        super().__init__()
        count, hidden, inner = dims.num_experts, dims.hidden_size, dims.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.zeros(count, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.zeros(count, hidden, inner))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Sum the experts' answers to [B, T, H] by weights [B, T, E] (0 where not chosen)."""
        both = functional.linear(x, self.gate_up_proj.flatten(0, 1))
        gate, up = both.unflatten(-1, (weights.shape[-1], 2, -1)).unbind(-2)
        hidden = functional.silu(gate) * up * weights[..., None].to(x.dtype)
        return functional.linear(hidden.flatten(-2), self.down_proj.transpose(0, 1).flatten(1))


class SharedExpert(nn.Module):
    """A gated feed-forward that every token passes."""

    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, inner), linear(hidden, inner)
        self.down_proj = linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., H] to [..., H]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
