"""A decoder of one residual stream: norm, mixer, norm, feed-forward, layer after layer.

Owns the forward and the state of such networks, and the loading that they share. Does not know
configs or how layers are named; each family is one file beside this one. Text only.
Invariant: a forward changes no committed state; `commit` in `target_svc.rollback` does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import mlx.core as mx

from common.checkpoint.matrix import Matrix, join
from target_svc.models.blocks.attention import Attention, HeadShape, HeadWeights, RowPlan, plan_rows
from target_svc.models.blocks.gated_delta import DeltaShape, GatedDelta
from target_svc.models.blocks.linear import Embedding, Linear, Tensors
from target_svc.models.blocks.mlp import Mlp, MlpWeights
from target_svc.models.blocks.moe import Experts, ExpertWeights
from target_svc.models.blocks.norms import RmsNorm
from target_svc.models.blocks.rope import RopeTable
from target_svc.models.family import Facts, Inputs, Submit, Tap, arrays_in, blank_ids, write_ids
from target_svc.models.state import Rollable, SequenceState
from target_svc.models.states.recurrent import RecurrentRows
from target_svc.models.states.rows import GrowingRows, RowWindow

STREAM_MEAN: Final = "stream_mean"  # of one stream: the residual itself
MLP: Final = ("gate_proj", "up_proj", "down_proj")
HEADS: Final = ("q_proj", "k_proj", "v_proj", "o_proj")


class Mixer(Protocol):
    """What mixes the rows of one layer with those before them."""

    def __call__(self, x: mx.array, plan: RowPlan, state: SequenceState) -> mx.array:
        """Mix x [R, H] and capture its rows in `state`; out [R, H]."""

    def new_pieces(self, dtype: mx.Dtype) -> dict[str, Rollable]:
        """The layer's own state before the first row, by name."""


class DenseMixer:
    """Attention of layer `index`."""

    def __init__(self, index: int, attention: Attention, shape: HeadShape) -> None:
        self._names = (f"{index}.keys", f"{index}.values")
        self._shape = shape
        self.attention = attention

    def __call__(self, x: mx.array, plan: RowPlan, state: SequenceState) -> mx.array:
        """See `Mixer`."""
        pieces: dict[str, Any] = state.pieces
        keys, values = (pieces[name] for name in self._names)
        return self.attention(x, plan, keys, values)

    def new_pieces(self, dtype: mx.Dtype) -> dict[str, Rollable]:
        """See `Mixer`."""
        shape = self._shape
        return {name: GrowingRows(shape.kv_heads, shape.head_dim, dtype) for name in self._names}


class DeltaMixer:
    """Gated DeltaNet of layer `index`, the `place`-th of its kind."""

    def __init__(self, index: int, place: int, delta: GatedDelta, shape: DeltaShape) -> None:
        self._name = f"{index}.window"
        self._place = place
        self._shape = shape
        self.delta = delta

    def __call__(self, x: mx.array, plan: RowPlan, state: SequenceState) -> mx.array:
        """See `Mixer`."""
        pieces: dict[str, Any] = state.pieces
        return self.delta(x, pieces[self._name], pieces["recurrent"], self._place)

    def new_pieces(self, dtype: mx.Dtype) -> dict[str, Rollable]:
        """See `Mixer`; the recurrent states of all layers are one piece of the network."""
        return {self._name: RowWindow(self._shape.kernel - 1, self._shape.channels, dtype)}


class ResidualLayer:
    """One layer."""

    def __init__(
        self, mixer_norm: RmsNorm, mixer: Mixer, mlp_norm: RmsNorm, mlp: Mlp | Experts
    ) -> None:
        self.mixer_norm = mixer_norm
        self.mixer = mixer
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, x: mx.array, plan: RowPlan, state: SequenceState) -> mx.array:
        """Apply to residual rows x [R, H]."""
        x = x + self.mixer(self.mixer_norm(x), plan, state)
        return x + self.mlp(self.mlp_norm(x))


@dataclass(frozen=True, slots=True)
class Ends:
    """What stands before and after the layers."""

    embedding: Matrix  # [V, H]
    head: Matrix  # [V, H]; the embedding itself where they are tied
    norm: RmsNorm


class ResidualModel:
    """A whole target; see `target_svc.models.family.Model`.

    Args:
        facts: of the family and its config.
        ends: see `Ends`.
        layers: in order, evaluated.
        rope: rotations by position, shared by all layers.
        delta: shape of the Gated DeltaNet layers; None where there are none.

    Attributes:
        dtype: of activations.
    """

    def __init__(
        self,
        facts: Facts,
        ends: Ends,
        layers: Sequence[ResidualLayer],
        rope: RopeTable,
        delta: DeltaShape | None = None,
    ) -> None:
        self.facts = facts
        self.layers = list(layers)
        self.dtype = ends.embedding.dtype
        self._embedding = Embedding(ends.embedding)
        self._head = Linear(ends.head)
        self._norm = ends.norm
        self._rope = rope
        self._delta = delta
        mx.eval(arrays_in([self._embedding, self._head, self._norm]))

    def new_state(self) -> SequenceState:
        """See `family.Model`."""
        pieces: dict[str, Rollable] = {}
        n_linear = sum(isinstance(layer.mixer, DeltaMixer) for layer in self.layers)
        if self._delta is not None and n_linear:
            shape = self._delta
            heads = (shape.key_heads, shape.groups, shape.key_dim, shape.value_dim)
            pieces["recurrent"] = RecurrentRows(n_linear, heads)
        for layer in self.layers:
            pieces |= layer.mixer.new_pieces(self.dtype)
        return SequenceState(pieces)

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
        """See `family.Model`; residual rows are [R, H]."""
        state.captured = inputs.rows
        x = self._embedding(inputs.ids)
        plan = plan_rows(state.base, inputs.rows, self._rope)
        for index, layer in enumerate(self.layers):
            x = layer(x, plan, state)
            if tap is not None:
                tap(index, x)
            if submit is not None:
                submit(index, x)
        return self._norm(x)

    def logits(self, hidden: mx.array) -> mx.array:
        """See `family.Model`."""
        return self._head(hidden)

    def contract(self, kind: str, layer: int, residual: mx.array) -> mx.array:
        """See `family.Model`; the mean over one stream is the residual."""
        return residual


# --------------------------------------------------------------------------- weights


class Weights:
    """Blocks of a network, made of its tensors.

    Attributes:
        tensors: what is left of them.
    """

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def ends(self, prefix: str, eps: float, *, tied: bool, centre: float = 0.0) -> Ends:
        """Take what stands around the layers; `centre` is added to the norm."""
        embedding = self.tensors.matrix(prefix + "embed_tokens.weight")
        head = embedding if tied else self.tensors.matrix("lm_head.weight")
        norm = RmsNorm(centre + self.tensors.take(prefix + "norm.weight"), eps)
        return Ends(embedding, head, norm)

    def heads(self, at: str, *, centre: float = 0.0) -> HeadWeights:
        """Take the attention of one layer, with the norms and biases that are there."""
        find = self.tensors.find
        q, k, v, out = (self.tensors.matrix(f"{at}{name}.weight") for name in HEADS)
        q_norm, k_norm = (find(f"{at}{name}.weight") for name in ("q_norm", "k_norm"))
        biases = (find(f"{at}{name}.bias") for name in HEADS)
        return HeadWeights(
            q,
            k,
            v,
            out,
            None if q_norm is None else centre + q_norm,
            None if k_norm is None else centre + k_norm,
            *biases,
        )

    def dense_layer(
        self,
        prefix: str,
        index: int,
        shape: HeadShape,
        rope: RopeTable,
        eps: float,
        mlp: Callable[[str], Mlp | Experts],
    ) -> ResidualLayer:
        """Take a layer that attends, with norms used as they are.

        Args:
            prefix: before the names of the text part.
            index: of the layer.
            shape: of its heads.
            rope: rotations by position.
            eps: inside the norms.
            mlp: takes what follows the attention, given how its names begin.
        """
        at = f"{prefix}layers.{index}."
        attention = Attention(self.heads(at + "self_attn."), shape, rope, eps)
        layer = ResidualLayer(
            RmsNorm(self.tensors.take(at + "input_layernorm.weight"), eps),
            DenseMixer(index, attention, shape),
            RmsNorm(self.tensors.take(at + "post_attention_layernorm.weight"), eps),
            mlp(at + "mlp."),
        )
        mx.eval(arrays_in(layer))  # layer by layer: the published tensors are freed on the way
        return layer

    def mlp(self, at: str) -> Mlp:
        """Take the feed-forward network of one layer, with the biases that are there."""
        gate, up, down = (self.tensors.matrix(f"{at}{name}.weight") for name in MLP)
        biases = (self.tensors.find(f"{at}{name}.bias") for name in MLP)
        return Mlp(MlpWeights(gate, up, down, *biases))

    def experts(self, at: str) -> ExpertWeights:
        """Take a router and routed experts, and the shared expert where there is one."""
        tensors, shared = self.tensors, at + "shared_expert."
        gate, up, down = (tensors.find_matrix(f"{shared}{name}.weight") for name in MLP)
        return ExpertWeights(
            router=tensors.take(at + "gate.weight"),
            gate_up=tensors.matrix(at + "experts.gate_up_proj"),
            down=tensors.matrix(at + "experts.down_proj"),
            shared_gate_up=None if gate is None or up is None else join([gate, up]),
            shared_down=down,
            shared_switch=tensors.find(at + "shared_expert_gate.weight"),
        )


def facts_of(
    sizes: tuple[int, int, int, int], eos_ids: tuple[int, ...], prefix: str, *, tied: bool
) -> Facts:
    """Facts of a network of one residual stream.

    Args:
        sizes: of the vocabulary, of a row, layers, and the longest context.
        eos_ids: ids that end a text.
        prefix: before the names of the text part.
        tied: whether the head is the embedding.
    """
    vocab_size, hidden, n_layers, context_len = sizes
    embedding = prefix + "embed_tokens.weight"
    head = embedding if tied else "lm_head.weight"
    return Facts(
        vocab_size, hidden, n_layers, context_len, eos_ids, embedding, head, (STREAM_MEAN,)
    )


# --------------------------------------------------------------------------- names and shapes


def head_shapes(
    at: str, shape: HeadShape, hidden: int, *, packs_gate: bool = False, biased: bool = False
) -> dict[str, tuple[int, ...]]:
    """Projections of one attention layer; `packs_gate` doubles the query rows."""
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rows = (width * (1 + packs_gate), kv_width, kv_width, hidden)
    columns = (hidden, hidden, hidden, width)
    shapes: dict[str, tuple[int, ...]] = {
        f"{at}{name}.weight": size
        for name, size in zip(HEADS, zip(rows, columns, strict=True), strict=True)
    }
    if biased:
        shapes |= {f"{at}{name}.bias": (size,) for name, size in zip(HEADS, rows, strict=True)}
    return shapes


def mlp_shapes(
    at: str, hidden: int, width: int, *, biased: bool = False
) -> dict[str, tuple[int, ...]]:
    """A feed-forward network."""
    sizes = ((width, hidden), (width, hidden), (hidden, width))
    shapes: dict[str, tuple[int, ...]] = {
        f"{at}{name}.weight": size for name, size in zip(MLP, sizes, strict=True)
    }
    if biased:
        shapes |= {f"{at}{name}.bias": size[:1] for name, size in zip(MLP, sizes, strict=True)}
    return shapes


def expert_shapes(at: str, hidden: int, count: int, width: int) -> dict[str, tuple[int, ...]]:
    """A router and routed experts, stacked."""
    return {
        at + "gate.weight": (count, hidden),
        at + "experts.gate_up_proj": (count, 2 * width, hidden),
        at + "experts.down_proj": (count, hidden, width),
    }


def around_shapes(at: str, hidden: int) -> dict[str, tuple[int, ...]]:
    """The two norms of a layer."""
    return {
        at + "input_layernorm.weight": (hidden,),
        at + "post_attention_layernorm.weight": (hidden,),
    }


def end_shapes(
    prefix: str, vocab_size: int, hidden: int, *, tied: bool
) -> dict[str, tuple[int, ...]]:
    """What stands around the layers."""
    shapes: dict[str, tuple[int, ...]] = {
        prefix + "embed_tokens.weight": (vocab_size, hidden),
        prefix + "norm.weight": (hidden,),
    }
    return shapes if tied else shapes | {"lm_head.weight": (vocab_size, hidden)}
