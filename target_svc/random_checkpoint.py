"""A `qwen4_exp` checkpoint folder of chosen size with random weights, in the published format.

Owns the published proportions and how each kind of tensor is drawn. Does not know how it is read or
run: it goes through the same loading as a real one. Made on the device, so a few billion weights
take seconds. Every tensor is random, so experts are chosen and blocks kept as unevenly as chance
has it.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer, models

from common.errors import ConfigError
from target_svc.models import qwen4_exp
from target_svc.models.blocks.ngram import NgramRows

_FILE_BYTES: Final = 2 << 30  # a file of the checkpoint is closed at this size
_EOS_ID: Final = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """What may be cut; everything else is as published."""

    layers: int = 8
    hidden: int = 2560
    experts: int = 40
    value_heads: int = 48
    expert_width: int = 640
    head_dim: int = 256
    vocab: int = 32_768
    ngram_rows: int = 4000  # of each of 16 heads of the table
    context: int = 32_768

    def __post_init__(self) -> None:
        """Check what the heads are derived from."""
        if self.value_heads % 12:
            raise ConfigError(f"value_heads: {self.value_heads}; a multiple of 12 is right")

    def config(self) -> dict[str, Any]:
        """The config.json of a checkpoint of these sizes."""
        pattern = ["linear_attention"] * 3 + ["full_attention"]
        text = {
            "model_type": "qwen4_exp_text",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "layer_types": [pattern[index % 4] for index in range(self.layers)],
            "num_attention_heads": self.value_heads // 2,
            "num_key_value_heads": 2,
            "head_dim": self.head_dim,
            "linear_num_key_heads": self.value_heads // 3,
            "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.head_dim // 2,
            "linear_value_head_dim": self.head_dim // 2,
            "linear_conv_kernel_dim": 4,
            "num_experts": self.experts,
            "num_experts_per_tok": min(10, self.experts),
            "moe_intermediate_size": self.expert_width,
            "shared_expert_intermediate_size": self.expert_width,
            "hc_count": 4,
            "hc_lowrank": self.hidden // 8,
            "ple_layer_ids": [2],
            "ple_embed_dim": self.hidden,
            "ple_conv_kernel_size": 4,
            "ngram_size": 3,
            "heads_per_ngram": 8,
            "ngram_vocab_size_base": self.ngram_rows,
            "make_ngram_vocab_size_divisible_by": 128,
            "split_ngram_parts": 1,
            "seed": 1234,
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": self.head_dim // 2,
            "indexer_budget": 2048,
            "indexer_compress_ratio": 4,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": self.context,
            "eos_token_id": _EOS_ID,
            "tie_word_embeddings": False,
            "output_gate_type": "sigmoid",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
            },
        }
        return {"model_type": "qwen4_exp", "tie_word_embeddings": False, "text_config": text}


def write_checkpoint(folder: Path, sizes: Sizes, seed: int = 0) -> int:
    """Write config, weights, table and a tokenizer of one word; returns the number of weights.

    Args:
        folder: exists and is empty.
        sizes: see `Sizes`.
        seed: of every weight.
    """
    config = sizes.config()
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    Tokenizer(models.WordLevel({"<|endoftext|>": _EOS_ID}, "<|endoftext|>")).save(
        str(folder / "tokenizer.json")
    )
    args = qwen4_exp.ModelArgs.from_config(config)
    mx.random.seed(seed)
    _write_network(folder, qwen4_exp.expected_shapes(args))
    table = _write_table(folder, args)
    shapes = qwen4_exp.expected_shapes(args).values()
    return table + sum(math.prod(shape) for shape in shapes)


def _write_network(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    part: dict[str, mx.array] = {}
    files = 0
    for name, shape in shapes.items():
        part[name] = _draw(name, shape).astype(mx.bfloat16)
        mx.eval(part[name])
        if sum(value.nbytes for value in part.values()) > _FILE_BYTES:
            mx.save_safetensors(str(folder / f"model-{files}.safetensors"), part)
            files, part = files + 1, {}
    if part:
        mx.save_safetensors(str(folder / f"model-{files}.safetensors"), part)


def _draw(name: str, shape: tuple[int, ...]) -> mx.array:
    if name.endswith("A_log"):
        return mx.log(mx.random.uniform(0.3, 3.3, shape))
    noise = mx.random.normal(shape, dtype=mx.bfloat16)
    if name.endswith("dt_bias"):
        return noise * 0.7 - 1.0
    if name.endswith("linear_attn.norm.weight"):
        return 1 + 0.2 * noise
    if len(shape) == 1:
        return 0.2 * noise  # zero-centred norms: the factor is 1 + w
    if "embed" in name:
        return noise
    return noise * (0.4 if "conv1d" in name else 1 / math.sqrt(shape[-1]))


def _write_table(folder: Path, args: qwen4_exp.ModelArgs) -> int:
    """Write the n-gram table as random bfloat16 bits between -2 and 2; returns its weights."""
    if args.ngram is None:
        return 0
    rows, width = NgramRows(args.ngram).n_rows, args.ple_width // args.ngram.heads
    name = (
        f"{qwen4_exp.PREFIX}layers.{args.ple_layers[0]}.ple.ple_embedding.ngram_embedding"
        ".shard_0.weight"
    )
    noise = np.random.default_rng(0).standard_normal((rows, width), dtype=np.float32)
    bits = (noise.view(np.uint32) >> 16).astype("<u2").tobytes()
    entry = {"dtype": "BF16", "shape": [rows, width], "data_offsets": [0, len(bits)]}
    head = json.dumps({name: entry}).encode()
    head += b" " * (-len(head) % 8)
    path = folder / "model-table.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + bits)
    return rows * width
