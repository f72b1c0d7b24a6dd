"""Tiny qwen3 and qwen3_moe checkpoints in the published format, made from a seed."""

from support.tiny import EOS_ID
from support.tiny_decoder import (
    around_shapes,
    attention_shapes,
    expert_shapes,
    mlp_shapes,
    write_target,
)

PREFIX = "model."

TEXT = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,  # not hidden / heads: a published checkpoint names it for that reason
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "max_window_layers": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": EOS_ID,
    "eos_token_id": EOS_ID,
}
#: The golden cases: fields that differ.
CASES = {
    "qwen3": {},
    "qwen3_tied": {"tie_word_embeddings": True, "attention_bias": True, "num_hidden_layers": 2},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    },
}


def tiny_config(**overrides):
    """The config.json."""
    return {**TEXT, **overrides}


def make_tiny_qwen3(folder, seed=0, *, case="qwen3", extra=None, dtype="F32", **overrides):
    """Write a tiny target of one of `CASES`, with `overrides` of its fields."""
    config = tiny_config(**{**CASES[case], **overrides})
    return write_target(folder, config, target_shapes(config), seed, extra=extra, dtype=dtype)


def target_shapes(text):
    """Published names and shapes, experts stacked."""
    hidden, norm = text["hidden_size"], (text["head_dim"],)
    shapes = {"embed_tokens.weight": (text["vocab_size"], hidden), "norm.weight": (hidden,)}
    for layer in range(text["num_hidden_layers"]):
        at = f"layers.{layer}."
        attn = at + "self_attn."
        shapes |= around_shapes(at, hidden) | attention_shapes(attn, text)
        shapes |= {attn + "q_norm.weight": norm, attn + "k_norm.weight": norm}
        if text.get("num_experts") and layer not in text["mlp_only_layers"]:
            shapes |= expert_shapes(at + "mlp.", text)
        else:
            shapes |= mlp_shapes(at + "mlp.", hidden, text["intermediate_size"])
    named = {PREFIX + name: shape for name, shape in shapes.items()}
    if text["tie_word_embeddings"]:
        return named
    return named | {"lm_head.weight": (text["vocab_size"], hidden)}
