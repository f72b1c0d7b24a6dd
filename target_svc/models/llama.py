"""llama (Llama 2 and 3 and what is built like them): dense attention and a gated MLP.

Knows the published config and weight names. Does not know sessions, acceptance or drafters.
Source: the published checkpoints' configs; rope scaling as in Llama 3.1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from common.checkpoint.index import read_config
from common.checkpoint.network import read_network
from common.checkpoint.weights import require_exactly
from target_svc.models import config as fields
from target_svc.models.blocks.attention import HeadShape
from target_svc.models.blocks.linear import Tensors
from target_svc.models.blocks.rope import RopeTable, frequencies
from target_svc.models.residual import (
    ResidualModel,
    Weights,
    around_shapes,
    end_shapes,
    facts_of,
    head_shapes,
    mlp_shapes,
)

PREFIX: Final = "model."
BUFFER: Final = "rotary_emb.inv_freq"  # derived; stored by old checkpoints
HEAD: Final = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """The fields of the config that shape the network."""

    vocab_size: int
    hidden: int
    n_layers: int
    heads: HeadShape
    turning: np.ndarray  # rope frequencies
    rope_theta: float
    mlp_width: int
    attention_bias: bool
    mlp_bias: bool
    eps: float
    tied: bool
    context_len: int
    eos_ids: tuple[int, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelArgs":
        """Read a published config.json.

        Raises:
            ModelMismatch: a field is missing or has a value that is not implemented.
        """
        with fields.reading("llama"):
            fields.refuse_others(config, [fields.SILU])
            return cls._from_fields(config)

    @classmethod
    def _from_fields(cls, config: Mapping[str, Any]) -> "ModelArgs":
        count, hidden = config["num_attention_heads"], config["hidden_size"]
        head_dim = config.get("head_dim") or hidden // count
        rope = fields.rope_parameters(config, rope_theta=10_000.0, partial_rotary_factor=1.0)
        rotary = int(head_dim * rope["partial_rotary_factor"])
        return cls(
            vocab_size=config["vocab_size"],
            hidden=hidden,
            n_layers=config["num_hidden_layers"],
            heads=HeadShape(count, config.get("num_key_value_heads") or count, head_dim),
            turning=frequencies(rope, rotary),
            rope_theta=float(rope["rope_theta"]),
            mlp_width=config["intermediate_size"],
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            eps=config.get("rms_norm_eps", 1e-6),
            tied=fields.is_tied(config, config),
            context_len=config["max_position_embeddings"],
            eos_ids=fields.end_ids(config, config),
        )

    @property
    def rotary(self) -> int:
        """Dimensions of a head that turn."""
        return 2 * self.turning.size


def expected_shapes(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Every tensor of the network by published name."""
    shapes = end_shapes(PREFIX, args.vocab_size, args.hidden, tied=args.tied)
    for index in range(args.n_layers):
        at = f"{PREFIX}layers.{index}."
        shapes |= around_shapes(at, args.hidden)
        shapes |= head_shapes(
            at + "self_attn.", args.heads, args.hidden, biased=args.attention_bias
        )
        shapes |= mlp_shapes(at + "mlp.", args.hidden, args.mlp_width, biased=args.mlp_bias)
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
    args = ModelArgs.from_config(read_config(folder))
    dropped = (BUFFER, HEAD) if args.tied else (BUFFER,)  # some keep a copy of a tied head
    network = read_network(folder, keep=lambda name: not name.endswith(dropped)).matrices
    require_exactly(network, expected_shapes(args), what="target llama")
    weights = Weights(Tensors(network, keep_packed=keep_packed))
    ends = weights.ends(PREFIX, args.eps, tied=args.tied)
    dtype = ends.embedding.dtype
    rope = RopeTable(args.rope_theta, args.rotary, args.heads.head_dim, dtype, args.turning)
    sizes = (args.vocab_size, args.hidden, args.n_layers, args.context_len)
    layers = [
        weights.dense_layer(PREFIX, index, args.heads, rope, args.eps, weights.mlp)
        for index in range(args.n_layers)
    ]
    return ResidualModel(facts_of(sizes, args.eos_ids, PREFIX, tied=args.tied), ends, layers, rope)
