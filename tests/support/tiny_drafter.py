"""Small drafters with random weights in the published format, made from a seed.

Written with NumPy alone, so that the golden generator (torch) and the tests (MLX) regenerate the
same weights. Every tensor is random, identities included, so that nothing hides behind a zero.
"""

import json
from pathlib import Path

import numpy as np

V, H = 256, 64  # of the stand-in target


def write_tensors(path, tensors):
    """Write float32 arrays as one safetensors file."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.size * 4
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with Path(path).open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor, "<f4").tobytes())


def make_stand_in_target(folder, *, seed=100, vocab=V, hidden=H, n_layers=8, is_tied=False, hc=1):
    """Write a target folder that holds only what a drafter borrows: no layers."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    text = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": n_layers,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": is_tied,
        "hc_count": hc,
    }
    (folder / "config.json").write_text(json.dumps({"text_config": text}))
    (folder / "tokenizer.json").write_text("{}")
    names = ["model.language_model.embed_tokens.weight", "lm_head.weight"]
    draw = {name: rng.standard_normal((vocab, hidden)).astype(np.float32) for name in names}
    scaled = {names[0]: draw[names[0]] * 0.5, names[1]: draw[names[1]] * 1.5 / hidden**0.5}
    write_tensors(folder / "model.safetensors", dict(list(scaled.items())[: 1 if is_tied else 2]))
    return folder


def tiny_config(target_config, *, is_second=True, **changes):
    """A drafter's `config.json` for any target's; `changes` go where DFlash fields live."""
    text = target_config.get("text_config") or target_config
    hidden, n_layers = text["hidden_size"], text["num_hidden_layers"]
    config = {
        "architectures": ["DFlash2DraftModel" if is_second else "DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": hidden * 3 // 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": text["vocab_size"],
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "num_target_layers": n_layers,
        "sliding_window": 16,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention"] * 2,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    nested = {
        "block_size": 8,
        "mask_token_id": 1,
        "target_layer_ids": sorted({1, n_layers // 2, n_layers - 2}),
    }
    if is_second:
        config["is_causal"] = False
        nested |= {"conv_kernel_size": 2, "conv_group_size": 16}
        nested |= {"selector_rank": 16, "selector_top_k": 16}
    for name, value in changes.items():
        (config if name in config or name in ROOT_FIELDS else nested)[name] = value
    return config | {"dflash_config": nested}


ROOT_FIELDS = (
    "is_causal",
    "rope_parameters",
    "rope_scaling",
    "rope_is_neox_style",
    "hidden_act",
    "draft_vocab_size",
    "dtype",
)


def tiny_tensors(config, seed=0):
    """Random tensors by published names, float32."""
    rng = np.random.default_rng(seed)
    nested = config["dflash_config"]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config["head_dim"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    tensors = {}

    def linear(name, out, inp, scale=1.0):
        tensors[name] = rng.standard_normal((out, inp)) * scale / inp**0.5

    def norm(name, size):
        tensors[name] = 1.0 + 0.2 * rng.standard_normal(size)

    linear("fc.weight", hidden, len(nested["target_layer_ids"]) * hidden)
    norm("hidden_norm.weight", hidden)
    norm("norm.weight", hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}."
        norm(f"{layer}input_layernorm.weight", hidden)
        norm(f"{layer}post_attention_layernorm.weight", hidden)
        linear(f"{layer}self_attn.q_proj.weight", queries, hidden)
        linear(f"{layer}self_attn.k_proj.weight", keys, hidden)
        linear(f"{layer}self_attn.v_proj.weight", keys, hidden)
        linear(f"{layer}self_attn.o_proj.weight", hidden, queries)
        norm(f"{layer}self_attn.q_norm.weight", head_dim)
        norm(f"{layer}self_attn.k_norm.weight", head_dim)
        linear(f"{layer}mlp.gate_proj.weight", inner, hidden)
        linear(f"{layer}mlp.up_proj.weight", inner, hidden)
        linear(f"{layer}mlp.down_proj.weight", hidden, inner)
        if "conv_kernel_size" in nested:
            k, groups = nested["conv_kernel_size"], hidden // nested["conv_group_size"]
            for side in ("attention_conv", "mlp_conv"):
                base = 0.3 * rng.standard_normal((2, k, hidden))
                base[:, 0] += 1.0
                tensors[f"{layer}{side}.base_kernel"] = base
                linear(f"{layer}{side}.kernel_projection.weight", 2 * k * groups, hidden, 0.3)
    if "selector_rank" in nested:
        rank, vocab = nested["selector_rank"], config["vocab_size"]
        for name in ("predecessor_codebook", "successor_codebook"):
            tensors[f"candidate_selector.{name}"] = rng.standard_normal((vocab, rank)) * 0.7
        linear("candidate_selector.hidden_projection.weight", rank, hidden)
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def make_tiny_drafter(folder, target_folder, seed=0, *, is_second=True, edit=None, **changes):
    """Write a complete drafter folder for an existing target folder.

    `changes` overwrite config fields; `edit(tensors)` may change the tensors in place.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    target_config = json.loads((Path(target_folder) / "config.json").read_text())
    config = tiny_config(target_config, is_second=is_second, **changes)
    tensors = tiny_tensors(config, seed)
    if edit:
        edit(tensors)
    (folder / "config.json").write_text(json.dumps(config))
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def fuse(tensors, taps, eps=1e-6):
    """The target side's part: taps [S, T * H] -> features [S, H]; float64 inside."""
    rows = taps.astype(np.float64) @ tensors["fc.weight"].T.astype(np.float64)
    scale = np.sqrt((rows**2).mean(axis=-1, keepdims=True) + eps)
    return (rows / scale * tensors["hidden_norm.weight"]).astype(np.float32)
