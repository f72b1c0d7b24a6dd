"""The qwen4_exp checkpoint's own draft head: one layer that reads the trunk's streams.

Knows the head's published names and one forward of it. Does not know sessions, chains or
acceptance. Row p of a forward is the token at position p + 1 with the trunk's streams at p; the
head shares embedding and scores with the trunk.

Source: Qwen3.8-Flash-Next checkpoint (`mtp.*`), as read by mlx-vlm `qwen4_exp_mtp`.
"""

from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from common.checkpoint.index import read_config
from common.checkpoint.network import read_network
from common.checkpoint.weights import require_exactly
from target_svc.models.blocks.attention import plan_rows
from target_svc.models.blocks.hyper_connection import write
from target_svc.models.blocks.linear import Linear, Tensors
from target_svc.models.blocks.norms import RmsNorm
from target_svc.models.family import arrays_in
from target_svc.models.qwen4_exp import Model, Weights, head_shapes
from target_svc.models.state import Rollable, SequenceState
from target_svc.models.states.index_keys import PooledKeys
from target_svc.models.states.rows import GrowingRows

AT: Final = "mtp."


class MtpHead:
    """The head, bound to its trunk."""

    def __init__(self, model: Model, weights: Weights) -> None:
        args, tensors = model.args, weights.tensors
        self._model = model
        self._norm_embedding = RmsNorm(
            1.0 + tensors.take(AT + "pre_fc_norm_embedding.weight"), args.eps
        )
        self._norm_hidden = RmsNorm(1.0 + tensors.take(AT + "pre_fc_norm_hidden.weight"), args.eps)
        self._fc_embedding = Linear(tensors.matrix(AT + "fc_embedding.weight"))
        self._fc_hidden = Linear(tensors.matrix(AT + "fc_hidden.weight"))
        self._layer = weights.attention_layer(args, AT + "layers.0.", model.rope)
        self._mixer = weights.hyper_connection(AT + "hyper_connection_mixer.", args)
        mx.eval(arrays_in(self))

    def new_state(self) -> SequenceState:
        """The state of an empty sequence."""
        shape, dtype = self._model.args.attention, self._model.dtype
        pieces: dict[str, Rollable] = {
            "keys": GrowingRows(shape.kv_heads, shape.head_dim, dtype),
            "values": GrowingRows(shape.kv_heads, shape.head_dim, dtype),
            "index": PooledKeys(shape.index_dim, shape.ratio, dtype),
        }
        return SequenceState(pieces)

    def forward(self, ids: mx.array, streams: mx.array, state: SequenceState) -> mx.array:
        """Run rows; their effect on `state` waits for a commit.

        Args:
            ids: int32 [R], the tokens after the rows' positions.
            streams: [R, S, H] of the trunk's last layer, or of this head for a chained draft.
            state: between forwards.

        Returns:
            [R, S, H], what `logits` reads and a chained draft continues from; lazy.
        """
        rows = ids.shape[0]
        state.captured = rows
        embedded = self._fc_embedding(self._norm_embedding(self._model.embed(ids)))
        normed = self._norm_hidden(streams.reshape(rows, -1)).reshape(streams.shape)
        x = self._fc_hidden(normed) + embedded[:, None]
        plan = plan_rows(state.base, rows, self._model.rope)
        layer = self._layer
        read, shares = layer.mixer_streams.read(x)
        pieces: dict[str, Any] = state.pieces
        names = ("keys", "values", "index")
        mixed = layer.mixer(read, plan, *(pieces[name] for name in names))  # type: ignore[arg-type]
        x = write(x, mixed, shares)
        read, shares = layer.expert_streams.read(x)
        return write(x, layer.experts(read), shares)

    def logits(self, streams: mx.array) -> mx.array:
        """Scores [R, V] of a forward's rows."""
        return self._model.logits(self._mixer.read(streams)[0])


def has_head(folder: Path) -> bool:
    """Whether a checkpoint's config says that it has a head."""
    config = read_config(folder)
    text = config.get("text_config", config)
    return bool(text.get("mtp_num_hidden_layers"))


def load_head(folder: Path, model: Model, *, keep_packed: bool | None = False) -> MtpHead:
    """Read the head of a trunk's checkpoint, strictly; `keep_packed` as in `Tensors`.

    Raises:
        ModelMismatch: tensors do not fit the config; the message lists names.
    """
    tensors = read_network(folder, keep=lambda name: name.startswith(AT)).matrices
    require_exactly(tensors, head_shapes(model.args, AT), what="MTP head of target qwen4_exp")
    return MtpHead(model, Weights(Tensors(tensors, keep_packed=keep_packed)))
