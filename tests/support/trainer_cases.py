"""A tiny target, its MTP head and its drafter in torch, every weight random. Needs torch."""

import torch

from drafter_svc.train.drafter_net import DrafterNet
from drafter_svc.train.mtp_net import MtpHead
from drafter_svc.train.recipe import DrafterDims, TargetDims
from drafter_svc.train.target_net import TargetNet

SMALL = TargetDims(
    vocab_size=128,
    hidden_size=32,
    num_hidden_layers=4,
    head_dim=16,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=8,
    hc_lowrank=8,
    ple_embed_dim=32,
    ngram_vocab_size_base=50,
    indexer_head_dim=16,
    indexer_budget=32,
)
DRAFTER = DrafterDims(
    num_taps=2,
    target_layer_ids=(1, 2),
    intermediate_size=48,
    head_dim=8,
    sliding_window=24,
    selector_rank=8,
    selector_top_k=4,
)


def fill(net: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Make every weight random: starts at zero would hide whole branches."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(
                torch.randn(p.shape, generator=g) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 0.3)
            )
    return net.eval()


def random_target(dims: TargetDims = SMALL) -> TargetNet:
    """A target."""
    return fill(TargetNet(dims), 3)


def random_head(dims: TargetDims = SMALL) -> MtpHead:
    """Its MTP head."""
    return fill(MtpHead(dims), 4)


def random_drafter(dims: DrafterDims = DRAFTER, target: TargetDims = SMALL) -> DrafterNet:
    """A drafter for it; norms have weights around 1."""
    net = fill(DrafterNet(dims, target), 2)
    with torch.no_grad():
        for p in net.parameters():
            if p.dim() == 1:
                p.add_(1.0)
    return net
