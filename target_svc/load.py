"""Make an engine from checkpoint folders.

Owns which file gives what, and the target's fingerprints. Does not know sessions' rounds.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from common.checkpoint.fingerprint import fingerprint_module, fingerprint_tokenizer
from common.checkpoint.index import read_config
from common.checkpoint.network import index_published
from common.errors import ConfigError, ModelMismatch
from common.sources import AUTO, DRAFTER, MTP, Armed, Present, arm
from common.wire.messages import ModelCard
from target_svc.build import BuildPlan
from target_svc.card import EngineCard
from target_svc.chat import load_chat_templates
from target_svc.contract import refusal_of
from target_svc.engine import Engine
from target_svc.models import glm5_next, llama, qwen3, qwen3_5, qwen4_exp, qwen4_mtp
from target_svc.models.blocks.norms import is_cpu
from target_svc.models.family import Model
from target_svc.mtp import CHAIN, HeadTaps
from target_svc.prefix_cache import MIB
from target_svc.taps import TapHashes, Taps, load_taps
from target_svc.text import load_tokenizer
from target_svc.verify import VerifyPlan

logger = logging.getLogger(__name__)


class Loader(Protocol):
    """Loads a target of one family."""

    def __call__(self, folder: Path, *, keep_packed: bool | None = False) -> Model:
        """Read the checkpoint; `keep_packed` as in `EngineOptions`."""


#: Published model_type -> the loader of its family.
FAMILIES: Final[dict[str, Loader]] = {
    "qwen4_exp": qwen4_exp.load,
    "qwen4_exp_text": qwen4_exp.load,
    "glm5_next": glm5_next.load,
    "glm5_next_text": glm5_next.load,
    "qwen3": qwen3.load,
    "qwen3_moe": qwen3.load,
    "llama": llama.load,
    "qwen3_5": qwen3_5.load,
    "qwen3_5_text": qwen3_5.load,
    "qwen3_5_moe": qwen3_5.load,
    "qwen3_5_moe_text": qwen3_5.load,
}
#: How forwards are built where nobody says, by measurement. On two CPU cores a graph built ahead
#: saves a verify 1.5 ms, and costs as much while drafter and coordinator want the core: no round is
#: shorter, so it is off; where it is switched on, two rounds of a width must agree before a guess.
ON_CPU: Final = VerifyPlan(build=BuildPlan(1, is_deferred=False), prebuilds=False, steady=2)
#: On an H200 the host is the slower side (11 of 12 ms go into handing over): a graph that stands
#: ready saves 2 to 6 ms of a verify, and there is nothing to overlap with.
ON_GPU: Final = VerifyPlan(build=BuildPlan(4, is_deferred=False), prebuilds=True)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What may be chosen when a target is loaded."""

    max_context: int | None = None  # tokens; None is the model's own limit
    prefill_chunk: int = 256  # prompt tokens per forward
    verify_width: int | None = None  # pad every verify to so many rows
    pipeline_layers: int | None = None  # None chooses by device; 0 never
    is_deferred: bool | None = None  # fill leaves as late as can be; None chooses by device
    prebuilds: bool | None = None  # build the next verify's graph ahead; None chooses by device
    overlaps: bool = False  # build ahead while a plain round, or a chunk of the prompt, runs
    keep_packed: bool | None = None  # multiply packs as they are; None does on a GPU
    max_rows: int = 16
    prefix_cache_mb: int = 0  # MiB of prefixes of earlier prompts and replies; 0 keeps none
    source: str = AUTO  # who drafts, one of `common.sources.ASKED`
    copies: str = AUTO  # one of `common.sources.COPIES`

    def __post_init__(self) -> None:
        """Check ranges."""
        for name, value, least in (
            ("max_context", self.max_context, 2),
            ("prefill_chunk", self.prefill_chunk, 1),
            ("verify_width", self.verify_width, 1),
            ("pipeline_layers", self.pipeline_layers, 0),
            ("max_rows", self.max_rows, 1),
            ("prefix_cache_mb", self.prefix_cache_mb, 0),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{name}: {value}; it must be at least {least}")


def load_engine(target: Path, drafter: Path | None, options: EngineOptions) -> Engine:
    """Load a target, and of its drafter the two tensors that the target applies.

    Args:
        target: checkpoint folder with config, weights and tokenizer.
        drafter: checkpoint folder; None serves without taps.
        options: see `EngineOptions`.

    Raises:
        ConfigError: a folder or file is missing or damaged.
        ModelMismatch: config, weights, drafter or tokenizer do not fit together.
    """
    model_type = str(read_config(target).get("model_type", ""))
    if model_type not in FAMILIES:
        raise ModelMismatch(
            f"target's model_type is {model_type!r}; implemented are {list(FAMILIES)}"
        )
    model = FAMILIES[model_type](target, keep_packed=options.keep_packed)
    tokenizer = load_tokenizer(target)
    n_entries, vocab = tokenizer.get_vocab_size(), model.facts.vocab_size
    if n_entries > vocab:
        raise ModelMismatch(
            f"tokenizer has {n_entries} entries, the model {vocab}; use the tokenizer.json that "
            "belongs to this model"
        )
    own_head = isinstance(model, qwen4_exp.Model) and qwen4_mtp.has_head(target)
    max_rows = options.verify_width or options.max_rows
    refusal = _refusal(model, max_rows, options)
    armed = arm(options.source, options.copies, Present(drafter is not None, own_head, refusal))
    taps, hashes = _taps_of(armed, target, drafter, model, options)
    context_len = min(options.max_context or model.facts.context_len, model.facts.context_len)
    wire = _card(target, model_type, model, context_len, taps, hashes)
    return Engine(
        model,
        tokenizer,
        EngineCard(wire, model.facts.eos_ids, armed, refusal),
        taps,
        verify_plan(options),
        prefill_chunk=options.prefill_chunk,
        max_rows=1 if refusal else max_rows,
        templates=load_chat_templates(target),
        prefix_bytes=options.prefix_cache_mb * MIB,
    )


def _refusal(model: Model, max_rows: int, options: EngineOptions) -> str:
    """Why nobody may draft for this model; "" where rejected rows can be taken back."""
    refusal = refusal_of(model, max_rows)
    if not refusal:
        return ""
    if options.verify_width is not None:  # plain rounds too would have padding to take back
        raise ConfigError(f"target.verify_width: {options.verify_width}, but {refusal}")
    logger.warning("drafting is off: %s", refusal)
    return refusal


def _taps_of(
    armed: Armed, target: Path, drafter: Path | None, model: Model, options: EngineOptions
) -> tuple[Taps | HeadTaps | None, TapHashes | None]:
    """What the armed source reads of every forward."""
    if armed.source == MTP and isinstance(model, qwen4_exp.Model):
        head = qwen4_mtp.load_head(target, model, keep_packed=options.keep_packed)
        return HeadTaps(head, model.facts.n_layers, model.args.stream_width), None
    if armed.source == DRAFTER and drafter is not None:
        return load_taps(drafter, model)
    return None, None


def verify_plan(options: EngineOptions) -> VerifyPlan:
    """What is asked for, and for the rest what measured best on this kind of device."""
    own = ON_CPU if is_cpu() else ON_GPU
    layers, is_deferred, prebuilds = (
        mine if asked is None else asked
        for asked, mine in (
            (options.pipeline_layers, own.build.pipeline_layers),
            (options.is_deferred, own.build.is_deferred),
            (options.prebuilds, own.prebuilds),
        )
    )
    build = BuildPlan(int(layers), is_deferred=bool(is_deferred))
    return VerifyPlan(
        options.verify_width,
        build,
        prebuilds=bool(prebuilds),
        steady=own.steady,
        overlaps=options.overlaps,
    )


def _card(
    target: Path,
    model_type: str,
    model: Model,
    context_len: int,
    taps: Taps | HeadTaps | None,
    hashes: TapHashes | None,
) -> ModelCard:
    spans = index_published(target)
    plan = taps.plan if isinstance(taps, Taps) else None
    own_block = CHAIN + 1 if isinstance(taps, HeadTaps) else 0
    return ModelCard(
        model_type=model_type,
        vocab_size=model.facts.vocab_size,
        hidden_size=taps.width if isinstance(taps, Taps) else 0,
        context_len=context_len,
        block_size=plan.block_size if plan else own_block,
        window=plan.window if plan else 0,
        tap_layer_ids=plan.layer_ids if plan else (),
        tap_contraction=plan.contraction if plan else "",
        fc_hash=hashes.fc if hashes else "",
        norm_hash=hashes.norm if hashes else "",
        embedding_hash=fingerprint_module(spans, model.facts.embedding_name),
        head_hash=fingerprint_module(spans, model.facts.head_name),
        tokenizer_hash=fingerprint_tokenizer(target),
    )
