"""The recipe: every number of a training run, read from one TOML file.

Owns the dataclasses and their defaults. Does not know torch. A key that no field has is an error,
so a misspelt knob cannot silently keep its default.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from common.errors import ConfigError

DEFAULT_PATH = Path(__file__).with_name("recipe.toml")


@dataclass(frozen=True, slots=True)
class TargetDims:
    """Sizes of a `qwen4_exp` target, under the names of the published `text_config`."""

    vocab_size: int = 2048
    hidden_size: int = 192
    num_hidden_layers: int = 8
    full_attention_interval: int = 4  # layer i is full attention iff (i + 1) % interval == 0
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 48
    shared_expert_intermediate_size: int = 48
    hc_count: int = 4
    hc_lowrank: int = 24
    ple_layer_ids: tuple[int, ...] = (2,)  # one-indexed, as published
    ple_embed_dim: int = 128
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 4
    ngram_vocab_size_base: int = 8000
    make_ngram_vocab_size_divisible_by: int = 128
    split_ngram_parts: int = 4
    seed: int = 1234
    indexer_n_heads: int = 2
    indexer_kv_heads: int = 1
    indexer_head_dim: int = 32
    indexer_budget: int = 2048
    indexer_compress_ratio: int = 4
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.5
    max_position_embeddings: int = 2048
    eos_token_id: int = 0
    tie_word_embeddings: bool = True

    @property
    def layer_types(self) -> list[str]:
        """One of `linear_attention`, `full_attention` per layer (the spelling on disk)."""
        step = self.full_attention_interval
        count = self.num_hidden_layers
        return ["linear_attention" if (i + 1) % step else "full_attention" for i in range(count)]


@dataclass(frozen=True, slots=True)
class DrafterDims:
    """Sizes of the drafter. `version` 1 is DFlash, 2 adds the convolutions and the selector."""

    version: int = 2
    num_hidden_layers: int = 2
    intermediate_size: int = 512
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    block_size: int = 8
    sliding_window: int = 512
    num_taps: int = 3
    target_layer_ids: tuple[int, ...] = ()  # empty: `num_taps` layers by the default rule
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 64
    selector_top_k: int = 16
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    mask_token_id: int = 1


@dataclass(frozen=True, slots=True)
class CorpusPlan:
    """Which Python files are read, and which are left out."""

    roots: tuple[str, ...] = ()  # extra site-packages folders; empty: those of this interpreter
    held_out: str = ""  # folder of files that must not be trained on, nor anything close to them
    validation_packages: tuple[str, ...] = ()
    banned_packages: tuple[str, ...] = ()  # the packages of the held-out files
    max_package_share: float = 0.22
    min_bytes: int = 1000
    max_bytes: int = 200_000
    shingle_lines: int = 5
    max_overlap: float = 0.5  # a file is a near duplicate above this share of shingles seen before
    max_total_mb: float = 600.0
    tokenizer_mb: float = 40.0
    max_files: int = 1_000_000  # per package; few make a quick trial


@dataclass(frozen=True, slots=True)
class PretrainPlan:
    """How the target is trained. Times are wall-clock seconds of the stage's own loop."""

    seconds: float = 450.0
    total_seconds: float = 1e9  # with compiling and waiting; what is left of it cuts `seconds`
    batch: int = 16
    sequence: int = 4096
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    weight_decay: float = 0.02
    warmup: float = 0.02
    decay: float = 0.5
    clip: float = 1.0
    balance_loss: float = 0.01
    index_loss: float = 1.0  # moves the indexers only
    sparse_from: float = 0.6  # share of the run after which attention keeps to the indexers' choice
    compile: bool = True
    wait_s: float = 300.0  # for the corpus, when it is being made beside
    save_s: float = 60.0  # between two checkpoints


@dataclass(frozen=True, slots=True)
class MtpPlan:
    """How the MTP head is trained on the frozen target."""

    seconds: float = 45.0
    batch: int = 16
    sequence: int = 1024
    depth: int = 3  # links of the chain in one step
    depth_weight: float = 0.6  # weight of link d is depth_weight ** d
    muon_lr: float = 0.01
    adam_lr: float = 2e-3
    weight_decay: float = 0.01
    warmup: float = 0.03
    decay: float = 0.5
    clip: float = 1.0


@dataclass(frozen=True, slots=True)
class RegeneratePlan:
    """Text that the target writes itself, for the drafter to learn from."""

    seconds: float = 75.0
    new_tokens: int = 256
    prompt: int = 1024
    batch: int = 4096
    others: tuple[tuple[int, int], ...] = ((32, 2048), (3840, 768))  # (prompt, rows), once each
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 1.0)  # one per row, in turn
    from_start: float = 0.5  # share of the prompts that begin where a file begins
    loop_unique: float = 0.5  # a row loops if fewer of its 8-grams are unique
    max_loops: float = 0.6  # share of the rows that may loop


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    """How the drafter is trained."""

    seconds: float = 300.0
    total_seconds: float = 1e9  # with compiling, waiting, reading taps; the rest cuts `seconds`
    batch: int = 32
    anchors: int = 128
    muon_lr: float = 0.01
    adam_lr: float = 2e-3
    weight_decay: float = 0.01
    warmup: float = 0.02
    decay: float = 0.5
    clip: float = 1.0
    warm_start: bool = False  # go on from the drafter that is there, under a new schedule
    slot_decay: float = 4.0  # weight of slot k is exp(-(k - 1) / slot_decay)
    selector_weight: float = 1.0
    max_rows: int = 1_000_000  # of the regenerated ones; their taps live on the device
    compile: bool = True
    wait_s: float = 300.0  # for the regenerated text, when it is being written beside
    save_s: float = 60.0  # between two checkpoints


@dataclass(frozen=True, slots=True)
class EvaluatePlan:
    """What is measured on the held-out files."""

    prompts: str = ""  # folder of *.py.txt
    new_tokens: int = 256
    max_prompt: int = 1536
    contexts: tuple[int, ...] = (500, 3500)  # tokens before the same places of validation files
    files: int = 32  # of those, at most
    chain: int = 6  # drafts of the MTP head
    windows: int = 120  # of `pretrain.sequence` tokens, for the losses


@dataclass(frozen=True, slots=True)
class Recipe:
    """One training run."""

    seed: int = 0
    target: TargetDims = field(default_factory=TargetDims)
    drafter: DrafterDims = field(default_factory=DrafterDims)
    corpus: CorpusPlan = field(default_factory=CorpusPlan)
    pretrain: PretrainPlan = field(default_factory=PretrainPlan)
    mtp: MtpPlan = field(default_factory=MtpPlan)
    regenerate: RegeneratePlan = field(default_factory=RegeneratePlan)
    distill: DrafterPlan = field(default_factory=DrafterPlan)
    evaluate: EvaluatePlan = field(default_factory=EvaluatePlan)

    def drafter_of(self, version: int) -> DrafterDims:
        """The drafter's sizes with another version."""
        return replace(self.drafter, version=version)


def load_recipe(path: Path = DEFAULT_PATH, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `table.key=value` overrides (values in TOML syntax).

    Raises:
        ConfigError: an unknown table or key, or a value that is not TOML.
    """
    recipe = _merge(Recipe(), tomllib.loads(path.read_text(encoding="utf-8")))
    for item in overrides:
        name, _, value = item.partition("=")
        try:
            parsed = tomllib.loads(f"{name} = {value}")
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(
                f"recipe override {item!r} is not TOML ({error}); write table.key=value"
            ) from error
        recipe = _merge(recipe, parsed)
    return recipe


def _frozen(value: list[Any]) -> tuple[Any, ...]:
    return tuple(_frozen(item) if isinstance(item, list) else item for item in value)


def _merge(node: Any, values: Mapping[str, Any]) -> Any:
    known = {f.name: getattr(node, f.name) for f in fields(node)}
    changed: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"recipe key {key!r} is unknown; known here: {', '.join(known)}")
        if isinstance(value, dict):
            changed[key] = _merge(known[key], value)
        else:
            changed[key] = _frozen(value) if isinstance(value, list) else type(known[key])(value)
    return replace(node, **changed)
