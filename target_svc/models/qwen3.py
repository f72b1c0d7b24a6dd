"""qwen3 and qwen3_moe: dense attention with normed heads, and a gated MLP or experts.

Knows the published config and weight names. Does not know sessions, acceptance or drafters.
Sliding windows, which no published checkpoint of the family switches on, are refused by name.
Source: the published checkpoints' configs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from common.checkpoint.index import read_config
from common.checkpoint.network import read_network
from common.checkpoint.weights import require_exactly
from common.errors import ModelMismatch
from target_svc.models import config as fields
from target_svc.models.blocks.attention import HeadShape
from target_svc.models.blocks.linear import Tensors
from target_svc.models.blocks.mlp import Mlp
from target_svc.models.blocks.moe import Experts
from target_svc.models.blocks.rope import RopeTable, frequencies
from target_svc.models.residual import (
    ResidualModel,
    Weights,
    around_shapes,
    end_shapes,
    expert_shapes,
    facts_of,
    head_shapes,
    mlp_shapes,
)

PREFIX: Final = "model."
HEAD: Final = "lm_head.weight"
_FULL: Final = "full_attention"
_ONLY: Final[tuple[fields.Only, ...]] = (fields.SILU, ("use_sliding_window", False, False))


@dataclass(frozen=True, slots=True)
class ExpertArgs:
    """Experts of the layers that have them."""

    count: int
    chosen: int
    width: int
    normalize: bool


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """The fields of the config that shape the network."""

    vocab_size: int
    hidden: int
    heads: HeadShape
    turning: np.ndarray  # rope frequencies
    rope_theta: float
    mlp_width: int
    experts: ExpertArgs | None
    has_experts: tuple[bool, ...]  # one per layer
    attention_bias: bool
    eps: float
    tied: bool
    context_len: int
    eos_ids: tuple[int, ...]

    @property
    def n_layers(self) -> int:
        """How many layers."""
        return len(self.has_experts)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelArgs":
        """Read a published config.json.

        Raises:
            ModelMismatch: a field is missing or has a value that is not implemented.
        """
        with fields.reading(str(config.get("model_type", "qwen3"))):
            fields.refuse_others(config, _ONLY)
            unknown = sorted(set(config.get("layer_types") or ()) - {_FULL})
            if unknown:
                raise ModelMismatch(f"layer_types has {unknown}; only {_FULL!r} is implemented")
            return cls._from_fields(config)

    @classmethod
    def _from_fields(cls, config: Mapping[str, Any]) -> "ModelArgs":
        count, hidden = config["num_attention_heads"], config["hidden_size"]
        head_dim = config.get("head_dim") or hidden // count
        rope = fields.rope_parameters(config, partial_rotary_factor=1.0)
        experts = _experts(config)
        return cls(
            vocab_size=config["vocab_size"],
            hidden=hidden,
            heads=HeadShape(count, config.get("num_key_value_heads") or count, head_dim),
            turning=frequencies(rope, int(head_dim * rope["partial_rotary_factor"])),
            rope_theta=float(rope["rope_theta"]),
            mlp_width=config["intermediate_size"],
            experts=experts,
            has_experts=_which_have_experts(config, experts),
            attention_bias=bool(config.get("attention_bias", False)),
            eps=config["rms_norm_eps"],
            tied=fields.is_tied(config, config),
            context_len=config["max_position_embeddings"],
            eos_ids=fields.end_ids(config, config),
        )


def _experts(config: Mapping[str, Any]) -> ExpertArgs | None:
    count = config.get("num_experts") or config.get("num_local_experts")
    if not count:
        return None
    return ExpertArgs(
        count,
        config["num_experts_per_tok"],
        config["moe_intermediate_size"],
        bool(config.get("norm_topk_prob", False)),
    )


def _which_have_experts(config: Mapping[str, Any], experts: ExpertArgs | None) -> tuple[bool, ...]:
    dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    return tuple(
        experts is not None and index not in dense and (index + 1) % step == 0
        for index in range(config["num_hidden_layers"])
    )


def expected_shapes(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Every tensor of the network by published name, experts stacked."""
    hidden, norm = args.hidden, (args.heads.head_dim,)
    shapes = end_shapes(PREFIX, args.vocab_size, hidden, tied=args.tied)
    for index in range(args.n_layers):
        at, attn = f"{PREFIX}layers.{index}.", f"{PREFIX}layers.{index}.self_attn."
        shapes |= around_shapes(at, hidden)
        shapes |= head_shapes(attn, args.heads, hidden, biased=args.attention_bias)
        shapes |= {attn + "q_norm.weight": norm, attn + "k_norm.weight": norm}
        if args.experts is not None and args.has_experts[index]:
            shapes |= expert_shapes(at + "mlp.", hidden, args.experts.count, args.experts.width)
        else:
            shapes |= mlp_shapes(at + "mlp.", hidden, args.mlp_width)
    return shapes


def load(folder: Path, *, keep_packed: bool | None = False) -> ResidualModel:
    """Load a target in the published format, or packed, strictly.

    Args:
        folder: of the checkpoint.
        keep_packed: see `Tensors`.

    Raises:
        ConfigError: a file is missing or not JSON.
        ModelMismatch: config and weights do not fit; the message lists names.
    """
    config = read_config(folder)
    args = ModelArgs.from_config(config)
    # Small published checkpoints keep a copy of the tied head.
    network = read_network(folder, keep=lambda name: not (args.tied and name == HEAD)).matrices
    require_exactly(network, expected_shapes(args), what=f"target {config.get('model_type')}")
    weights = Weights(Tensors(network, keep_packed=keep_packed))
    ends = weights.ends(PREFIX, args.eps, tied=args.tied)
    rotary, dtype = 2 * args.turning.size, ends.embedding.dtype
    rope = RopeTable(args.rope_theta, rotary, args.heads.head_dim, dtype, args.turning)
    sizes = (args.vocab_size, args.hidden, args.n_layers, args.context_len)
    layers = [
        weights.dense_layer(
            PREFIX, index, args.heads, rope, args.eps, partial(_mlp, weights, args, index)
        )
        for index in range(args.n_layers)
    ]
    return ResidualModel(facts_of(sizes, args.eos_ids, PREFIX, tied=args.tied), ends, layers, rope)


def _mlp(weights: Weights, args: ModelArgs, index: int, at: str) -> Mlp | Experts:
    if args.experts is None or not args.has_experts[index]:
        return weights.mlp(at)
    experts = args.experts
    return Experts(weights.experts(at), experts.chosen, normalize=experts.normalize, gain=1.0)
