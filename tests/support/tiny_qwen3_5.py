"""Tiny qwen3_5 and qwen3_5_moe checkpoints in the published format, made from a seed."""

from support.tiny import EOS_ID
from support.tiny_decoder import (
    around_shapes,
    attention_shapes,
    expert_shapes,
    mlp_shapes,
    write_target,
)

PREFIX = "model.language_model."
#: Norms that are stored around zero.
CENTRED = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "q_norm.weight",
    "k_norm.weight",
    "model.norm.weight",
)

TEXT = {
    "model_type": "qwen3_5_text",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "full_attention_interval": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attn_output_gate": True,
    "tie_word_embeddings": False,
    "eos_token_id": EOS_ID,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
#: The golden cases: fields of text_config that differ.
CASES = {
    "qwen3_5": {},
    "qwen3_5_tied": {
        "tie_word_embeddings": True,
        "num_hidden_layers": 2,
        "layer_types": None,
        "full_attention_interval": 2,
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
}


def tiny_config(*, case="qwen3_5", **overrides):
    """The outer config.json of one of `CASES`; `overrides` replace fields of its text_config."""
    text = {**TEXT, **CASES[case], **overrides}
    name = "Qwen3_5Moe" if "num_experts" in text else "Qwen3_5"
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": text["model_type"].removesuffix("_text"),
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": {name: value for name, value in text.items() if value is not None},
    }


def make_tiny_qwen3_5(
    folder, seed=0, *, case="qwen3_5", prefix=PREFIX, extra=None, dtype="F32", **overrides
):
    """Write a tiny target."""
    config = tiny_config(case=case, **overrides)
    shapes = target_shapes(config["text_config"], prefix)
    return write_target(folder, config, shapes, seed, centred=CENTRED, extra=extra, dtype=dtype)


def layer_types(text):
    """Kinds of the layers, named or by interval."""
    every = text["full_attention_interval"]
    kinds = ["linear_attention"] * (every - 1) + ["full_attention"]
    count = text["num_hidden_layers"]
    return text.get("layer_types") or [kinds[layer % every] for layer in range(count)]


def target_shapes(text, prefix=PREFIX):
    """Published names and shapes, experts stacked."""
    hidden = text["hidden_size"]
    shapes = {"embed_tokens.weight": (text["vocab_size"], hidden), "norm.weight": (hidden,)}
    for layer, kind in enumerate(layer_types(text)):
        at = f"layers.{layer}."
        shapes |= around_shapes(at, hidden)
        if kind == "linear_attention":
            shapes |= _linear_shapes(at + "linear_attn.", text)
        else:
            attn, norm = at + "self_attn.", (text["head_dim"],)
            shapes |= attention_shapes(attn, text, packs_gate=True)
            shapes |= {attn + "q_norm.weight": norm, attn + "k_norm.weight": norm}
        if "num_experts" in text:
            shapes |= expert_shapes(at + "mlp.", text)
            width = text["shared_expert_intermediate_size"]
            shapes |= mlp_shapes(at + "mlp.shared_expert.", hidden, width)
            shapes[at + "mlp.shared_expert_gate.weight"] = (1, hidden)
        else:
            shapes |= mlp_shapes(at + "mlp.", hidden, text["intermediate_size"])
    named = {prefix + name: shape for name, shape in shapes.items()}
    if text["tie_word_embeddings"]:
        return named
    return named | {"lm_head.weight": (text["vocab_size"], hidden)}


def _linear_shapes(at, text):
    hidden = text["hidden_size"]
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
