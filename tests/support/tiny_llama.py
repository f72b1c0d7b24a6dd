"""Tiny llama checkpoints in the published format, made from a seed."""

from support.tiny import EOS_ID
from support.tiny_decoder import around_shapes, attention_shapes, mlp_shapes, write_target

PREFIX = "model."

TEXT = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,  # inside 150 tokens, so that all three bands show
    },
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": EOS_ID,
    "eos_token_id": [EOS_ID, 6],
    "pretraining_tp": 1,
}
#: The golden cases: fields that differ.
CASES = {
    "llama": {},
    "llama_biased": {
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "num_hidden_layers": 2,
    },
    "llama_plain": {"rope_scaling": None, "num_hidden_layers": 2, "num_key_value_heads": 4},
}


def tiny_config(**overrides):
    """The config.json."""
    return {**TEXT, **overrides}


def make_tiny_llama(folder, seed=0, *, case="llama", extra=None, dtype="F32", **overrides):
    """Write a tiny target of one of `CASES`, with `overrides` of its fields."""
    config = tiny_config(**{**CASES[case], **overrides})
    return write_target(folder, config, target_shapes(config), seed, extra=extra, dtype=dtype)


def target_shapes(text):
    """Published names and shapes."""
    hidden = text["hidden_size"]
    shapes = {"embed_tokens.weight": (text["vocab_size"], hidden), "norm.weight": (hidden,)}
    for layer in range(text["num_hidden_layers"]):
        at = f"layers.{layer}."
        shapes |= around_shapes(at, hidden) | attention_shapes(at + "self_attn.", text)
        width, biased = text["intermediate_size"], text["mlp_bias"]
        shapes |= mlp_shapes(at + "mlp.", hidden, width, biased=biased)
    named = {PREFIX + name: shape for name, shape in shapes.items()}
    if text["tie_word_embeddings"]:
        return named
    return named | {"lm_head.weight": (text["vocab_size"], hidden)}
