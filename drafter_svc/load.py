"""Load a drafter's checkpoint and bind the target's embedding and head to it.

Owns which file holds which tensor. Does not know the network's arithmetic. `fc.weight` and
`hidden_norm.weight` are checked and fingerprinted here but used by the target's side only.
Invariant: every tensor of the drafter's files is known by name and shape, or loading fails.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from common.checkpoint.fingerprint import fingerprint_module, fingerprint_tokenizer
from common.checkpoint.index import TensorSpan, read_config
from common.checkpoint.names import TEXT_PREFIXES
from common.checkpoint.network import index_published, read_network
from common.checkpoint.weights import require_exactly
from common.errors import ModelMismatch
from common.wire.messages import ModelCard
from drafter_svc.config import DrafterConfig, parse_config
from drafter_svc.kernels import Kernels, kernels_of_device
from drafter_svc.model import DFlashModel, tensor_shapes

#: Tensors of the drafter's files that the target applies before features cross the wire.
TARGET_SIDE: Final = ("fc.weight", "hidden_norm.weight")
#: Where the embedding and the head stand in a target's files, in the order they are looked for.
EMBEDDINGS: Final = tuple(f"{at}embed_tokens.weight" for at in TEXT_PREFIXES)
HEADS: Final = ("lm_head.weight",)
DEFAULT_CONTRACTION: Final = "stream_mean"


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What the drafter needs to know of the target's checkpoint."""

    vocab_size: int
    hidden_size: int
    n_layers: int
    context_len: int
    n_streams: int  # hyper-connection streams; 1 for other models
    embedding: str  # tensor name
    head: str  # tensor name; the embedding's when tied


@dataclass(frozen=True, slots=True)
class Loaded:
    """A drafter ready to run, and what it says of itself."""

    model: DFlashModel
    config: DrafterConfig
    card: ModelCard


def load(drafter: Path, target: Path, kernels: Kernels | None = None) -> Loaded:
    """Read a drafter and what it borrows from its target.

    Args:
        drafter: folder in the published format (`config.json`, safetensors).
        target: the target's folder; only its config, tokenizer, embedding and head are read.
        kernels: the form to compute in; None takes the default device's.

    Returns:
        The network and its card. Evaluates all weights; float32 on CPU.

    Raises:
        ConfigError: a folder or file is missing or unreadable.
        ModelMismatch: the two do not fit each other, or a tensor is missing, unexpected or of the
            wrong shape; names it.
    """
    raw = read_config(drafter)
    config = parse_config(raw)
    spans, target_spans = index_published(drafter), index_published(target)
    facts = _target_facts(read_config(target), target_spans)
    _check_fit(config, facts)
    tensors = read_network(drafter).tensors
    require_exactly(tensors, tensor_shapes(config), what=f"drafter {str(drafter)!r}")
    _check_floats(tensors, str(drafter))
    own = {name: tensor for name, tensor in tensors.items() if name not in TARGET_SIDE}
    wanted = (facts.embedding, facts.head)
    borrowed = read_network(target, keep=lambda name: name in wanted).tensors
    _check_floats(borrowed, str(target))
    dtype = own["norm.weight"].dtype
    embedding, head = (borrowed[name].astype(dtype) for name in (facts.embedding, facts.head))
    if facts.head == facts.embedding:
        head = embedding
    model = DFlashModel(config, own, embedding, head, kernels or kernels_of_device())
    return Loaded(model, config, _card(raw, config, facts, spans, target_spans, target))


def _target_facts(raw: Mapping[str, Any], spans: Mapping[str, TensorSpan]) -> TargetFacts:
    text = raw.get("text_config") or raw
    embedding = _find(EMBEDDINGS, spans, "embedding")
    is_tied = bool(text.get("tie_word_embeddings", raw.get("tie_word_embeddings", False)))
    V, width = spans[embedding].shape
    return TargetFacts(
        vocab_size=V,
        hidden_size=int(text.get("hidden_size", width)),  # a packed embedding is stored narrower
        n_layers=int(text.get("num_hidden_layers", 0)),
        context_len=int(text.get("max_position_embeddings", 0)),
        n_streams=int(text.get("hc_count", 1)),
        embedding=embedding,
        head=embedding if is_tied else _find(HEADS, spans, "head"),
    )


def _find(names: tuple[str, ...], spans: Mapping[str, TensorSpan], what: str) -> str:
    found = next((name for name in names if name in spans), None)
    if found is None:
        raise ModelMismatch(
            f"target's {what} not found; looked for {list(names)}; "
            "give the target's own checkpoint folder"
        )
    return found


def _check_fit(config: DrafterConfig, facts: TargetFacts) -> None:
    sides: list[tuple[str, int, int]] = [
        ("vocab_size", config.vocab_size, facts.vocab_size),
        ("hidden_size", config.hidden_size, facts.hidden_size),
    ]
    if config.n_target_layers:
        sides.append(("num_target_layers", config.n_target_layers, facts.n_layers))
    for name, mine, theirs in sides:
        if mine != theirs:
            raise ModelMismatch(
                f"drafter's {name} is {mine}, the target has {theirs}; "
                "use a drafter that was trained for this target"
            )
    if config.tap_layer_ids[-1] >= facts.n_layers:
        raise ModelMismatch(
            f"drafter's target_layer_ids are {list(config.tap_layer_ids)}; "
            f"the target has layers 0..{facts.n_layers - 1}"
        )


def _check_floats(tensors: Mapping[str, mx.array], where: str) -> None:
    bad = {
        name: str(t.dtype) for name, t in tensors.items() if not mx.issubdtype(t.dtype, mx.floating)
    }
    if bad:
        raise ModelMismatch(f"tensors of {where} are not floats: {bad}; copy the checkpoint again")


def _card(
    raw: Mapping[str, Any],
    config: DrafterConfig,
    facts: TargetFacts,
    spans: Mapping[str, TensorSpan],
    target_spans: Mapping[str, TensorSpan],
    target: Path,
) -> ModelCard:
    contraction = config.tap_contraction or DEFAULT_CONTRACTION
    return ModelCard(
        model_type=str((raw.get("architectures") or [raw.get("model_type", "")])[0]),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        context_len=facts.context_len,
        block_size=config.block_size,
        window=config.window if all(config.sliding) else 0,
        tap_layer_ids=config.tap_layer_ids,
        tap_contraction=contraction if facts.n_streams > 1 else "",
        fc_hash=fingerprint_module(spans, "fc.weight"),
        norm_hash=fingerprint_module(spans, "hidden_norm.weight"),
        embedding_hash=fingerprint_module(target_spans, facts.embedding),
        head_hash=fingerprint_module(target_spans, facts.head),
        tokenizer_hash=fingerprint_tokenizer(target),
    )
