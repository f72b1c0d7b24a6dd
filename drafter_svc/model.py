"""The network of DFlash and DFlash2, from fused features and block ids to draft logits.

Owns the layers. Starts after `fc` and `hidden_norm`: those two tensors belong to the target's side,
which sends one fused row of width H per committed position. Does not know sessions or files.
DFlash2 differs by a convolution around each sublayer and by the selector that follows the logits.

Row letters: B block rows, S context rows. Weights are fused when built: q|k|v, gate|up, and the
context's keys and values of all layers of a store. Everything that NumPy and MLX do not spell alike
is asked of `kernels`, so one network serves the host and the devices.

Source: DFlash, arXiv 2602.06036; z-lab/dflash `model.py`; speculators `models/dflash2`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from drafter_svc.config import DrafterConfig
from drafter_svc.context import Context, ContextStore, mask_of
from drafter_svc.conv import BlockConv
from drafter_svc.kernels import Array, Kernels
from drafter_svc.rope import Rope, pair_order
from drafter_svc.selector import CandidateSelector

Tensors = Mapping[str, mx.array]


@dataclass(frozen=True, slots=True)
class ContextView:
    """What one layer sees of the context."""

    keys: Array  # [kv, C, hd], rotated
    values: Array  # [kv, C, hd]
    mask: Array  # of `kernels.mask`, added to the scores


Views = Sequence[ContextView]  # one per block


class Attention:
    """Attention of block rows, each block over its own context and itself."""

    def __init__(
        self, config: DrafterConfig, tensors: Tensors, prefix: str, kernels: Kernels
    ) -> None:
        self._config, self._kernels = config, kernels
        names = ("q_proj", "k_proj", "v_proj")
        q, k, v = (tensors[f"{prefix}{name}.weight"] for name in names)
        pairs = mx.array(pair_order(config.head_dim))
        self._qkv = kernels.kept(mx.concatenate([_pair(q, pairs), _pair(k, pairs), v]).T)
        self._out = kernels.kept(tensors[f"{prefix}o_proj.weight"].T)
        q_norm = tensors[f"{prefix}q_norm.weight"].astype(mx.float32)[pairs]
        k_norm = tensors[f"{prefix}k_norm.weight"].astype(mx.float32)[pairs]
        # The softmax scale rides on the query norm, in float32 whatever the weights are.
        norms = [
            mx.repeat(q_norm[None] * config.head_dim**-0.5, config.n_heads, axis=0),
            mx.repeat(k_norm[None], config.n_kv_heads, axis=0),
        ]
        self._norms = kernels.kept(mx.concatenate(norms))

    def __call__(self, rows: Array, views: Views, rotation: Array) -> Array:
        """Attend; rows [n * B, H] of n blocks and the result, rotation of their positions."""
        config, n_rows = self._config, rows.shape[0]
        n_turned, B = config.n_heads + config.n_kv_heads, n_rows // len(views)
        heads = (rows @ self._qkv).reshape(n_rows, -1, config.head_dim)
        turned = self._kernels.turned(
            heads[:, :n_turned], self._norms, config.rms_norm_eps, rotation
        )
        mixed = [
            self._block(turned[at : at + B], heads[at : at + B, n_turned:], view)
            for at, view in zip(range(0, n_rows, B), views, strict=True)
        ]
        joined = mixed[0] if len(mixed) == 1 else self._kernels.joined(mixed, 0)
        return joined @ self._out

    def _block(self, turned: Array, values: Array, view: ContextView) -> Array:
        """One block: turned queries and keys [B, heads, hd], values [B, kv, hd]; to [B, H']."""
        config, B, n_heads = self._config, turned.shape[0], self._config.n_heads
        by_head = turned.swapaxes(0, 1)
        mixed = self._kernels.attended(
            by_head[:n_heads].reshape(config.n_kv_heads, -1, config.head_dim),
            by_head[n_heads:],
            values.swapaxes(0, 1),
            (view.keys, view.values),
            view.mask,
        )
        return mixed.reshape(n_heads, B, config.head_dim).swapaxes(0, 1).reshape(B, -1)


class MLP:
    """SwiGLU."""

    def __init__(self, tensors: Tensors, prefix: str, kernels: Kernels) -> None:
        gate, up = (tensors[f"{prefix}{name}.weight"] for name in ("gate_proj", "up_proj"))
        self._gate_up = kernels.kept(mx.concatenate([gate, up]).T)
        self._down = kernels.kept(tensors[f"{prefix}down_proj.weight"].T)
        self._gated = kernels.gated

    def __call__(self, rows: Array) -> Array:
        """Map [B, H] to [B, H]."""
        return self._gated(rows @ self._gate_up) @ self._down


class Layer:
    """One decoder layer; convolutions around both sublayers in DFlash2."""

    def __init__(
        self, config: DrafterConfig, tensors: Tensors, prefix: str, kernels: Kernels
    ) -> None:
        self._eps, self._normed = config.rms_norm_eps, kernels.normed
        self._attention_norm = kernels.kept(tensors[f"{prefix}input_layernorm.weight"])
        self._mlp_norm = kernels.kept(tensors[f"{prefix}post_attention_layernorm.weight"])
        self._attention = Attention(config, tensors, f"{prefix}self_attn.", kernels)
        self._mlp = MLP(tensors, f"{prefix}mlp.", kernels)
        self._attention_conv = _conv(config, tensors, f"{prefix}attention_conv.", kernels)
        self._mlp_conv = _conv(config, tensors, f"{prefix}mlp_conv.", kernels)

    def __call__(self, rows: Array, views: Views, rotation: Array) -> Array:
        """Map the rows [n * B, H] of n blocks, each with its view of its own context."""
        inner = self._normed(rows, self._attention_norm, self._eps)
        if self._attention_conv is None:
            rows = rows + self._attention(inner, views, rotation)
        else:
            inner, after = self._attention_conv.prepare(inner, len(views))
            inner = self._attention(inner, views, rotation)
            rows = rows + self._attention_conv.finish(inner, after)
        inner = self._normed(rows, self._mlp_norm, self._eps)
        if self._mlp_conv is None:
            return rows + self._mlp(inner)
        inner, after = self._mlp_conv.prepare(inner, len(views))
        return rows + self._mlp_conv.finish(self._mlp(inner), after)


class ContextProjection:
    """Keys and values of context rows for all layers of one store, in one product.

    They come from the fused features directly, never from a layer below: a row is projected once.
    """

    def __init__(
        self, config: DrafterConfig, tensors: Tensors, layers: list[int], kernels: Kernels
    ) -> None:
        self._config, self._kernels = config, kernels
        self._n_planes = len(layers) * config.n_kv_heads
        pairs = mx.array(pair_order(config.head_dim))
        prefixes = [f"layers.{index}.self_attn." for index in layers]
        keys = [_pair(tensors[f"{prefix}k_proj.weight"], pairs) for prefix in prefixes]
        values = [tensors[f"{prefix}v_proj.weight"] for prefix in prefixes]
        self._weight = kernels.kept(mx.concatenate(keys + values).T)
        norms = mx.stack([tensors[f"{prefix}k_norm.weight"][pairs] for prefix in prefixes])
        self._norms = kernels.kept(mx.repeat(norms, config.n_kv_heads, axis=0).astype(mx.float32))

    def __call__(self, rows: Array, rotation: Array) -> tuple[Array, Array]:
        """Project rows [S, H]; keys (rotated) and values, each [layers * kv, S, hd]."""
        config, n_planes = self._config, self._n_planes
        planes = self._kernels.product(rows, self._weight)
        planes = planes.reshape(rows.shape[0], -1, config.head_dim)
        keys = self._kernels.turned(
            planes[:, :n_planes], self._norms, config.rms_norm_eps, rotation
        )
        return keys.swapaxes(0, 1), planes[:, n_planes:].swapaxes(0, 1)


class DFlashModel:
    """The drafter's network with the target's embedding and head bound to it."""

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Tensors,
        embedding: mx.array,
        head: mx.array,
        kernels: Kernels,
    ) -> None:
        """Fuse the published tensors.

        Args:
            config: the geometry.
            tensors: published names, without `fc.weight` and `hidden_norm.weight`.
            embedding: the target's, float [V, H].
            head: the target's, float [V, H]; the embedding itself when tied.
            kernels: the form to compute in, that of the default device.
        """
        self.config = config
        self.dtype = tensors["norm.weight"].dtype
        self.kernels = kernels
        self._embedding = kernels.kept(embedding)
        self._head = kernels.head(head)
        self._layers = [
            Layer(config, tensors, f"layers.{index}.", kernels) for index in range(config.n_layers)
        ]
        self._norm = kernels.kept(tensors["norm.weight"])
        self.selector = _selector(config, tensors, kernels)  # None: DFlash v1
        self._rope = Rope(config.rope, config.head_dim)
        kinds = [
            [i for i in range(config.n_layers) if config.sliding[i] is kind]
            for kind in (True, False)
        ]
        self._kinds = [layers for layers in kinds if layers]
        self._projections = [
            ContextProjection(config, tensors, layers, kernels) for layers in self._kinds
        ]

    def open_stores(self, max_context: int) -> list[ContextStore]:
        """Empty stores for one session, one per kind of layer."""
        config = self.config
        return [
            ContextStore(
                len(layers) * config.n_kv_heads,
                config.head_dim,
                config.window if config.sliding[layers[0]] else 0,
                max_context,
                self.dtype,
                self.kernels,
            )
            for layers in self._kinds
        ]

    def project(self, store_index: int, rows: Array, first_pos: int) -> tuple[Array, Array]:
        """Keys and values of feature rows [S, H] for one store."""
        rotation = self.kernels.rotation(self._rope.turns(first_pos, rows.shape[0]))
        return self._projections[store_index](self.kernels.taken_in(rows, self.dtype), rotation)

    def hidden(self, anchor_id: int, context: Context) -> Array:
        """Run one block: `hidden_of` with one anchor."""
        return self.hidden_of([anchor_id], [context])

    def hidden_of(self, anchor_ids: Sequence[int], contexts: Sequence[Context]) -> Array:
        """Run n blocks, each over its own context.

        Args:
            anchor_ids: the position of each is its context's end.
            contexts: each ends right before its anchor; they may differ in length.

        Returns:
            [n * (B - 1), H] after the final norm, block after block; row k - 1 of a block fills the
            position k after its anchor.
        """
        config, B, n = self.config, self.config.block_size, len(contexts)
        masks = [config.mask_id] * (B - 1)
        ids = [token for anchor_id in anchor_ids for token in (anchor_id, *masks)]
        rows = self.kernels.looked_up(self._embedding, ids)
        if config.input_embedding_scale != 1.0:
            rows = rows * config.input_embedding_scale
        turns = [self._rope.turns(context.end, B) for context in contexts]
        rotation = self.kernels.rotation(turns[0] if n == 1 else np.concatenate(turns))
        by_context = [self._views(context) for context in contexts]
        for index, layer in enumerate(self._layers):
            rows = layer(rows, [views[index] for views in by_context], rotation)
        drafts = rows[1:] if n == 1 else rows.reshape(n, B, -1)[:, 1:].reshape(n * (B - 1), -1)
        return self.kernels.normed(drafts, self._norm, config.rms_norm_eps)

    def logits(self, hidden: Array) -> Array:
        """Draft logits, float32 [n, V]; multiplier and cap belong before the selector's sum."""
        config = self.config
        return self.kernels.scores(hidden, self._head, config.output_multiplier, config.softcap)

    def _views(self, context: Context) -> list[ContextView]:
        config, n_kv = self.config, self.config.n_kv_heads
        views: dict[int, ContextView] = {}
        for store, layers in zip(context.stores, self._kinds, strict=True):
            # Causality follows the kind of layer, so one mask serves all layers of a store.
            bias = mask_of(
                store,
                context.end,
                config.block_size,
                is_causal=config.causal[layers[0]],
            )
            mask, C = self.kernels.mask(bias, config.group_size, self.dtype), store.n_read
            for place, index in enumerate(layers):
                planes = slice(place * n_kv, (place + 1) * n_kv)
                views[index] = ContextView(store.keys[planes, :C], store.values[planes, :C], mask)
        return [views[index] for index in range(config.n_layers)]


def _pair(weight: mx.array, pairs: mx.array) -> mx.array:
    """Reorder the rows of a projection so that rotation pairs lie side by side in every head."""
    heads = weight.reshape(-1, pairs.size, weight.shape[-1])
    return heads[:, pairs].reshape(weight.shape)


def _conv(
    config: DrafterConfig, tensors: Tensors, prefix: str, kernels: Kernels
) -> BlockConv | None:
    if config.conv is None:
        return None
    return BlockConv(
        tensors[f"{prefix}base_kernel"],
        tensors[f"{prefix}kernel_projection.weight"],
        config.conv.group,
        kernels,
    )


def _selector(
    config: DrafterConfig, tensors: Tensors, kernels: Kernels
) -> CandidateSelector | None:
    if config.selector is None:
        return None
    return CandidateSelector(
        tensors["candidate_selector.predecessor_codebook"],
        tensors["candidate_selector.successor_codebook"],
        tensors["candidate_selector.hidden_projection.weight"],
        config.selector.top_k,
        kernels,
    )


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Published name -> shape of every tensor of a checkpoint, the target side's two included."""
    H, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
        "self_attn.q_proj.weight": (q_width, H),
        "self_attn.k_proj.weight": (kv_width, H),
        "self_attn.v_proj.weight": (kv_width, H),
        "self_attn.o_proj.weight": (H, q_width),
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
        "mlp.gate_proj.weight": (inner, H),
        "mlp.up_proj.weight": (inner, H),
        "mlp.down_proj.weight": (H, inner),
    }
    if config.conv:
        k, groups = config.conv.taps, H // config.conv.group
        for side in ("attention_conv", "mlp_conv"):
            layer[f"{side}.base_kernel"] = (2, k, H)
            layer[f"{side}.kernel_projection.weight"] = (2 * k * groups, H)
    shapes = {
        f"layers.{index}.{name}": shape
        for index in range(config.n_layers)
        for name, shape in layer.items()
    }
    shapes |= {"norm.weight": (H,), "hidden_norm.weight": (H,)}
    shapes["fc.weight"] = (H, len(config.tap_layer_ids) * H)
    if config.selector:
        rank, V = config.selector.rank, config.vocab_size
        shapes["candidate_selector.predecessor_codebook"] = (V, rank)
        shapes["candidate_selector.successor_codebook"] = (V, rank)
        shapes["candidate_selector.hidden_projection.weight"] = (rank, H)
    return shapes
