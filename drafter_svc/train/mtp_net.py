"""The target's own draft head (MTP) in torch, parameters under the published names.

Knows one link of the chain and the chain. Does not know data or files. Row j stands for the token
at position j + 1 and the streams at position j; it predicts the token at position j + 2.

Shapes: B sequences, T rows, S streams, H hidden.
Source: `mtp.*` of `qwen4_exp` as published.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from drafter_svc.train.recipe import TargetDims
from drafter_svc.train.target_blocks import HyperConnection, ZeroCentredNorm, linear, rope_table
from drafter_svc.train.target_net import DecoderLayer, TargetNet, start_weights


class MtpHead(nn.Module):
    """One decoder layer with full attention over (token, streams before it)."""

    def __init__(self, dims: TargetDims):
        super().__init__()
        hidden, width, eps = dims.hidden_size, dims.hc_count * dims.hidden_size, dims.rms_norm_eps
        self.dims = dims
        self.pre_fc_norm_embedding = ZeroCentredNorm(hidden, eps)
        self.fc_embedding = linear(hidden, hidden)
        self.pre_fc_norm_hidden = ZeroCentredNorm(width, eps)  # one variance over all streams
        self.fc_hidden = linear(hidden, hidden)
        attention = dims.layer_types.index("full_attention")
        self.layers = nn.ModuleList([DecoderLayer(dims, attention)])
        self.hyper_connection_mixer = HyperConnection(dims, inject=False)

    def forward(
        self,
        embedded: Tensor,
        streams: Tensor,
        cache: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One link: embedded [B, T, H] and streams [B, T, S*H] to streams, and the indexer's loss.

        With a cache the rows stand after those it holds, and its `position` moves on.
        """
        dims = self.dims
        rows = torch.arange(embedded.shape[1], device=embedded.device)
        rows = rows if cache is None else rows + cache["position"]
        rope = rope_table(rows, int(dims.head_dim * dims.partial_rotary_factor), dims.rope_theta)
        token = self.fc_embedding(self.pre_fc_norm_embedding(embedded))
        before = self.pre_fc_norm_hidden(streams).unflatten(-1, (dims.hc_count, -1))
        x = (self.fc_hidden(before) + token[..., None, :]).flatten(-2)
        x, _, lesson = self.layers[0](x, rope, cache)
        if cache is not None:
            cache["position"].add_(embedded.shape[1])
        return x, lesson

    def read(self, streams: Tensor) -> Tensor:
        """Rows before the target's head [B, T, H]."""
        return self.hyper_connection_mixer(streams)[0]


def start_from_target(head: MtpHead, target: TargetNet, seed: int) -> None:
    """Start as the target's last full-attention layer and final read, on its own streams."""
    start_weights(head, seed)
    last = max(i for i, layer in enumerate(target.layers) if not layer.linear)
    source = {
        name: value
        for name, value in target.layers[last].state_dict().items()
        if not name.startswith("ple.")
    }
    head.layers[0].load_state_dict(source)
    head.hyper_connection_mixer.load_state_dict(target.hyper_connection_mixer.state_dict())
    with torch.no_grad():
        head.fc_hidden.weight.copy_(torch.eye(head.dims.hidden_size))


class Chain:
    """Drafts by the head, greedily, at any anchor of one known text."""

    @torch.no_grad()
    def __init__(self, head: MtpHead, target: TargetNet, ids: Tensor, streams: Tensor):
        """Read the text ids int64 [1, T], T >= 2, whose trunk streams are [1, T, S*H]."""
        self.head, self.target, self.ids = head, target, ids
        self.cache = self._new_cache(ids.shape[1] + 16)
        embedded = target.embed_tokens(ids[:, 1:])
        self.out, _ = head(embedded, streams[:, :-1], self.cache)

    def _new_cache(self, room: int) -> dict[str, Any]:
        return {
            "room": room,
            "position": torch.zeros((), dtype=torch.int64, device=self.ids.device),
        }

    @torch.no_grad()
    def draft(self, anchor: int, count: int) -> list[int]:
        """Up to `count` ids after position `anchor` >= 1; leaves the cache as it was."""
        streams, drafts = self.out[:, anchor - 1 : anchor], []
        cache = {k: v.clone() if torch.is_tensor(v) else v for k, v in self.cache.items()}
        cache["position"].fill_(anchor)
        for _ in range(count):
            best = self.target.logits(self.head.read(streams)).argmax(-1)
            drafts.append(int(best))
            if len(drafts) < count:
                streams, _ = self.head(functional.embedding(best, self._table), streams, cache)
        return drafts

    @property
    def _table(self) -> Tensor:
        return self.target.embed_tokens.weight
