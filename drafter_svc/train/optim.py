"""Optimisers and the schedule that both training stages share.

Owns Muon for the matrices inside a stack, AdamW for the rest, and a learning rate that follows
elapsed time, so that a run ends decayed whatever the machine's speed. Does not know losses.

Source: Jordan et al., "Muon" (2024); warm-up, constant, linear decay ("WSD").
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic that drives singular values towards 1
BY_ADAM = (
    "embed",
    "codebook",
    "kernel",
    "mlp.gate.",
    "shared_expert_gate",
    "block_inject",
    "in_proj_a",
    "in_proj_b",
    "conv1d",
)


def orthogonalise(updates: Tensor) -> Tensor:
    """Push the singular values of a batch of matrices [N, R, C] towards 1, in bfloat16."""
    x = updates.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).to(updates.dtype)


class Muon:
    """Momentum with orthogonalised updates; matrices of one shape are handled as one batch."""

    def __init__(self, params: Iterable[nn.Parameter], weight_decay: float, momentum: float = 0.95):
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for p in params:
            by_shape[p.shape].append(p)
        self.groups = list(by_shape.values())
        self.moments = [[torch.zeros_like(p) for p in group] for group in self.groups]
        self.weight_decay, self.momentum = weight_decay, momentum

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Apply one update from the gradients that are there."""
        for params, moments in zip(self.groups, self.moments, strict=True):
            grads = [p.grad for p in params]
            torch._foreach_lerp_(moments, grads, 1 - self.momentum)
            nesterov = torch._foreach_lerp(grads, moments, self.momentum)
            rows, columns = params[0].shape[-2:]
            flat = torch.stack(nesterov).view(-1, rows, columns)
            update = orthogonalise(flat).view(len(params), *params[0].shape)
            scale = max(1.0, rows / columns) ** 0.5
            torch._foreach_mul_(params, 1 - lr * self.weight_decay)
            torch._foreach_add_(params, list(update.unbind(0)), alpha=-lr * scale)


class Optimiser:
    """Muon and AdamW side by side over one module."""

    def __init__(self, net: nn.Module, muon_lr: float, adam_lr: float, weight_decay: float):
        named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
        matrix = [p for n, p in named if p.dim() >= 2 and not any(part in n for part in BY_ADAM)]
        ids = {id(p) for p in matrix}
        rest = [p for _, p in named if id(p) not in ids]
        groups = [
            {"params": [p for p in rest if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.params = [p for _, p in named]
        self.muon = Muon(matrix, weight_decay)
        on_gpu = self.params[0].device.type == "cuda"
        self.adam = torch.optim.AdamW(groups, lr=adam_lr, betas=(0.9, 0.95), fused=on_gpu)
        self.muon_lr, self.adam_lr = muon_lr, adam_lr

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on."""
        return {"adam": self.adam.state_dict(), "muon": self.muon.moments}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state` of an optimiser over the same module."""
        self.adam.load_state_dict(state["adam"])
        for mine, saved in zip(self.muon.moments, state["muon"], strict=True):
            torch._foreach_copy_(mine, saved)

    def step(self, scale: float, clip: float) -> Tensor:
        """Clip, update with both learning rates times `scale`, clear; returns the norm."""
        for p in self.params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        norm = nn.utils.clip_grad_norm_(self.params, clip)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * scale
        self.adam.step()
        self.muon.step(self.muon_lr * scale)
        self.adam.zero_grad(set_to_none=True)
        for group in self.muon.groups:
            for p in group:
                p.grad = None
        return norm


def schedule(done: float, warmup: float, decay: float) -> float:
    """Learning-rate factor after a share `done` of the run, 0..1."""
    return min(1.0, done / max(warmup, 1e-9), max(0.02, (1.0 - done) / max(decay, 1e-9)))
