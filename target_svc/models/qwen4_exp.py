"""qwen4_exp (Flash-Next): streams, Gated DeltaNet, indexed attention, experts, n-gram memory.

Knows the published config and weight names, and runs rows of one sequence. Does not know sessions,
acceptance or drafters. Text only: vision and MTP tensors are dropped by name.
Invariant: a forward changes no committed state; `commit` in `target_svc.rollback` does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np

from common.checkpoint.index import TensorSpan, index_tensors, read_config
from common.checkpoint.matrix import Matrix, join, values_of
from common.checkpoint.network import centre_norms, read_network
from common.checkpoint.weights import require_exactly
from common.errors import ModelMismatch
from target_svc.models import delta_fields
from target_svc.models.blocks.attention import RowPlan, plan_rows
from target_svc.models.blocks.gated_delta import DeltaShape, GatedDelta
from target_svc.models.blocks.hyper_connection import HyperConnection, write
from target_svc.models.blocks.linear import Embedding, Linear, Tensors
from target_svc.models.blocks.moe import Experts, ExpertWeights
from target_svc.models.blocks.ngram import NgramLayer, NgramRows, NgramShape, NgramWeights
from target_svc.models.blocks.ngram_files import (
    EXTERNAL_FILE,
    TableFacts,
    is_table_name,
    open_table,
)
from target_svc.models.blocks.ngram_table import NgramTable
from target_svc.models.blocks.rope import RopeTable
from target_svc.models.blocks.sparse_attention import (
    AttentionShape,
    AttentionWeights,
    SparseAttention,
)
from target_svc.models.family import (
    CONTRACTIONS,
    Facts,
    Inputs,
    Submit,
    Tap,
    arrays_in,
    blank_ids,
    blank_rows,
    write_ids,
)
from target_svc.models.state import Rollable, SequenceState
from target_svc.models.states.history import TokenHistory
from target_svc.models.states.index_keys import PooledKeys
from target_svc.models.states.recurrent import RecurrentRows
from target_svc.models.states.rows import GrowingRows, RowWindow

PREFIX: Final = "model.language_model."
DROPPED: Final = ("mtp.", "model.mtp.", "model.visual.", "visual.")  # not part of a text target
LINEAR: Final = "linear_attention"
ATTENTION: Final = ("full_attention", "indexed_attention", "qwen_sparse_attention")
#: Norms used as 1 + w; all others are used as they are.
_CENTRED: Final = (
    "hc_norm.weight",
    "norm_key.weight",
    "norm_query.weight",
    "norm_conv.weight",
    "q_norm.weight",
    "k_norm.weight",
    "q_layernorm.weight",
    "k_layernorm.weight",
)
#: What the host fills for table rows of an activation's dtype.
_HOST_ROWS: Final[dict[mx.Dtype, type[np.generic]]] = {
    mx.bfloat16: np.uint16,
    mx.float16: np.float16,
    mx.float32: np.float32,
}
_BUFFERS: Final = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")

#: Names in the order of the blocks' weight classes.
_ATTENTION: Final = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "o_proj.weight",
    "q_norm.weight",
    "k_norm.weight",
    "indexer.index_qk_proj.weight",
    "indexer.q_layernorm.weight",
    "indexer.k_layernorm.weight",
)
_NGRAM: Final = (
    "key_proj.weight",
    "value_proj.weight",
    "conv1d.weight",
    "norm_key.weight",
    "norm_query.weight",
    "norm_conv.weight",
)


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """The fields of `text_config` that shape the network."""

    vocab_size: int
    hidden: int
    streams: int
    low_rank: int
    layer_types: tuple[str, ...]
    attention: AttentionShape
    delta: DeltaShape
    rope_theta: float
    rotary: int
    n_experts: int
    n_chosen: int
    expert_width: int
    shared_width: int
    normalize_chosen: bool
    eps: float
    tied: bool
    context_len: int
    eos_ids: tuple[int, ...]
    ple_layers: tuple[int, ...]  # zero-based
    ple_width: int
    ple_kernel: int
    ngram: NgramShape | None
    table_parts: int

    @property
    def stream_width(self) -> int:
        """S * H."""
        return self.streams * self.hidden

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelArgs":
        """Read a published config.json.

        Raises:
            ModelMismatch: a field is missing or has a value that is not implemented.
        """
        text = config.get("text_config", config)
        try:
            return cls._from_text(text, config)
        except KeyError as error:
            raise ModelMismatch(
                f"config.json lacks {error.args[0]!r}; a qwen4_exp target needs it"
            ) from error

    @classmethod
    def _from_text(cls, text: Mapping[str, Any], outer: Mapping[str, Any]) -> "ModelArgs":
        eos = text["eos_token_id"]
        eos_ids = tuple(eos) if isinstance(eos, list) else (eos,)
        rope = text["rope_parameters"]
        if rope.get("rope_type", "default") != "default":
            raise ModelMismatch(f"rope_type {rope['rope_type']!r}; only 'default' is implemented")
        layer_types = tuple(text["layer_types"])
        unknown = sorted(set(layer_types) - {LINEAR, *ATTENTION})
        if unknown or len(layer_types) != text["num_hidden_layers"]:
            raise ModelMismatch(
                f"layer_types has {len(layer_types)} entries, unknown ones {unknown}; right are "
                f"{text['num_hidden_layers']} of {[LINEAR, *ATTENTION]}"
            )
        ple_layers = tuple(index - 1 for index in text.get("ple_layer_ids") or ())
        if len(ple_layers) > 1:
            raise ModelMismatch(f"ple_layer_ids {list(ple_layers)}; one such layer is implemented")
        return cls(
            vocab_size=text["vocab_size"],
            hidden=text["hidden_size"],
            streams=text["hc_count"],
            low_rank=text["hc_lowrank"],
            layer_types=layer_types,
            attention=_attention_shape(text),
            delta=_delta_shape(text),
            rope_theta=float(rope["rope_theta"]),
            rotary=int(text["head_dim"] * rope.get("partial_rotary_factor", 1.0)),
            n_experts=text["num_experts"],
            n_chosen=text["num_experts_per_tok"],
            expert_width=text["moe_intermediate_size"],
            shared_width=text["shared_expert_intermediate_size"],
            normalize_chosen=text.get("norm_topk_prob", True),
            eps=text["rms_norm_eps"],
            tied=bool(text.get("tie_word_embeddings", outer.get("tie_word_embeddings", False))),
            context_len=text["max_position_embeddings"],
            eos_ids=eos_ids,
            ple_layers=ple_layers,
            ple_width=text["ple_embed_dim"] if ple_layers else 0,
            ple_kernel=text["ple_conv_kernel_size"] if ple_layers else 0,
            ngram=_ngram_shape(text, eos_ids[0]) if ple_layers else None,
            table_parts=text.get("split_ngram_parts", 1) if ple_layers else 0,
        )


def _attention_shape(text: Mapping[str, Any]) -> AttentionShape:
    if text["indexer_kv_heads"] != 1:
        raise ModelMismatch(f"indexer_kv_heads {text['indexer_kv_heads']}; only 1 is implemented")
    return AttentionShape(
        heads=text["num_attention_heads"],
        kv_heads=text["num_key_value_heads"],
        head_dim=text["head_dim"],
        index_heads=text["indexer_n_heads"],
        index_dim=text["indexer_head_dim"],
        ratio=text["indexer_compress_ratio"],
        kept_blocks=text["indexer_budget"] // text["indexer_compress_ratio"],
    )


def _delta_shape(text: Mapping[str, Any]) -> DeltaShape:
    gate = text.get("output_gate_type") or text.get("hidden_act", "silu")
    if gate not in ("sigmoid", "silu"):
        raise ModelMismatch(f"output_gate_type {gate!r}; right are 'sigmoid' and 'silu'")
    return delta_fields.read_shape(text, gate)


def _ngram_shape(text: Mapping[str, Any], separator_id: int) -> NgramShape:
    return NgramShape(
        vocab_size=text["vocab_size"],
        separator_id=separator_id,
        order=text["ngram_size"],
        heads_per_order=text["heads_per_ngram"],
        base_rows=text["ngram_vocab_size_base"],
        row_multiple=text["make_ngram_vocab_size_divisible_by"],
        seed=text["seed"],
        layer_index=0,
    )


def _facts(args: ModelArgs) -> Facts:
    embedding = PREFIX + "embed_tokens.weight"
    return Facts(
        vocab_size=args.vocab_size,
        hidden=args.hidden,
        n_layers=len(args.layer_types),
        context_len=args.context_len,
        eos_ids=args.eos_ids,
        embedding_name=embedding,
        head_name=embedding if args.tied else "lm_head.weight",
        contractions=CONTRACTIONS,
        # The layer before a PLE layer is read only after the table's rows were added.
        unreadable_taps=(len(args.layer_types) - 1, *(layer - 1 for layer in args.ple_layers)),
    )


# --------------------------------------------------------------------------- layers


class DecoderLayer:
    """One layer: a mixer and the experts, each between a read and a write of the streams."""

    def __init__(
        self,
        mixer_streams: HyperConnection,
        mixer: GatedDelta | SparseAttention,
        expert_streams: HyperConnection,
        experts: Experts,
    ) -> None:
        self.mixer_streams = mixer_streams
        self.mixer = mixer
        self.expert_streams = expert_streams
        self.experts = experts


class Model:
    """A whole target; see `target_svc.models.family.Model`.

    Attributes:
        args: its shape.
        dtype: of activations.
        rope: rotations by position, shared with a draft head.
    """

    def __init__(self, args: ModelArgs, weights: "Weights", table: NgramTable | None) -> None:
        self.args = args
        self.facts = _facts(args)
        embedding = weights.tensors.matrix(PREFIX + "embed_tokens.weight")
        self._embedding = Embedding(embedding)
        self.dtype = embedding.dtype
        self._head = Linear(embedding if args.tied else weights.tensors.matrix("lm_head.weight"))
        width = max(args.attention.head_dim, args.attention.index_dim)
        self.rope = RopeTable(args.rope_theta, args.rotary, width, self.dtype)
        self.layers: list[DecoderLayer] = []
        for index in range(len(args.layer_types)):
            layer = weights.layer(args, index, self.rope)
            mx.eval(arrays_in(layer))  # layer by layer: the published tensors are freed on the way
            self.layers.append(layer)
        self._final = weights.hyper_connection(PREFIX + "hyper_connection_mixer.", args)
        self.ngram_rows = NgramRows(args.ngram) if args.ngram is not None else None
        self._table = table
        self._ngram = [weights.ngram_layer(args, layer) for layer in args.ple_layers]
        mx.eval(arrays_in([self._final, *self._ngram, self._embedding, self._head]))

    # ------------------------------------------------------------------ state

    def new_state(self) -> SequenceState:
        """The state of an empty sequence."""
        args, pieces = self.args, dict[str, Rollable]()
        delta, attention = args.delta, args.attention
        n_linear = args.layer_types.count(LINEAR)
        if n_linear:
            heads = (delta.key_heads, delta.groups, delta.key_dim, delta.value_dim)
            pieces["recurrent"] = RecurrentRows(n_linear, heads)
        for index, kind in enumerate(args.layer_types):
            if kind == LINEAR:
                window = RowWindow(delta.kernel - 1, delta.channels, self.dtype)
                pieces[f"{index}.window"] = window
            else:
                kv_heads, dim = attention.kv_heads, attention.head_dim
                pieces[f"{index}.keys"] = GrowingRows(kv_heads, dim, self.dtype)
                pieces[f"{index}.values"] = GrowingRows(kv_heads, dim, self.dtype)
                index_keys = PooledKeys(attention.index_dim, attention.ratio, self.dtype)
                pieces[f"{index}.index"] = index_keys
        if args.ngram is not None:
            rows = (args.ple_kernel - 1) * args.ngram.order
            pieces["ngram.window"] = RowWindow(rows, args.stream_width, self.dtype)
            pieces["ngram.history"] = TokenHistory(args.ngram.order - 1, args.ngram.separator_id)
        return SequenceState(pieces)

    # ------------------------------------------------------------------ forward

    def blank(self, rows: int) -> Inputs:
        """See `family.Model`; bfloat16 table rows are held as their bits."""
        if self.ngram_rows is None:
            return Inputs(blank_ids(rows))
        memory = blank_rows((rows, self.args.ple_width), _HOST_ROWS[self.dtype])
        return Inputs(blank_ids(rows), memory)

    def fill(self, inputs: Inputs, ids: Sequence[int], state: SequenceState) -> None:
        """See `family.Model`."""
        write_ids(inputs.ids, ids)
        if inputs.memory is None:
            return
        if self.ngram_rows is None or self._table is None:
            raise ModelMismatch("config names a PLE layer without a table; it must name both")
        pieces: dict[str, Any] = state.pieces
        tokens = pieces["ngram.history"].extend(ids)
        rows = self.ngram_rows.rows(tokens, len(ids))
        self._table.gather_into(rows, np.array(inputs.memory, copy=False))

    def prefetch(self, ids: Sequence[int], state: SequenceState, *, skip: int = 0) -> None:
        """See `family.ReadsAhead`."""
        count = len(ids) - skip
        if count > 0 and self.ngram_rows is not None and self._table is not None:
            pieces: dict[str, Any] = state.pieces
            tokens = [*pieces["ngram.history"].ids, *ids]
            self._table.prefetch(self.ngram_rows.rows(tokens, count))

    def counters(self) -> dict[str, int]:
        """See `family.ReadsAhead`."""
        if self._table is None:
            return {}
        return {f"ngram_{name}": count for name, count in self._table.counters().items()}

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
        embedded = self.embed(inputs.ids)
        streams = mx.broadcast_to(embedded[:, None, :], (rows, args.streams, args.hidden))
        plan = plan_rows(state.base, rows, self.rope)
        n_linear = 0
        for index, layer in enumerate(self.layers):
            if index in args.ple_layers:
                streams = streams + self._ngram_sum(inputs, streams, state)
            x, shares = layer.mixer_streams.read(streams)
            y = self._mix(layer.mixer, x, plan, state, index, n_linear)
            n_linear += args.layer_types[index] == LINEAR
            streams = write(streams, y, shares)
            x, shares = layer.expert_streams.read(streams)
            streams = write(streams, layer.experts(x), shares)
            if tap is not None:
                tap(index, streams)
            if submit is not None:
                submit(index, streams)
        return self._final.read(streams)[0]

    def embed(self, ids: mx.array) -> mx.array:
        """Embedding rows [R, H] of ids int32 [R]."""
        return self._embedding(ids)

    def logits(self, hidden: mx.array) -> mx.array:
        """Scores [R, V] of hidden rows [R, H]."""
        return self._head(hidden)

    def contract(self, kind: str, layer: int, streams: mx.array) -> mx.array:
        """One tap [R, H] of streams [R, S, H] after `layer`; `kind` is one of `CONTRACTIONS`."""
        if kind == "stream_mean":
            return mx.mean(streams, axis=1)
        if kind == "final_mixer":
            return self._final.read(streams)[0]
        return self.layers[layer + 1].mixer_streams.read(streams)[0]

    def _mix(
        self,
        mixer: GatedDelta | SparseAttention,
        x: mx.array,
        plan: RowPlan,
        state: SequenceState,
        index: int,
        n_linear: int,
    ) -> mx.array:
        pieces: dict[str, Any] = state.pieces
        if isinstance(mixer, GatedDelta):
            return mixer(x, pieces[f"{index}.window"], pieces["recurrent"], n_linear)
        names = (f"{index}.keys", f"{index}.values", f"{index}.index")
        keys, values, index_keys = (pieces[name] for name in names)
        return mixer(x, plan, keys, values, index_keys)

    def _ngram_sum(self, inputs: Inputs, streams: mx.array, state: SequenceState) -> mx.array:
        pieces: dict[str, Any] = state.pieces
        if inputs.memory is None:
            raise ModelMismatch("inputs lack the table rows of a PLE layer; make them by `blank`")
        is_bits = inputs.memory.dtype == mx.uint16
        rows = inputs.memory.view(mx.bfloat16) if is_bits else inputs.memory
        return self._ngram[0](streams, rows, pieces["ngram.window"])


# --------------------------------------------------------------------------- weights


class Weights:
    """Blocks of the network, made of its tensors.

    Attributes:
        tensors: what is left of them.
    """

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def layer(self, args: ModelArgs, index: int, rope: RopeTable) -> DecoderLayer:
        """Build one layer."""
        at = f"{PREFIX}layers.{index}."
        if args.layer_types[index] != LINEAR:
            return self.attention_layer(args, at, rope)
        rule = delta_fields.take_weights(self.tensors, at + "linear_attn.")
        mixer = GatedDelta(rule, args.delta, args.eps)
        return self._layer_of(mixer, args, at)

    def attention_layer(self, args: ModelArgs, at: str, rope: RopeTable) -> DecoderLayer:
        """Build a layer that attends, of the trunk or of a draft head."""
        weights = self._attention(at + "self_attn.")
        return self._layer_of(SparseAttention(weights, args.attention, rope, args.eps), args, at)

    def _layer_of(
        self, mixer: GatedDelta | SparseAttention, args: ModelArgs, at: str
    ) -> DecoderLayer:
        return DecoderLayer(
            self.hyper_connection(at + "attn_hyper_connection.", args),
            mixer,
            self.hyper_connection(at + "mlp_hyper_connection.", args),
            Experts(self._experts(at + "mlp."), args.n_chosen, normalize=args.normalize_chosen),
        )

    def hyper_connection(self, at: str, args: ModelArgs) -> HyperConnection:
        """Build a read, with its write where the checkpoint has one."""
        return HyperConnection(
            self.tensors.take(at + "hc_norm.weight"),
            self.tensors.matrix(at + "input_mix_weight_down.weight"),
            self.tensors.matrix(at + "input_mix_weight_up.weight"),
            self.tensors.find_matrix(at + "block_inject_weight.weight"),
            streams=args.streams,
            eps=args.eps,
        )

    def ngram_layer(self, args: ModelArgs, layer: int) -> NgramLayer:
        """Build the PLE layer."""
        at = f"{PREFIX}layers.{layer}.ple."
        weights = NgramWeights(*(self.tensors.take(at + name) for name in _NGRAM))
        dilation = args.ngram.order if args.ngram is not None else 1
        return NgramLayer(weights, streams=args.streams, dilation=dilation, eps=args.eps)

    def _attention(self, at: str) -> AttentionWeights:
        return AttentionWeights(*self.tensors.all_of(at, _ATTENTION))

    def _experts(self, at: str) -> ExpertWeights:
        tensors, shared = self.tensors, at + "shared_expert."
        both = [tensors.matrix(f"{shared}{name}_proj.weight") for name in ("gate", "up")]
        return ExpertWeights(
            router=tensors.take(at + "gate.weight"),
            gate_up=tensors.matrix(at + "experts.gate_up_proj"),
            down=tensors.matrix(at + "experts.down_proj"),
            shared_gate_up=join(both),
            shared_down=tensors.matrix(shared + "down_proj.weight"),
            shared_switch=tensors.take(at + "shared_expert_gate.weight"),
        )


# --------------------------------------------------------------------------- names and shapes


def expected_shapes(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Every tensor of the network by published name, experts fused; the table is not among them."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (args.vocab_size, args.hidden)}
    shapes |= _read_shapes("hyper_connection_mixer.", args)
    for index, kind in enumerate(args.layer_types):
        at = f"layers.{index}."
        for name in ("attn_hyper_connection.", "mlp_hyper_connection."):
            shapes |= _read_shapes(at + name, args)
            shapes[f"{at}{name}block_inject_weight.weight"] = (args.streams, args.stream_width)
        if kind == LINEAR:
            shapes |= delta_fields.tensor_shapes(at + "linear_attn.", args.delta, args.hidden)
        else:
            shapes |= _attention_shapes(at, args)
        shapes |= _expert_shapes(at, args)
        if index in args.ple_layers:
            shapes |= _ngram_shapes(at, args)
    named = {PREFIX + name: shape for name, shape in shapes.items()}
    return named if args.tied else named | {"lm_head.weight": (args.vocab_size, args.hidden)}


def head_shapes(args: ModelArgs, at: str) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint's own draft head, by published name."""
    square, layer = (args.hidden, args.hidden), at + "layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        at + "pre_fc_norm_embedding.weight": (args.hidden,),
        at + "pre_fc_norm_hidden.weight": (args.stream_width,),
        at + "fc_embedding.weight": square,
        at + "fc_hidden.weight": square,
    }
    shapes |= _read_shapes(at + "hyper_connection_mixer.", args)
    for name in ("attn_hyper_connection.", "mlp_hyper_connection."):
        shapes |= _read_shapes(layer + name, args)
        shapes[f"{layer}{name}block_inject_weight.weight"] = (args.streams, args.stream_width)
    return shapes | _attention_shapes(layer, args) | _expert_shapes(layer, args)


def _read_shapes(at: str, args: ModelArgs) -> dict[str, tuple[int, ...]]:
    return {
        at + "hc_norm.weight": (args.stream_width,),
        at + "input_mix_weight_down.weight": (args.low_rank, args.stream_width),
        at + "input_mix_weight_up.weight": (args.stream_width, args.low_rank),
    }


def _attention_shapes(at: str, args: ModelArgs) -> dict[str, tuple[int, ...]]:
    shape, hidden, at = args.attention, args.hidden, at + "self_attn."
    kv = shape.kv_heads * shape.head_dim
    return {
        at + "q_proj.weight": (2 * shape.heads * shape.head_dim, hidden),
        at + "k_proj.weight": (kv, hidden),
        at + "v_proj.weight": (kv, hidden),
        at + "o_proj.weight": (hidden, shape.heads * shape.head_dim),
        at + "q_norm.weight": (shape.head_dim,),
        at + "k_norm.weight": (shape.head_dim,),
        at + "indexer.index_qk_proj.weight": ((shape.index_heads + 1) * shape.index_dim, hidden),
        at + "indexer.q_layernorm.weight": (shape.index_dim,),
        at + "indexer.k_layernorm.weight": (shape.index_dim,),
    }


def _expert_shapes(at: str, args: ModelArgs) -> dict[str, tuple[int, ...]]:
    hidden, at = args.hidden, at + "mlp."
    shared = (args.shared_width, hidden)
    return {
        at + "gate.weight": (args.n_experts, hidden),
        at + "experts.gate_up_proj": (args.n_experts, 2 * args.expert_width, hidden),
        at + "experts.down_proj": (args.n_experts, hidden, args.expert_width),
        at + "shared_expert.gate_proj.weight": shared,
        at + "shared_expert.up_proj.weight": shared,
        at + "shared_expert.down_proj.weight": shared[::-1],
        at + "shared_expert_gate.weight": (1, hidden),
    }


def _ngram_shapes(at: str, args: ModelArgs) -> dict[str, tuple[int, ...]]:
    at, width = at + "ple.", args.stream_width
    return {
        at + "key_proj.weight": (width, args.ple_width),
        at + "value_proj.weight": (args.hidden, args.ple_width),
        at + "conv1d.weight": (width, 1, args.ple_kernel),
        at + "norm_key.weight": (width,),
        at + "norm_query.weight": (width,),
        at + "norm_conv.weight": (width,),
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
    config = read_config(folder)
    args = ModelArgs.from_config(config)
    # The maker that keeps the table in a file of its own also adds 1 to the norms.
    is_external = bool({**config, **config.get("text_config", {})}.get("ngram_sidecar"))
    external = folder / EXTERNAL_FILE if is_external else None
    table = _open_table(args, index_tensors(folder), external)
    network = _read_network(folder, args, is_baked=is_external)
    return Model(args, Weights(Tensors(network, keep_packed=keep_packed)), table)


def _read_network(folder: Path, args: ModelArgs, *, is_baked: bool) -> dict[str, Matrix]:
    stored = read_network(folder, keep=_is_device_tensor)
    tensors = centre_norms(stored, _CENTRED, is_baked=is_baked, what="target qwen4_exp")
    _check_buffers(args, tensors)
    network = {name: value for name, value in tensors.items() if not name.endswith(_BUFFERS)}
    require_exactly(network, expected_shapes(args), what="target qwen4_exp")
    return network


def _is_device_tensor(name: str) -> bool:
    return not is_table_name(name) and not name.startswith(DROPPED)


def _check_buffers(args: ModelArgs, tensors: Mapping[str, Matrix]) -> None:
    """The stored hash constants, where present, must equal the derived ones."""
    if args.ngram is None:
        return
    rows = NgramRows(args.ngram)
    derived = dict(zip(_BUFFERS, (rows.multipliers, rows.sizes, rows.offsets), strict=True))
    for name, value in tensors.items():
        buffer = name.rsplit(".", 1)[-1]
        if buffer in derived and not np.array_equal(np.array(values_of(value)), derived[buffer]):
            raise ModelMismatch(
                f"{name} is {values_of(value).tolist()}; this config makes "
                f"{derived[buffer].tolist()}"
            )


def _open_table(
    args: ModelArgs, spans: Mapping[str, TensorSpan], external: Path | None
) -> NgramTable | None:
    if args.ngram is None:
        found = sorted(name for name in spans if is_table_name(name))
        if found:
            raise ModelMismatch(f"unexpected n-gram table {found[0]}; the config names no layer")
        return None
    rows = NgramRows(args.ngram)
    width = args.ple_width // args.ngram.heads
    n_used = int(rows.sizes.sum())
    facts = TableFacts(args.ple_layers[0], rows.n_rows, n_used, width, args.table_parts)
    return open_table(spans, facts, external=external)
