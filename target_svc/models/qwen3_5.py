"""qwen3_5 and qwen3_5_moe: Gated DeltaNet with gated attention between, and an MLP or experts.

Knows the published config and weight names. Does not know sessions, acceptance or drafters. Text
only: vision and MTP tensors are dropped by name, and three equal axes of positions are plain rope.
Norms are stored around zero, those after DeltaNet as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np

from common.checkpoint.index import read_config
from common.checkpoint.names import TEXT_PREFIXES
from common.checkpoint.network import centre_norms, read_network, text_prefix
from common.checkpoint.weights import require_exactly
from common.errors import ModelMismatch
from target_svc.models import config as fields
from target_svc.models import delta_fields
from target_svc.models.blocks.attention import Attention, HeadShape
from target_svc.models.blocks.gated_delta import DeltaShape, GatedDelta
from target_svc.models.blocks.linear import Tensors
from target_svc.models.blocks.mlp import Mlp
from target_svc.models.blocks.moe import Experts
from target_svc.models.blocks.norms import RmsNorm
from target_svc.models.blocks.rope import RopeTable, frequencies
from target_svc.models.family import arrays_in
from target_svc.models.residual import (
    DeltaMixer,
    DenseMixer,
    ResidualLayer,
    ResidualModel,
    Weights,
    around_shapes,
    end_shapes,
    expert_shapes,
    facts_of,
    head_shapes,
    mlp_shapes,
)

DROPPED: Final = ("mtp.", "model.mtp.", "model.visual.", "visual.")  # not part of a text target
HEAD: Final = "lm_head.weight"
LINEAR: Final = "linear_attention"
ATTENTION: Final = "full_attention"
#: Norms used as 1 + w.
_CENTRED: Final = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "q_norm.weight",
    "k_norm.weight",
    "model.norm.weight",
)
_ONLY: Final[tuple[fields.Only, ...]] = (
    fields.SILU,
    ("attention_bias", False, False),
    ("attn_output_gate", True, True),
    ("output_gate_type", "silu", "silu"),
    ("norm_topk_prob", True, True),
)


@dataclass(frozen=True, slots=True)
class ExpertArgs:
    """Experts of every layer."""

    count: int
    chosen: int
    width: int
    shared_width: int


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """The fields of `text_config` that shape the network."""

    vocab_size: int
    hidden: int
    layer_types: tuple[str, ...]
    heads: HeadShape
    delta: DeltaShape
    turning: np.ndarray  # rope frequencies
    rope_theta: float
    mlp_width: int  # 0 with experts
    experts: ExpertArgs | None
    eps: float
    tied: bool
    context_len: int
    eos_ids: tuple[int, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelArgs":
        """Read a published config.json; the text fields stand in `text_config` or at the root.

        Raises:
            ModelMismatch: a field is missing or has a value that is not implemented.
        """
        text = config.get("text_config") or config
        with fields.reading(str(config.get("model_type", "qwen3_5"))):
            fields.refuse_others(text, _ONLY)
            if text.get("mlp_only_layers"):
                raise ModelMismatch(
                    f"mlp_only_layers {text['mlp_only_layers']}; only an empty list is implemented"
                )
            return cls._from_text(text, config)

    @classmethod
    def _from_text(cls, text: Mapping[str, Any], outer: Mapping[str, Any]) -> "ModelArgs":
        rope = fields.rope_parameters(text, partial_rotary_factor=0.25)
        experts = _experts(text)
        head_dim = text["head_dim"]
        return cls(
            vocab_size=text["vocab_size"],
            hidden=text["hidden_size"],
            layer_types=_layer_types(text),
            heads=HeadShape(text["num_attention_heads"], text["num_key_value_heads"], head_dim),
            delta=delta_fields.read_shape(text, "silu"),
            turning=frequencies(rope, int(head_dim * rope["partial_rotary_factor"])),
            rope_theta=float(rope["rope_theta"]),
            mlp_width=0 if experts is not None else text["intermediate_size"],
            experts=experts,
            eps=text["rms_norm_eps"],
            tied=fields.is_tied(text, outer),
            context_len=text["max_position_embeddings"],
            eos_ids=fields.end_ids(text, outer),
        )


def _experts(text: Mapping[str, Any]) -> ExpertArgs | None:
    if not text.get("num_experts"):
        return None
    return ExpertArgs(
        text["num_experts"],
        text["num_experts_per_tok"],
        text["moe_intermediate_size"],
        text["shared_expert_intermediate_size"],
    )


def _layer_types(text: Mapping[str, Any]) -> tuple[str, ...]:
    count, kinds = text["num_hidden_layers"], text.get("layer_types")
    if kinds is None:
        every = text.get("full_attention_interval", 4)
        kinds = [LINEAR if (index + 1) % every else ATTENTION for index in range(count)]
    unknown = sorted(set(kinds) - {LINEAR, ATTENTION})
    if unknown or len(kinds) != count:
        raise ModelMismatch(
            f"layer_types has {len(kinds)} entries, unknown ones {unknown}; right are {count} of "
            f"{[LINEAR, ATTENTION]}"
        )
    return tuple(kinds)


# --------------------------------------------------------------------------- names and shapes


def expected_shapes(args: ModelArgs, prefix: str = TEXT_PREFIXES[0]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the network by published name, experts stacked."""
    hidden, norm = args.hidden, (args.heads.head_dim,)
    shapes = end_shapes(prefix, args.vocab_size, hidden, tied=args.tied)
    for index, kind in enumerate(args.layer_types):
        at = f"{prefix}layers.{index}."
        shapes |= around_shapes(at, hidden)
        if kind == LINEAR:
            shapes |= delta_fields.tensor_shapes(at + "linear_attn.", args.delta, hidden)
        else:
            attn = at + "self_attn."
            shapes |= head_shapes(attn, args.heads, hidden, packs_gate=True)
            shapes |= {attn + "q_norm.weight": norm, attn + "k_norm.weight": norm}
        shapes |= _mlp_shapes(at + "mlp.", args)
    return shapes


def _mlp_shapes(at: str, args: ModelArgs) -> dict[str, tuple[int, ...]]:
    hidden, experts = args.hidden, args.experts
    if experts is None:
        return mlp_shapes(at, hidden, args.mlp_width)
    return {
        **expert_shapes(at, hidden, experts.count, experts.width),
        **mlp_shapes(at + "shared_expert.", hidden, experts.shared_width),
        at + "shared_expert_gate.weight": (1, hidden),
    }


# --------------------------------------------------------------------------- loading


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
    prefix = text_prefix(folder)
    dropped = (*DROPPED, HEAD) if args.tied else DROPPED
    stored = read_network(folder, keep=lambda name: not name.startswith(dropped))
    what = f"target {config.get('model_type')}"
    # Pack makers of this family add 1 to the norms.
    network = centre_norms(stored, _CENTRED, is_baked=stored.is_pack, what=what)
    require_exactly(network, expected_shapes(args, prefix), what=what)
    weights = Weights(Tensors(network, keep_packed=keep_packed))
    ends = weights.ends(prefix, args.eps, tied=args.tied, centre=1.0)
    rotary, dtype = 2 * args.turning.size, ends.embedding.dtype
    rope = RopeTable(args.rope_theta, rotary, args.heads.head_dim, dtype, args.turning)
    layers = [_layer(weights, args, prefix, index, rope) for index in range(len(args.layer_types))]
    sizes = (args.vocab_size, args.hidden, len(layers), args.context_len)
    facts = facts_of(sizes, args.eos_ids, prefix, tied=args.tied)
    return ResidualModel(facts, ends, layers, rope, args.delta)


def _layer(
    weights: Weights, args: ModelArgs, prefix: str, index: int, rope: RopeTable
) -> ResidualLayer:
    at = f"{prefix}layers.{index}."
    layer = ResidualLayer(
        RmsNorm(1.0 + weights.tensors.take(at + "input_layernorm.weight"), args.eps),
        _mixer(weights, args, at, index, rope),
        RmsNorm(1.0 + weights.tensors.take(at + "post_attention_layernorm.weight"), args.eps),
        _mlp(weights, args, at + "mlp."),
    )
    mx.eval(arrays_in(layer))  # layer by layer: the published tensors are freed on the way
    return layer


def _mixer(
    weights: Weights, args: ModelArgs, at: str, index: int, rope: RopeTable
) -> DeltaMixer | DenseMixer:
    if args.layer_types[index] != LINEAR:
        taken = weights.heads(at + "self_attn.", centre=1.0)
        return DenseMixer(index, Attention(taken, args.heads, rope, args.eps), args.heads)
    rule = delta_fields.take_weights(weights.tensors, at + "linear_attn.")
    delta = GatedDelta(rule, args.delta, args.eps, gain=1.0)
    place = args.layer_types[:index].count(LINEAR)
    return DeltaMixer(index, place, delta, args.delta)


def _mlp(weights: Weights, args: ModelArgs, at: str) -> Mlp | Experts:
    if args.experts is None:
        return weights.mlp(at)
    return Experts(weights.experts(at), args.experts.chosen, normalize=True, gain=1.0)
