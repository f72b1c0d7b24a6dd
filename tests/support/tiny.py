"""Tiny checkpoints in the published format, made from a seed with NumPy alone.

`make_tiny_target` writes a whole folder (config, weights, tokenizer) in well under two seconds.
Every tensor is random, norms and convolutions included, so that a forgotten term shows.
"""

import json
import math
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOS_ID = 7
VOCAB = 512
PREFIX = "model.language_model."

TEXT = {
    "model_type": "qwen4_exp_text",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "hc_count": 4,
    "hc_lowrank": 24,
    "ple_layer_ids": [2],
    "ple_embed_dim": 64,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 4,
    "ngram_vocab_size_base": 1000,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 4,
    "seed": 1234,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
    "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "eos_token_id": EOS_ID,
    "bos_token_id": EOS_ID,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}

#: The golden cases of `make_qwen4.py`: fields of text_config that differ.
GOLDEN_CASES = {
    "main": {},
    "tied": {"tie_word_embeddings": True, "num_hidden_layers": 4, "output_gate_type": "silu"},
}

#: The golden cases of `make_mtp_vlm.py`. Eight index heads: a block that scores zero, where a tie
#: may be cut either way, is rare with so many.
_SMALL = {"num_hidden_layers": 4, "vocab_size": 256, "ngram_vocab_size_base": 100}
MTP_CASES = {
    "dense": {**_SMALL, "seed": 21, "indexer_budget": 1024},
    "sparse": {**_SMALL, "seed": 22, "indexer_budget": 16, "indexer_n_heads": 8},
}


def tiny_config(**overrides) -> dict:
    """The outer config.json; `overrides` replace fields of its text_config."""
    text = {**TEXT, **overrides}
    if "num_hidden_layers" in overrides and "layer_types" not in overrides:
        pattern = ["linear_attention"] * 3 + ["full_attention"]
        text["layer_types"] = [pattern[i % 4] for i in range(text["num_hidden_layers"])]
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
    }


def make_tiny_target(
    folder: Path,
    seed: int = 0,
    *,
    dtype: str = "BF16",
    split_experts: bool = False,
    shards: int = 1,
    has_head: bool = False,
    **overrides,
) -> Path:
    """Write a tiny qwen4_exp target.

    Args:
        folder: made if it does not exist.
        seed: of every weight.
        dtype: "BF16" or "F32" on disk.
        split_experts: per-expert names, as transformers saves them, instead of the fused ones.
        shards: number of weight files; more than one writes the shard index too.
        has_head: whether the checkpoint has an MTP head, which changes no other weight.
        overrides: fields of text_config.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(**overrides, **({"mtp_num_hidden_layers": 1} if has_head else {}))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = random_weights(config["text_config"], seed)
    if has_head:
        tensors |= random_head(config["text_config"], seed + 1)
    if split_experts:
        tensors = split_fused_experts(tensors)
    write_sharded(folder, tensors, dtype=dtype, shards=shards)
    make_tokenizer(config["text_config"]["vocab_size"]).save(str(folder / "tokenizer.json"))
    return folder


# --------------------------------------------------------------------------- weights


def ngram_head_sizes(text: dict) -> list[int]:
    """Consecutive primes from the base size up, one per head."""
    count = (text["ngram_size"] - 1) * text["heads_per_ngram"]
    sizes, candidate = [], text["ngram_vocab_size_base"]
    while len(sizes) < count:
        if all(candidate % q for q in range(2, math.isqrt(candidate) + 1)):
            sizes.append(candidate)
        candidate += 1
    return sizes


def target_shapes(text: dict) -> dict[str, tuple[int, ...]]:
    """Published names and shapes, experts fused, without the three integer buffers."""
    hidden, streams = text["hidden_size"], text["hc_count"]
    width = hidden * streams
    shapes = {"embed_tokens.weight": (text["vocab_size"], hidden)}
    shapes |= _read_shapes("hyper_connection_mixer.", text, inject=False)
    for layer, kind in enumerate(text["layer_types"]):
        at = f"layers.{layer}."
        shapes |= _read_shapes(at + "attn_hyper_connection.", text, inject=True)
        shapes |= _read_shapes(at + "mlp_hyper_connection.", text, inject=True)
        is_linear = kind == "linear_attention"
        shapes |= _linear_shapes(at, text) if is_linear else _attention_shapes(at, text)
        shapes |= _expert_shapes(at + "mlp.", text)
        if layer + 1 in text["ple_layer_ids"]:
            shapes |= _ple_shapes(at + "ple.", text, width)
    return {PREFIX + name: shape for name, shape in shapes.items()}


def _read_shapes(at, text, *, inject):
    width, rank = text["hidden_size"] * text["hc_count"], text["hc_lowrank"]
    shapes = {
        at + "hc_norm.weight": (width,),
        at + "input_mix_weight_down.weight": (rank, width),
        at + "input_mix_weight_up.weight": (width, rank),
    }
    return shapes | (
        {at + "block_inject_weight.weight": (text["hc_count"], width)} if inject else {}
    )


def _linear_shapes(at, text):
    hidden, at = text["hidden_size"], at + "linear_attn."
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    heads, dim = text["linear_num_value_heads"], text["linear_value_head_dim"]
    channels = 2 * keys + heads * dim
    return {
        at + "in_proj_qkv.weight": (channels, hidden),
        at + "in_proj_z.weight": (heads * dim, hidden),
        at + "in_proj_b.weight": (heads, hidden),
        at + "in_proj_a.weight": (heads, hidden),
        at + "conv1d.weight": (channels, 1, text["linear_conv_kernel_dim"]),
        at + "A_log": (heads,),
        at + "dt_bias": (heads,),
        at + "norm.weight": (dim,),
        at + "out_proj.weight": (hidden, heads * dim),
    }


def _attention_shapes(at, text):
    hidden, dim, at = text["hidden_size"], text["head_dim"], at + "self_attn."
    heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    index_dim = text["indexer_head_dim"]
    return {
        at + "q_proj.weight": (heads * dim * 2, hidden),
        at + "k_proj.weight": (kv_heads * dim, hidden),
        at + "v_proj.weight": (kv_heads * dim, hidden),
        at + "o_proj.weight": (hidden, heads * dim),
        at + "q_norm.weight": (dim,),
        at + "k_norm.weight": (dim,),
        at + "indexer.index_qk_proj.weight": ((text["indexer_n_heads"] + 1) * index_dim, hidden),
        at + "indexer.q_layernorm.weight": (index_dim,),
        at + "indexer.k_layernorm.weight": (index_dim,),
    }


def _expert_shapes(at, text):
    hidden, experts, inner = text["hidden_size"], text["num_experts"], text["moe_intermediate_size"]
    shared = text["shared_expert_intermediate_size"]
    return {
        at + "gate.weight": (experts, hidden),
        at + "experts.gate_up_proj": (experts, 2 * inner, hidden),
        at + "experts.down_proj": (experts, hidden, inner),
        at + "shared_expert.gate_proj.weight": (shared, hidden),
        at + "shared_expert.up_proj.weight": (shared, hidden),
        at + "shared_expert.down_proj.weight": (hidden, shared),
        at + "shared_expert_gate.weight": (1, hidden),
    }


def _ple_shapes(at, text, width):
    parts = text["split_ngram_parts"]
    multiple = math.lcm(text["make_ngram_vocab_size_divisible_by"], parts)
    rows = -(-sum(ngram_head_sizes(text)) // multiple) * multiple // parts
    heads = (text["ngram_size"] - 1) * text["heads_per_ngram"]
    table = {
        f"{at}ple_embedding.ngram_embedding.shard_{part}.weight": (
            rows,
            text["ple_embed_dim"] // heads,
        )
        for part in range(parts)
    }
    return table | {
        at + "key_proj.weight": (width, text["ple_embed_dim"]),
        at + "value_proj.weight": (text["hidden_size"], text["ple_embed_dim"]),
        at + "conv1d.weight": (width, 1, text["ple_conv_kernel_size"]),
        at + "norm_key.weight": (width,),
        at + "norm_query.weight": (width,),
        at + "norm_conv.weight": (width,),
    }


def random_weights(text: dict, seed: int) -> dict[str, np.ndarray]:
    """All tensors of the target, float32, in an order that does not depend on dictionaries."""
    rng = np.random.default_rng(seed)
    shapes = target_shapes(text)
    tensors = {name: _fill(rng, name, shape) for name, shape in sorted(shapes.items())}
    if not text["tie_word_embeddings"]:
        shape = (text["vocab_size"], text["hidden_size"])
        tensors["lm_head.weight"] = _fill(rng, "lm_head.weight", shape)
    return tensors


def head_shapes(text: dict) -> dict[str, tuple[int, ...]]:
    """Published names and shapes of the MTP head."""
    hidden, layer = text["hidden_size"], "mtp.layers.0."
    shapes = {
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden * text["hc_count"],),
        "mtp.fc_embedding.weight": (hidden, hidden),
        "mtp.fc_hidden.weight": (hidden, hidden),
    }
    shapes |= _read_shapes("mtp.hyper_connection_mixer.", text, inject=False)
    shapes |= _read_shapes(layer + "attn_hyper_connection.", text, inject=True)
    shapes |= _read_shapes(layer + "mlp_hyper_connection.", text, inject=True)
    return shapes | _attention_shapes(layer, text) | _expert_shapes(layer + "mlp.", text)


def random_head(text: dict, seed: int) -> dict[str, np.ndarray]:
    """All tensors of the MTP head, float32."""
    rng = np.random.default_rng(seed)
    return {name: _fill(rng, name, shape) for name, shape in sorted(head_shapes(text).items())}


def _fill(rng, name, shape):
    noise = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("A_log"):
        return np.log(rng.random(shape, dtype=np.float32) * 3 + 0.3)
    if name.endswith("dt_bias"):
        return noise * 0.7 - 1.0
    if name.endswith("linear_attn.norm.weight"):
        return 1 + 0.2 * noise
    if len(shape) == 1:
        return 0.2 * noise  # zero-centred norms: the effective scale is 1 + w
    if "embed_tokens" in name or "ngram_embedding" in name:
        return noise
    if "conv1d" in name:
        return 0.4 * noise
    return noise / math.sqrt(shape[-1])


def split_fused_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rename fused experts to one triple per expert."""
    split = {}
    for name, value in tensors.items():
        at = name.rsplit(".", 1)[0]
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(value):
                gate, up = np.split(both, 2)
                split[f"{at}.{expert}.gate_proj.weight"] = gate
                split[f"{at}.{expert}.up_proj.weight"] = up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(value):
                split[f"{at}.{expert}.down_proj.weight"] = down
        else:
            split[name] = value
    return split


# --------------------------------------------------------------------------- files


def to_bfloat16_bits(value: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16, ties to even; uint16 bits."""
    bits = np.ascontiguousarray(value, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], *, dtype: str = "BF16") -> None:
    """Write one container file; floating tensors as `dtype`, integers as int64."""
    header, blobs, offset = {}, [], 0
    for name, value in tensors.items():
        if value.dtype.kind != "f":
            kind, blob = "I64", value.astype("<i8").tobytes()
        elif dtype == "BF16":
            kind, blob = "BF16", to_bfloat16_bits(value).tobytes()
        else:
            kind, blob = "F32", value.astype("<f4").tobytes()
        ends = [offset, offset + len(blob)]
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": ends}
        offset = ends[1]
        blobs.append(blob)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(blobs))


def write_sharded(folder: Path, tensors: dict[str, np.ndarray], *, dtype: str, shards: int) -> None:
    """Write one file, or several with their index."""
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype=dtype)
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::shards]}
        write_safetensors(folder / file, part, dtype=dtype)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` entries, trained on this file; id 7 ends a text."""
    specials = [f"<|reserved_{i}|>" for i in range(EOS_ID)] + ["<|endoftext|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<|unused_{i}|>" for i in range(missing)])
    return tokenizer
