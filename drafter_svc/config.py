"""Read a drafter's `config.json` and refuse what does not fit together, by name.

Owns the meaning of the published fields. Does not know tensors or the target's weights. Reads the
JSON itself: the usual loader of this model family drops `sliding_window` and invents `layer_types`.

Source: z-lab/dflash `load_draft`; speculators `DFlashConfig`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from common.errors import ModelMismatch
from common.wire.fields import MAX_ITEMS
from drafter_svc.fields import read_count, read_number, read_whole, refuse
from drafter_svc.prior import PriorConfig, read_prior
from drafter_svc.rope import RopeConfig, read_rope

ARCHITECTURES: Final = ("DFlashDraftModel", "DFlash2DraftModel")
LAYER_TYPES: Final = ("full_attention", "sliding_attention")
CONTRACTIONS: Final = ("stream_mean", "final_mixer", "next_attention_read")
_SECOND: Final = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
#: Fields that change the network and are not built here; false, null or 0 is fine.
_NOT_BUILT: Final = (
    "attention_bias",
    "attention_sink_bias",
    "draft_window_size",
    "sample_from_anchor",
)


@dataclass(frozen=True, slots=True)
class ConvConfig:
    """Grouped dynamic convolution of DFlash2."""

    taps: int  # rows that one output row reads: itself and taps - 1 before it
    group: int  # channels that share one dynamic coefficient


@dataclass(frozen=True, slots=True)
class SelectorConfig:
    """Candidate lattice of DFlash2."""

    rank: int
    top_k: int


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """One drafter's geometry; built by `parse_config`, which has checked it."""

    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    block_size: int  # B: anchor plus drafts
    mask_id: int
    tap_layer_ids: tuple[int, ...]  # 0-based: the output of these target layers
    n_target_layers: int  # 0: the config does not say
    tap_contraction: str  # "" where the config does not say
    sliding: tuple[bool, ...]  # per layer
    causal: tuple[bool, ...]  # per layer: causal inside the block
    window: int  # W of the sliding layers; 0 when there is none
    rope: RopeConfig
    conv: ConvConfig | None  # None: DFlash v1
    selector: SelectorConfig | None
    output_multiplier: float = 1.0
    input_embedding_scale: float = 1.0
    softcap: float = 0.0  # 0: none
    prior: PriorConfig | None = None  # None: the policy's own

    @property
    def group_size(self) -> int:
        """Query heads per key head."""
        return self.n_heads // self.n_kv_heads


def parse_config(raw: Mapping[str, Any]) -> DrafterConfig:
    """Build the geometry from a parsed `config.json`.

    Fields of DFlash may stand at the root or under `dflash_config`; both with different values is
    refused.

    Raises:
        ModelMismatch: a field is missing, out of range, or contradicts another; names the field.
    """
    fields = _merge(raw)
    for name in _NOT_BUILT:
        if fields.get(name):
            raise refuse(name, fields[name], "absent or false")
    if fields.get("hidden_act", "silu") != "silu":
        raise refuse("hidden_act", fields["hidden_act"], "silu")
    second = _is_second(fields)
    n_layers = read_count(fields, "num_hidden_layers")
    sliding = _sliding(fields, n_layers)
    hidden_size, n_heads = (
        read_count(fields, "hidden_size"),
        read_count(fields, "num_attention_heads"),
    )
    config = DrafterConfig(
        hidden_size=hidden_size,
        intermediate_size=read_count(fields, "intermediate_size"),
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=read_count(fields, "num_key_value_heads", n_heads),
        head_dim=read_count(fields, "head_dim", hidden_size // n_heads),
        rms_norm_eps=read_number(fields, "rms_norm_eps", 1e-6),
        vocab_size=read_count(fields, "vocab_size"),
        block_size=read_count(fields, "block_size", 16),
        mask_id=read_whole(fields, "mask_token_id"),
        tap_layer_ids=_tap_layer_ids(fields, n_layers),
        n_target_layers=read_whole(fields, "num_target_layers", 0),
        tap_contraction=str(fields.get("tap_contraction") or ""),
        sliding=sliding,
        causal=_causal(fields, sliding, second=second),
        window=read_count(fields, "sliding_window") if any(sliding) else 0,
        rope=read_rope(fields),
        conv=_conv(fields, hidden_size) if second else None,
        selector=_selector(fields) if second else None,
        output_multiplier=read_number(fields, "output_multiplier", 1.0),
        input_embedding_scale=read_number(fields, "input_embedding_scale", 1.0),
        softcap=read_number(fields, "final_logit_softcapping", 0.0),
        prior=read_prior(fields),
    )
    if fields.get("draft_vocab_size") not in (None, config.vocab_size):
        right = f"absent or vocab_size {config.vocab_size}; drafts are ids of the target"
        raise refuse("draft_vocab_size", fields["draft_vocab_size"], right)
    _check(config)
    return config


def _merge(raw: Mapping[str, Any]) -> dict[str, Any]:
    nested = raw.get("dflash_config") or {}
    if not isinstance(nested, Mapping):
        raise refuse("dflash_config", nested, "an object")
    for name in nested.keys() & raw.keys():
        if nested[name] != raw[name]:
            raise refuse(
                f"dflash_config.{name}", nested[name], f"{raw[name]!r}, as at the root of the file"
            )
    return {**raw, **nested}


def _is_second(fields: Mapping[str, Any]) -> bool:
    """Whether this is DFlash2; architecture and fields must agree."""
    present = [name for name in _SECOND if fields.get(name)]
    named = fields.get("architectures") or [ARCHITECTURES[bool(present)]]
    if len(named) != 1 or named[0] not in ARCHITECTURES:
        raise refuse("architectures", named, f"one of {list(ARCHITECTURES)}")
    second = bool(named[0] == ARCHITECTURES[1])
    missing = [name for name in _SECOND if name not in present]
    if second and missing:
        raise ModelMismatch(f"drafter config lacks {missing}; DFlash2DraftModel needs all four")
    if present and not second:
        raise ModelMismatch(f"drafter config has {present}; DFlashDraftModel has none of them")
    return second


def _sliding(fields: Mapping[str, Any], n_layers: int) -> tuple[bool, ...]:
    types = fields.get("layer_types")
    if types is None:
        first = (
            read_whole(fields, "max_window_layers", 0) if fields.get("use_sliding_window") else None
        )
        return tuple(first is not None and index >= first for index in range(n_layers))
    if not isinstance(types, Sequence) or len(types) != n_layers:
        raise refuse("layer_types", types, f"{n_layers} entries, one per layer")
    unknown = sorted({str(kind) for kind in types} - set(LAYER_TYPES))
    if unknown:
        raise refuse("layer_types", unknown, f"made of {list(LAYER_TYPES)}")
    return tuple(kind == "sliding_attention" for kind in types)


def _causal(
    fields: Mapping[str, Any], sliding: tuple[bool, ...], *, second: bool
) -> tuple[bool, ...]:
    """DFlash: causal iff sliding, unless the config says; DFlash2 is always bidirectional."""
    said, other = fields.get("is_causal"), fields.get("causal")  # mlx-vlm knows both names
    for name, value in (("is_causal", said), ("causal", other)):
        if value is not None and not isinstance(value, bool):
            raise refuse(name, value, "true, false or null")
    if None not in (said, other) and said != other:
        raise refuse("causal", other, f"{said!r}, as is_causal")
    said = other if said is None else said
    if second and said:
        raise refuse("is_causal", said, "false for DFlash2DraftModel")
    if second:
        return (False,) * len(sliding)
    return sliding if said is None else (said,) * len(sliding)


def _tap_layer_ids(fields: Mapping[str, Any], n_layers: int) -> tuple[int, ...]:
    ids = fields.get("target_layer_ids")
    if ids is None:
        return default_tap_layer_ids(read_count(fields, "num_target_layers"), n_layers)
    if not isinstance(ids, Sequence) or not ids or not all(type(i) is int for i in ids):
        raise refuse("target_layer_ids", ids, "a list of layer indices")
    return tuple(ids)


def default_tap_layer_ids(n_target_layers: int, n_layers: int) -> tuple[int, ...]:
    """The taps a drafter without `target_layer_ids` was trained on.

    >>> default_tap_layer_ids(36, 5)
    (1, 9, 17, 25, 33)
    """
    if n_layers == 1:
        return (n_target_layers // 2,)
    span = n_target_layers - 4
    return tuple(round(1 + index * span / (n_layers - 1)) for index in range(n_layers))


def _conv(fields: Mapping[str, Any], hidden_size: int) -> ConvConfig:
    conv = ConvConfig(read_count(fields, "conv_kernel_size"), read_count(fields, "conv_group_size"))
    if hidden_size % conv.group:
        raise refuse("conv_group_size", conv.group, f"a divisor of hidden_size {hidden_size}")
    return conv


def _selector(fields: Mapping[str, Any]) -> SelectorConfig:
    return SelectorConfig(read_count(fields, "selector_rank"), read_count(fields, "selector_top_k"))


def _check(config: DrafterConfig) -> None:
    taps = config.tap_layer_ids
    limit = config.n_target_layers or max(taps) + 1
    rules: list[tuple[str, object, bool, str]] = [
        ("block_size", config.block_size, config.block_size >= 2, "at least 2"),
        (
            "num_key_value_heads",
            config.n_kv_heads,
            config.n_heads % config.n_kv_heads == 0,
            f"a divisor of num_attention_heads {config.n_heads}",
        ),
        ("head_dim", config.head_dim, config.head_dim % 2 == 0, "even"),
        (
            "mask_token_id",
            config.mask_id,
            0 <= config.mask_id < config.vocab_size,
            f"in 0..{config.vocab_size - 1}",
        ),
        ("target_layer_ids", taps, list(taps) == sorted(set(taps)), "strictly ascending"),
        (
            "target_layer_ids",
            taps,
            taps[0] >= 0 and taps[-1] < limit,
            f"in 0..{limit - 1} (num_target_layers)",
        ),
        (
            "tap_contraction",
            config.tap_contraction,
            config.tap_contraction in ("", *CONTRACTIONS),
            f"one of {list(CONTRACTIONS)}",
        ),
        ("sliding_window", config.window, config.window != 1, "at least 2"),
        ("final_logit_softcapping", config.softcap, config.softcap >= 0, "0 or more"),
    ]
    if config.selector:
        top_k = config.selector.top_k
        fits = top_k <= config.vocab_size
        rules.append(("selector_top_k", top_k, fits, f"at most vocab_size {config.vocab_size}"))
        rules.append(("selector_top_k", top_k, top_k <= MAX_ITEMS, f"at most {MAX_ITEMS}"))
    for name, value, is_fine, right in rules:
        if not is_fine:
            raise refuse(name, value, right)
