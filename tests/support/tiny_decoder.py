"""Tiny checkpoints of one residual stream: what their three makers share.

Every tensor is random, norms, biases and convolutions included, so that a forgotten term shows.
"""

import json
import math

import numpy as np
from support.tiny import make_tokenizer, write_sharded


def write_target(folder, config, shapes, seed, *, centred=(), dtype="F32", extra=None):
    """Write config, weights and tokenizer.

    Args:
        folder: made if it does not exist.
        config: with the text fields at its root or in `text_config`.
        shapes: of all tensors, by published name.
        seed: of every weight.
        centred: how names of norms end that are stored around zero.
        dtype: "BF16" or "F32" on disk.
        extra: tensors to write besides the network's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = random_weights(shapes, seed, centred)
    write_sharded(folder, tensors | (extra or {}), dtype=dtype, shards=1)
    text = config.get("text_config") or config
    make_tokenizer(text["vocab_size"]).save(str(folder / "tokenizer.json"))
    return folder


def random_weights(shapes, seed, centred=()):
    """All tensors by name, float32; `centred` as in `write_target`."""
    rng = np.random.default_rng(seed)
    tensors = {name: _fill(rng, name, shape) for name, shape in sorted(shapes.items())}
    if "lm_head.weight" not in tensors:  # the embedding is the head: keep its scores small
        for name in tensors:
            if "embed" in name:
                tensors[name] = tensors[name] / 8
    return {
        name: value - 1 if name.endswith(tuple(centred)) else value
        for name, value in tensors.items()
    }


def around_shapes(at, hidden):
    """The two norms of a layer."""
    names = ("input_layernorm", "post_attention_layernorm")
    return {f"{at}{name}.weight": (hidden,) for name in names}


def attention_shapes(at, text, *, packs_gate=False):
    """Projections, with biases where the config has them."""
    hidden, dim = text["hidden_size"], text["head_dim"]
    q, kv = text["num_attention_heads"] * dim, text["num_key_value_heads"] * dim
    sizes = {
        "q_proj": (q * (1 + packs_gate), hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, q),
    }
    return _with_biases(at, sizes, text.get("attention_bias", False))


def mlp_shapes(at, hidden, width, *, biased=False):
    """A gated MLP."""
    sizes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    return _with_biases(at, sizes, biased)


def expert_shapes(at, text):
    """A router, and routed experts stacked."""
    count, width = text["num_experts"], text["moe_intermediate_size"]
    hidden = text["hidden_size"]
    return {
        at + "gate.weight": (count, hidden),
        at + "experts.gate_up_proj": (count, 2 * width, hidden),
        at + "experts.down_proj": (count, hidden, width),
    }


def _with_biases(at, sizes, biased):
    shapes = {f"{at}{name}.weight": size for name, size in sizes.items()}
    return shapes | (
        {f"{at}{name}.bias": size[:1] for name, size in sizes.items()} if biased else {}
    )


def _fill(rng, name, shape):
    noise = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("A_log"):
        return np.log(rng.random(shape, dtype=np.float32) * 3 + 0.3)
    if name.endswith("dt_bias"):
        return noise * 0.7 - 1.0
    if name.endswith(".bias"):
        return 0.3 * noise
    if len(shape) == 1:
        return 1 + 0.2 * noise
    if "embed" in name:
        return noise
    if "conv1d" in name:
        return 0.4 * noise
    if "o_proj" in name or "out_proj" in name or "down_proj" in name:
        noise *= 0.5  # rounding grows with depth else, in every implementation
    return noise / math.sqrt(shape[-1])
