"""glm5_next (GLM-5.3-Flash): mixed streams, Kimi Delta Attention, latent attention, experts.

Knows the published config and weight names, and runs rows of one sequence. Does not know sessions,
acceptance or drafters. Text only: vision tensors and the layers after the last (MTP) are dropped by
name. No positions are encoded anywhere.
Invariant: a forward changes no committed state; `commit` in `target_svc.rollback` does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from common.checkpoint.index import read_config
from common.checkpoint.names import TEXT_PREFIXES
from common.checkpoint.network import read_network, text_prefix
from common.checkpoint.weights import require_exactly
from common.errors import ModelMismatch
from target_svc.models.blocks.kimi_delta import KimiDelta, KimiShape, KimiWeights
from target_svc.models.blocks.latent_attention import LatentAttention, LatentShape, LatentWeights
from target_svc.models.blocks.linear import Embedding, Linear, Tensors
from target_svc.models.blocks.norms import RmsNorm
from target_svc.models.blocks.pooled_index import (
    IndexShape,
    IndexWeights,
    PooledIndex,
    RowPlan,
    plan_rows,
)
from target_svc.models.blocks.sigmoid_experts import (
    Choice,
    ClampedMlp,
    SigmoidExperts,
    SigmoidExpertWeights,
)
from target_svc.models.blocks.sinkhorn import SinkhornConnection, StreamShape, write
from target_svc.models.family import Facts, Inputs, Submit, Tap, arrays_in, blank_ids, write_ids
from target_svc.models.glm5_names import to_published
from target_svc.models.state import Rollable, SequenceState
from target_svc.models.states.channel_recurrent import ChannelRows
from target_svc.models.states.gated_pools import GatedPools
from target_svc.models.states.rows import GrowingRows, RowWindow

VISION: Final = ("model.visual.", "visual.")  # not part of a text target
LINEAR: Final = "linear_attention"
ATTENTION: Final = ("full_attention", "indexed_attention", "deepseek_sparse_attention")
DENSE: Final = "dense"
SPARSE: Final = "sparse"
_MOST_DECAY: Final = -80.0  # least log decay per row that one chunk of the scan can hold

#: Names in the order of the blocks' weight classes.
_KIMI: Final = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "q_conv1d.weight",
    "k_conv1d.weight",
    "v_conv1d.weight",
    "f_a_proj.weight",
    "f_b_proj.weight",
    "A_log",
    "dt_bias",
    "b_proj.weight",
    "g_a_proj.weight",
    "g_b_proj.weight",
    "o_norm.weight",
    "o_proj.weight",
)
_LATENT: Final = (
    "q_a_proj.weight",
    "q_a_layernorm.weight",
    "q_b_proj.weight",
    "kv_a_proj_with_mqa.weight",
    "kv_a_layernorm.weight",
    "kv_b_proj.weight",
    "o_proj.weight",
)
_INDEX: Final = (
    "indexer.wq_b.weight",
    "indexer.wk.weight",
    "indexer.k_norm.weight",
    "indexer.k_norm.bias",
    "indexer.weights_proj.weight",
    "indexer.index_kpool_compress_gate",
    "indexer.index_kpool_compress_ape",
)
_MLP: Final = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")

#: What the published class takes where a config leaves the field out; sizes are not among them.
_DEFAULTS: Final[Mapping[str, object]] = {
    "rms_norm_eps": 1e-5,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "swiglu_limit": 10.0,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_shared_experts": 1,
    "index_topk": 2048,
    "index_kpool": 16,
    "linear_lower_bound": -5.0,
}
#: Fields with one implemented value: field, that value, and the value of a config without it.
_ONLY: Final[tuple[tuple[str, object, object], ...]] = (
    ("qk_rope_head_dim", 0, 0),
    ("mla_use_nope", True, True),
    ("n_group", 1, 1),
    ("topk_group", 1, 1),
    ("scoring_func", "sigmoid", "sigmoid"),
    ("hidden_act", "silu", "silu"),
    ("attention_bias", False, False),
    ("index_kpool_always_select_tail", True, True),
    ("index_kpool_compress", True, True),
)


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """The fields of `text_config` that shape the network."""

    vocab_size: int
    hidden: int
    streams: StreamShape
    layer_types: tuple[str, ...]
    mlp_types: tuple[str, ...]
    kimi: KimiShape
    latent: LatentShape
    index: IndexShape
    mlp_width: int
    n_experts: int
    expert_width: int
    shared_width: int
    choice: Choice
    eps: float
    tied: bool
    context_len: int
    eos_ids: tuple[int, ...]
    n_mtp: int  # layers stored after the last

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelArgs":
        """Read a published config.json; the text fields stand in `text_config` or at the root.

        Raises:
            ModelMismatch: a field is missing or has a value that is not implemented.
        """
        text = {**_DEFAULTS, **(config.get("text_config") or config)}
        try:
            _refuse_unimplemented(text)
            return cls._from_text(text, config)
        except KeyError as error:
            raise ModelMismatch(
                f"config.json lacks {error.args[0]!r}; a glm5_next target needs it"
            ) from error

    @classmethod
    def _from_text(cls, text: Mapping[str, Any], outer: Mapping[str, Any]) -> "ModelArgs":
        eos = (
            text["eos_token_id"] if text.get("eos_token_id") is not None else outer["eos_token_id"]
        )
        eps, limit = text["rms_norm_eps"], float(text["swiglu_limit"])
        n_shared, expert_width = text["n_shared_experts"], text["moe_intermediate_size"]
        return cls(
            vocab_size=text["vocab_size"],
            hidden=text["hidden_size"],
            streams=StreamShape(
                text["hc_mult"], text["hc_sinkhorn_iters"], float(text["hc_eps"]), eps
            ),
            layer_types=_layer_types(text),
            mlp_types=_mlp_types(text),
            kimi=_kimi_shape(text),
            latent=LatentShape(
                heads=text["num_attention_heads"],
                key_dim=text["qk_nope_head_dim"],
                value_dim=text["v_head_dim"],
                rank=text["kv_lora_rank"],
                q_rank=text["q_lora_rank"],
            ),
            index=IndexShape(
                heads=text["index_n_heads"],
                dim=text["index_head_dim"],
                pool=text["index_kpool"],
                kept_pools=text["index_topk"] // text["index_kpool"],
            ),
            mlp_width=text["intermediate_size"],
            n_experts=text["n_routed_experts"],
            expert_width=expert_width,
            shared_width=n_shared * expert_width,
            choice=Choice(
                n_chosen=text["num_experts_per_tok"],
                normalize=text["norm_topk_prob"],
                gain=float(text["routed_scaling_factor"]),
                limit=limit,
            ),
            eps=eps,
            tied=bool(text.get("tie_word_embeddings", outer.get("tie_word_embeddings", False))),
            context_len=text["max_position_embeddings"],
            eos_ids=tuple(eos) if isinstance(eos, list) else (eos,),
            n_mtp=text.get("num_nextn_predict_layers", 1),
        )


def _refuse_unimplemented(text: Mapping[str, Any]) -> None:
    for field, wanted, absent in _ONLY:
        value = text.get(field, absent)
        if value != wanted:
            raise ModelMismatch(f"{field} {value!r}; only {wanted!r} is implemented")
    shared = _shared_layers(text)
    if shared:
        raise ModelMismatch(
            f"indexer_types has 'shared' at layers {shared}; only 'full' is implemented"
        )
    heads = text["num_attention_heads"]
    if (text.get("num_key_value_heads") or heads) != heads:
        raise ModelMismatch(
            f"num_key_value_heads {text['num_key_value_heads']}; latent attention has as many as "
            f"num_attention_heads, {heads}"
        )
    if text["index_topk"] % text["index_kpool"]:
        raise ModelMismatch(
            f"index_topk {text['index_topk']}; it must be a multiple of index_kpool, "
            f"{text['index_kpool']}"
        )


def _shared_layers(text: Mapping[str, Any]) -> list[int]:
    """Attention layers that would take over another layer's choice of pools."""
    count, kinds = text["num_hidden_layers"], text.get("indexer_types")
    if kinds is None and text.get("index_topk_pattern") is not None:
        kinds = [
            "full" if kind in ("F", "full") else "shared" for kind in text["index_topk_pattern"]
        ]
    if kinds is None:
        every, first = max(text.get("index_topk_freq", 1), 1), text.get("index_skip_topk_offset", 2)
        kinds = ["shared" if max(i - first + 1, 0) % every else "full" for i in range(count)]
    types = _layer_types(text)
    return [i for i, kind in enumerate(kinds) if kind != "full" and types[i] != LINEAR]


def _layer_types(text: Mapping[str, Any]) -> tuple[str, ...]:
    count = text["num_hidden_layers"]
    kinds = text.get("layer_types")
    if kinds is None:
        kinds = [ATTENTION[0] if i % 4 == 3 else LINEAR for i in range(count)]
    return _one_per_layer("layer_types", kinds, count, (LINEAR, *ATTENTION))


def _mlp_types(text: Mapping[str, Any]) -> tuple[str, ...]:
    count, first = text["num_hidden_layers"], text.get("first_k_dense_replace", 3)
    kinds = text.get("mlp_layer_types")
    if kinds is None:
        kinds = [DENSE if i < first else SPARSE for i in range(count)]
    return _one_per_layer("mlp_layer_types", kinds, count, (DENSE, SPARSE))


def _one_per_layer(
    field: str, kinds: Sequence[str], count: int, known: tuple[str, ...]
) -> tuple[str, ...]:
    unknown = sorted(set(kinds) - set(known))
    if unknown or len(kinds) != count:
        raise ModelMismatch(
            f"{field} has {len(kinds)} entries, unknown ones {unknown}; right are {count} of "
            f"{list(known)}"
        )
    return tuple(kinds)


def _kimi_shape(text: Mapping[str, Any]) -> KimiShape:
    own = text.get("linear_attn_config") or {}
    bound = own.get("gate_lower_bound", text["linear_lower_bound"])
    if bound is None and own.get("safe_gate", False):
        bound = -5.0
    if bound is None or not _MOST_DECAY <= bound < 0:
        raise ModelMismatch(
            f"linear_lower_bound {bound}; implemented are numbers from {_MOST_DECAY} to below 0"
        )
    return KimiShape(
        heads=own.get("num_heads") or text["linear_num_heads"],
        dim=own.get("head_dim") or text["linear_head_dim"],
        kernel=own.get("short_conv_kernel_size") or text["linear_conv_kernel_dim"],
        bound=float(bound),
    )


# --------------------------------------------------------------------------- layers


class SubLayer:
    """What stands around a mixer or an MLP: the read of the streams, and the norm after it."""

    def __init__(self, connection: SinkhornConnection, norm: RmsNorm) -> None:
        self.connection = connection
        self.norm = norm


class DecoderLayer:
    """One layer: a mixer and an MLP, each between a read and a write of the streams."""

    def __init__(
        self,
        around_mixer: SubLayer,
        mixer: KimiDelta | LatentAttention,
        around_mlp: SubLayer,
        mlp: ClampedMlp | SigmoidExperts,
    ) -> None:
        self.around_mixer = around_mixer
        self.mixer = mixer
        self.around_mlp = around_mlp
        self.mlp = mlp


class Model:
    """A whole target; see `target_svc.models.family.Model`.

    Attributes:
        args: its shape.
        dtype: of activations.
    """

    def __init__(self, args: ModelArgs, weights: "Weights") -> None:
        self.args = args
        self.facts = _facts(args, weights.prefix)
        embedding = weights.tensors.matrix(weights.prefix + "embed_tokens.weight")
        self._embedding = Embedding(embedding)
        self.dtype = self._embedding.dtype
        self._head = Linear(embedding if args.tied else weights.tensors.matrix("lm_head.weight"))
        self.layers: list[DecoderLayer] = []
        for index in range(len(args.layer_types)):
            layer = weights.layer(args, index)
            mx.eval(arrays_in(layer))  # layer by layer: the published tensors are freed on the way
            self.layers.append(layer)
        self._norm = RmsNorm(weights.tensors.take(weights.prefix + "norm.weight"), args.eps)
        mx.eval(arrays_in([self._embedding, self._head, self._norm]))

    # ------------------------------------------------------------------ state

    def new_state(self) -> SequenceState:
        """The state of an empty sequence."""
        args, pieces = self.args, dict[str, Rollable]()
        kimi, index = args.kimi, args.index
        n_linear = args.layer_types.count(LINEAR)
        if n_linear:
            pieces["recurrent"] = ChannelRows(n_linear, (kimi.heads, kimi.dim, kimi.dim))
        for layer, kind in enumerate(args.layer_types):
            if kind == LINEAR:
                window = RowWindow(kimi.kernel - 1, kimi.channels, self.dtype)
                pieces[f"{layer}.window"] = window
            else:
                pieces[f"{layer}.latents"] = GrowingRows(0, args.latent.rank, self.dtype)
                pools = GatedPools(2 * index.dim, index.dim, index.pool, self.dtype)
                pieces[f"{layer}.pools"] = pools
        return SequenceState(pieces)

    # ------------------------------------------------------------------ forward

    def blank(self, rows: int) -> Inputs:
        """See `family.Model`."""
        return Inputs(blank_ids(rows))

    def fill(self, inputs: Inputs, ids: Sequence[int], state: SequenceState) -> None:
        """See `family.Model`; the host keeps nothing of the ids."""
        write_ids(inputs.ids, ids)

    def forward(
        self,
        inputs: Inputs,
        state: SequenceState,
        *,
        tap: Tap | None = None,
        submit: Submit | None = None,
    ) -> mx.array:
        """See `family.Model`; residual rows are streams [R, S, H]."""
        args, rows = self.args, inputs.rows
        state.captured = rows
        embedded = self._embedding(inputs.ids)[:, None, :]
        streams = mx.broadcast_to(embedded, (rows, args.streams.streams, args.hidden))
        plan = plan_rows(state.base, rows)
        n_linear = 0
        for index, layer in enumerate(self.layers):
            x, shares = layer.around_mixer.connection.read(streams)
            x = layer.around_mixer.norm(x)
            y = self._mix(layer.mixer, x, plan, state, index, n_linear)
            n_linear += args.layer_types[index] == LINEAR
            streams = write(streams, y, shares)
            x, shares = layer.around_mlp.connection.read(streams)
            streams = write(streams, layer.mlp(layer.around_mlp.norm(x)), shares)
            if tap is not None:
                tap(index, streams)
            if submit is not None:
                submit(index, streams)
        return self._norm(mx.mean(streams, axis=1))

    def logits(self, hidden: mx.array) -> mx.array:
        """Scores [R, V] of hidden rows [R, H]."""
        return self._head(hidden)

    def contract(self, kind: str, layer: int, streams: mx.array) -> mx.array:
        """One tap [R, H] of streams [R, S, H]: their plain mean, the one contraction here."""
        return mx.mean(streams, axis=1)

    def _mix(
        self,
        mixer: KimiDelta | LatentAttention,
        x: mx.array,
        plan: RowPlan,
        state: SequenceState,
        index: int,
        n_linear: int,
    ) -> mx.array:
        pieces: dict[str, Any] = state.pieces
        if isinstance(mixer, KimiDelta):
            return mixer(x, pieces[f"{index}.window"], pieces["recurrent"], n_linear)
        return mixer(x, plan, pieces[f"{index}.latents"], pieces[f"{index}.pools"])


def _facts(args: ModelArgs, prefix: str) -> Facts:
    embedding = prefix + "embed_tokens.weight"
    return Facts(
        vocab_size=args.vocab_size,
        hidden=args.hidden,
        n_layers=len(args.layer_types),
        context_len=args.context_len,
        eos_ids=args.eos_ids,
        embedding_name=embedding,
        head_name=embedding if args.tied else "lm_head.weight",
        contractions=("stream_mean",),
    )


# --------------------------------------------------------------------------- weights


class Weights:
    """Blocks of the network, made of its tensors.

    Attributes:
        tensors: what is left of them.
        prefix: of the text part's names, one of `TEXT_PREFIXES`.
    """

    def __init__(self, tensors: Tensors, prefix: str) -> None:
        self.tensors = tensors
        self.prefix = prefix

    def layer(self, args: ModelArgs, index: int) -> DecoderLayer:
        """Build one layer."""
        at = f"{self.prefix}layers.{index}."
        return DecoderLayer(
            self._around(at + "hc_attn_", at + "input_layernorm.weight", args),
            self._mixer(at + "self_attn.", args, index),
            self._around(at + "hc_ffn_", at + "post_attention_layernorm.weight", args),
            self._mlp(at + "mlp.", args, index),
        )

    def _around(self, at: str, norm: str, args: ModelArgs) -> SubLayer:
        fn, base, scale = (self.tensors.take(at + name) for name in ("fn", "base", "scale"))
        return SubLayer(
            SinkhornConnection(
                fn.astype(mx.float32),
                base.astype(mx.float32),
                scale.astype(mx.float32),
                args.streams,
            ),
            RmsNorm(self.tensors.take(norm), args.eps),
        )

    def _mixer(self, at: str, args: ModelArgs, index: int) -> KimiDelta | LatentAttention:
        if args.layer_types[index] == LINEAR:
            kimi = KimiWeights(*self.tensors.all_of(at, _KIMI))
            return KimiDelta(kimi, args.kimi, args.eps)
        indexer = PooledIndex(IndexWeights(*self.tensors.all_of(at, _INDEX)), args.index)
        latent = LatentWeights(*self.tensors.all_of(at, _LATENT))
        return LatentAttention(latent, indexer, args.latent, args.eps)

    def _mlp(self, at: str, args: ModelArgs, index: int) -> ClampedMlp | SigmoidExperts:
        limit = args.choice.limit
        if args.mlp_types[index] == DENSE:
            return self._clamped(at, limit)
        shared = self._clamped(at + "shared_experts.", limit)
        weights = SigmoidExpertWeights(
            router=self.tensors.take(at + "gate.weight"),
            correction=self.tensors.take(at + "gate.e_score_correction_bias"),
            gate_up=self.tensors.matrix(at + "experts.gate_up_proj"),
            down=self.tensors.matrix(at + "experts.down_proj"),
        )
        return SigmoidExperts(weights, shared, args.choice)

    def _clamped(self, at: str, limit: float) -> ClampedMlp:
        gate, up, down = self.tensors.all_of(at, _MLP)
        return ClampedMlp(gate, up, down, limit)


# --------------------------------------------------------------------------- names and shapes


def expected_shapes(args: ModelArgs, prefix: str = TEXT_PREFIXES[0]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the network by published name, experts stacked."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (args.vocab_size, args.hidden),
        "norm.weight": (args.hidden,),
    }
    for index, (mixer, mlp) in enumerate(zip(args.layer_types, args.mlp_types, strict=True)):
        at = f"layers.{index}."
        shapes |= _around_shapes(at, args)
        attn = at + "self_attn."
        shapes |= _kimi_shapes(attn, args) if mixer == LINEAR else _latent_shapes(attn, args)
        if mlp == DENSE:
            shapes |= _mlp_shapes(at + "mlp.", args.hidden, args.mlp_width)
        else:
            shapes |= _expert_shapes(at + "mlp.", args)
    named = {prefix + name: shape for name, shape in shapes.items()}
    return named if args.tied else named | {"lm_head.weight": (args.vocab_size, args.hidden)}


def _around_shapes(at: str, args: ModelArgs) -> dict[str, tuple[int, ...]]:
    count = args.streams.streams
    shapes: dict[str, tuple[int, ...]] = {
        at + "input_layernorm.weight": (args.hidden,),
        at + "post_attention_layernorm.weight": (args.hidden,),
    }
    for place in ("attn", "ffn"):
        shapes[f"{at}hc_{place}_fn"] = ((2 + count) * count, count * args.hidden)
        shapes[f"{at}hc_{place}_base"] = ((2 + count) * count,)
        shapes[f"{at}hc_{place}_scale"] = (3,)
    return shapes


def _kimi_shapes(at: str, args: ModelArgs) -> dict[str, tuple[int, ...]]:
    shape, hidden, width = args.kimi, args.hidden, args.kimi.width
    conv = (width, 1, shape.kernel)
    sizes: tuple[tuple[int, ...], ...] = (
        *[(width, hidden)] * 3,
        *[conv] * 3,
        (shape.dim, hidden),
        (width, shape.dim),
        (shape.heads,),
        (width,),
        (shape.heads, hidden),
        (shape.dim, hidden),
        (width, shape.dim),
        (shape.dim,),
        (hidden, width),
    )
    return {at + name: size for name, size in zip(_KIMI, sizes, strict=True)}


def _latent_shapes(at: str, args: ModelArgs) -> dict[str, tuple[int, ...]]:
    shape, index, hidden = args.latent, args.index, args.hidden
    sizes: tuple[tuple[int, ...], ...] = (
        (shape.q_rank, hidden),
        (shape.q_rank,),
        (shape.heads * shape.key_dim, shape.q_rank),
        (shape.rank, hidden),
        (shape.rank,),
        (shape.heads * (shape.key_dim + shape.value_dim), shape.rank),
        (hidden, shape.heads * shape.value_dim),
        (index.heads * index.dim, shape.q_rank),
        (index.dim, hidden),
        (index.dim,),
        (index.dim,),
        (index.heads, hidden),
        (index.dim, hidden),
        (index.pool, index.dim),
    )
    return {at + name: size for name, size in zip((*_LATENT, *_INDEX), sizes, strict=True)}


def _mlp_shapes(at: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    sizes = ((width, hidden), (width, hidden), (hidden, width))
    return {at + name: size for name, size in zip(_MLP, sizes, strict=True)}


def _expert_shapes(at: str, args: ModelArgs) -> dict[str, tuple[int, ...]]:
    count, width, hidden = args.n_experts, args.expert_width, args.hidden
    return {
        at + "gate.weight": (count, hidden),
        at + "gate.e_score_correction_bias": (count,),
        at + "experts.gate_up_proj": (count, 2 * width, hidden),
        at + "experts.down_proj": (count, hidden, width),
        **_mlp_shapes(at + "shared_experts.", hidden, args.shared_width),
    }


# --------------------------------------------------------------------------- loading


def load(folder: Path, *, keep_packed: bool | None = False) -> Model:
    """Load a target in the published format, or packed, strictly.

    Args:
        folder: of the checkpoint.
        keep_packed: see `Tensors`.

    Raises:
        ConfigError: a file is missing or not JSON.
        ModelMismatch: config and weights do not fit; the message lists names.
    """
    args = ModelArgs.from_config(read_config(folder))
    prefix = text_prefix(folder)
    dropped = _dropped(args, prefix)
    shapes = expected_shapes(args, prefix)
    stored = read_network(folder, keep=lambda name: not name.startswith(dropped))
    network = to_published(stored.matrices, shapes)
    require_exactly(network, shapes, what="target glm5_next")
    return Model(args, Weights(Tensors(network, keep_packed=keep_packed), prefix))


def _dropped(args: ModelArgs, prefix: str) -> tuple[str, ...]:
    """Beginnings of names that are not part of a text target."""
    count = len(args.layer_types)
    return (*VISION, *(f"{prefix}layers.{count + i}." for i in range(args.n_mtp)))
