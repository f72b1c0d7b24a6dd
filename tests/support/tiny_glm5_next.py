"""Tiny glm5_next checkpoints in the published format, made from a seed with NumPy alone.

Every tensor is random, norms, convolutions and corrections included, so that a forgotten term
shows. Key and value widths differ, and so do the ranks, so that a mix-up is a wrong shape.
"""

import json
import math
from pathlib import Path

import numpy as np
from support.tiny import EOS_ID, make_tokenizer, write_sharded

PREFIX = "model.language_model."

TEXT = {
    "model_type": "glm5_next_text",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 0,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-3,
    "pad_token_id": 0,
    "eos_token_id": [EOS_ID],
    "tie_word_embeddings": False,
    "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3,
    "layer_types": ["linear_attention"] + ["linear_attention", "full_attention"] * 2,
    "indexer_types": ["full"] * 5,
    "attention_bias": False,
    "index_topk": 48,
    "index_head_dim": 16,
    "index_n_heads": 32,
    "swiglu_limit": 2.0,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "linear_conv_kernel_dim": 4,
    "linear_lower_bound": -5.0,
    "hc_mult": 4,
    "hc_eps": 1e-3,  # both floors are large enough to show
    "hc_sinkhorn_iters": 4,  # before it has converged, so that their number shows
    "index_kpool": 16,
    "index_kpool_always_select_tail": True,
    "num_nextn_predict_layers": 1,
}


def tiny_config(**overrides) -> dict:
    """The outer config.json; `overrides` replace fields of its text_config."""
    text = {**TEXT, **overrides}
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
    }


def make_tiny_glm5_next(
    folder: Path, seed: int = 0, *, dtype: str = "F32", extra: dict | None = None, **overrides
) -> Path:
    """Write a tiny glm5_next target.

    Args:
        folder: made if it does not exist.
        seed: of every weight.
        dtype: "BF16" or "F32" on disk.
        extra: tensors to write besides the network's.
        overrides: fields of text_config.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(**overrides)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = random_weights(config["text_config"], seed)
    write_sharded(folder, tensors | (extra or {}), dtype=dtype, shards=1)
    make_tokenizer(config["text_config"]["vocab_size"]).save(str(folder / "tokenizer.json"))
    return folder


def random_weights(text: dict, seed: int) -> dict[str, np.ndarray]:
    """All tensors of the target, float32, in an order that does not depend on dictionaries."""
    rng = np.random.default_rng(seed)
    shapes = sorted(target_shapes(text).items())
    tensors = {name: _fill(rng, name, shape) for name, shape in shapes}
    if not text["tie_word_embeddings"]:
        shape = (text["vocab_size"], text["hidden_size"])
        tensors["lm_head.weight"] = _fill(rng, "lm_head.weight", shape)
    return tensors


def target_shapes(text: dict) -> dict[str, tuple[int, ...]]:
    """Published names and shapes, one triple per expert."""
    hidden = text["hidden_size"]
    shapes = {"embed_tokens.weight": (text["vocab_size"], hidden), "norm.weight": (hidden,)}
    for layer, kind in enumerate(text["layer_types"]):
        at = f"layers.{layer}."
        shapes |= _around_shapes(at, text)
        is_linear = kind == "linear_attention"
        make = _linear_shapes if is_linear else _attention_shapes
        shapes |= make(at + "self_attn.", text)
        if text["mlp_layer_types"][layer] == "dense":
            shapes |= _mlp_shapes(at + "mlp.", hidden, text["intermediate_size"])
        else:
            shapes |= _expert_shapes(at + "mlp.", text)
    return {PREFIX + name: shape for name, shape in shapes.items()}


def _around_shapes(at, text):
    hidden, count = text["hidden_size"], text["hc_mult"]
    shapes = {
        at + "input_layernorm.weight": (hidden,),
        at + "post_attention_layernorm.weight": (hidden,),
    }
    for place in ("attn", "ffn"):
        shapes[f"{at}hc_{place}_fn"] = (count * (count + 2), count * hidden)
        shapes[f"{at}hc_{place}_base"] = (count * (count + 2),)
        shapes[f"{at}hc_{place}_scale"] = (3,)
    return shapes


def _linear_shapes(at, text):
    hidden, heads, dim = text["hidden_size"], text["linear_num_heads"], text["linear_head_dim"]
    width, kernel = heads * dim, text["linear_conv_kernel_dim"]
    shapes = {f"{at}{part}_proj.weight": (width, hidden) for part in "qkv"}
    shapes |= {f"{at}{part}_conv1d.weight": (width, 1, kernel) for part in "qkv"}
    for part in "fg":
        shapes[f"{at}{part}_a_proj.weight"] = (dim, hidden)
        shapes[f"{at}{part}_b_proj.weight"] = (width, dim)
    return shapes | {
        at + "A_log": (heads,),
        at + "dt_bias": (width,),
        at + "b_proj.weight": (heads, hidden),
        at + "o_norm.weight": (dim,),
        at + "o_proj.weight": (hidden, width),
    }


def _attention_shapes(at, text):
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    key, value = text["qk_nope_head_dim"], text["v_head_dim"]
    q_rank, rank = text["q_lora_rank"], text["kv_lora_rank"]
    index, dim = at + "indexer.", text["index_head_dim"]
    return {
        at + "q_a_proj.weight": (q_rank, hidden),
        at + "q_a_layernorm.weight": (q_rank,),
        at + "q_b_proj.weight": (heads * key, q_rank),
        at + "kv_a_proj_with_mqa.weight": (rank, hidden),
        at + "kv_a_layernorm.weight": (rank,),
        at + "kv_b_proj.weight": (heads * (key + value), rank),
        at + "o_proj.weight": (hidden, heads * value),
        index + "wq_b.weight": (text["index_n_heads"] * dim, q_rank),
        index + "wk.weight": (dim, hidden),
        index + "k_norm.weight": (dim,),
        index + "k_norm.bias": (dim,),
        index + "weights_proj.weight": (text["index_n_heads"], hidden),
        index + "index_kpool_compress_gate": (dim, hidden),
        index + "index_kpool_compress_ape": (text["index_kpool"], dim),
    }


def _mlp_shapes(at, hidden, width):
    return {
        at + "gate_proj.weight": (width, hidden),
        at + "up_proj.weight": (width, hidden),
        at + "down_proj.weight": (hidden, width),
    }


def _expert_shapes(at, text):
    hidden, width, count = (
        text["hidden_size"],
        text["moe_intermediate_size"],
        text["n_routed_experts"],
    )
    shapes = {
        at + "gate.weight": (count, hidden),
        at + "gate.e_score_correction_bias": (count,),
    }
    shapes |= _mlp_shapes(at + "shared_experts.", hidden, width * text["n_shared_experts"])
    for expert in range(count):
        shapes |= _mlp_shapes(f"{at}experts.{expert}.", hidden, width)
    return shapes


def _fill(rng, name, shape):
    noise = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("A_log"):
        return 0.3 * noise
    if name.endswith("dt_bias"):
        return noise - 1.0
    if name.endswith("_scale"):
        return 1.0 + 0.3 * noise
    if name.endswith(("_base", "bias")):
        return 0.3 * noise
    if name.endswith("_ape"):
        return noise
    if len(shape) == 1:
        return 1 + 0.2 * noise  # plain norms
    if "embed" in name:
        return noise
    if "conv1d" in name:
        return 0.4 * noise
    if "compress_gate" in name:
        return 2.0 * noise / math.sqrt(shape[-1])
    if "o_proj" in name or "down_proj" in name:
        noise *= 0.5  # rounding grows with depth else, in every implementation
    return noise / math.sqrt(shape[-1])
