"""A drafter's block by the published formulas, in float64 NumPy: no cache, no fused product.

Written from the formulas alone and shares nothing with `drafter_svc`; its own test holds it against
z-lab's goldens. What a query sees is an argument, so that other runtimes' rules can be tried.
"""

import numpy as np
from support.drafter_cases import target_tensors


def published(config, layer, positions, anchor_pos):
    """Which keys each query sees by the published config, bool [B, C + B].

    Source: z-lab/dflash `model.py`: causal iff sliding unless the config says, `q - k < W`.
    """
    queries = anchor_pos + np.arange(config["dflash_config"]["block_size"])
    steps = queries[:, None] - np.concatenate([positions, queries])
    slides = config["layer_types"][layer] == "sliding_attention"
    said = config.get("is_causal")
    is_causal = slides if said is None else said
    seen = steps >= 0 if is_causal else np.ones(steps.shape, bool)
    return seen & (abs(steps) < config["sliding_window"]) if slides else seen


class PlainDrafter:
    """One drafter of `tiny_tensors`, with the stand-in target's embedding and head."""

    def __init__(self, config, tensors):
        self.config, self.nested = config, config["dflash_config"]
        self._tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
        self._embedding, self._head = (tensor.astype(np.float64) for tensor in target_tensors())

    def logits(self, features, positions, anchor_id, *, anchor_pos=None, rule=published):
        """Hidden rows and logits [B - 1, V] after features of absolute positions."""
        B = self.nested["block_size"]
        positions = np.asarray(positions, np.int64)
        anchor_pos = int(positions[-1]) + 1 if anchor_pos is None else anchor_pos
        ids = [anchor_id] + [self.nested["mask_token_id"]] * (B - 1)
        x = self._embedding[ids] * self.nested.get("input_embedding_scale", 1.0)
        for layer in range(self.config["num_hidden_layers"]):
            seen = rule(self.config, layer, positions, anchor_pos)
            x = self._layer(f"layers.{layer}.", x, features, positions, anchor_pos, seen)
        hidden = self._norm(x[1:], "norm.weight")
        logits = hidden @ self._head.T * self.nested.get("output_multiplier", 1.0)
        cap = self.nested.get("final_logit_softcapping")
        return hidden, np.tanh(logits / cap) * cap if cap else logits

    def drafts(self, hidden, logits, anchor_id):
        """Greedy drafts, slot by slot."""
        if "selector_rank" not in self.nested:
            return logits.argmax(axis=1).tolist()
        before, after, project = (
            self._tensors[f"candidate_selector.{name}"]
            for name in (
                "predecessor_codebook",
                "successor_codebook",
                "hidden_projection.weight",
            )
        )
        path = [anchor_id]
        for row, scores in zip(hidden, logits, strict=True):
            candidates = np.argsort(-scores)[: self.nested["selector_top_k"]]
            gate = before[path[-1]] * (project @ row)
            path.append(int(candidates[(scores[candidates] + after[candidates] @ gate).argmax()]))
        return path[1:]

    def _layer(self, at, x, features, positions, anchor_pos, seen):
        def attend(y):
            return self._attention(at + "self_attn.", y, features, positions, anchor_pos, seen)

        def mlp(y):
            gate = y @ self._tensors[at + "mlp.gate_proj.weight"].T
            up = y @ self._tensors[at + "mlp.up_proj.weight"].T
            return (gate / (1 + np.exp(-gate)) * up) @ self._tensors[at + "mlp.down_proj.weight"].T

        for norm, conv, inner in (
            ("input_layernorm.weight", "attention_conv.", attend),
            ("post_attention_layernorm.weight", "mlp_conv.", mlp),
        ):
            y = self._norm(x, at + norm)
            if "conv_kernel_size" not in self.nested:
                x = x + inner(y)
                continue
            dynamic = y @ self._tensors[at + conv + "kernel_projection.weight"].T
            x = x + self._mixed(at + conv, 1, inner(self._mixed(at + conv, 0, y, dynamic)), dynamic)
        return x

    def _mixed(self, at, side, rows, dynamic):
        k, group = self.nested["conv_kernel_size"], self.nested["conv_group_size"]
        B, H = rows.shape
        base = self._tensors[at + "base_kernel"][side]
        dynamic = np.repeat(dynamic.reshape(B, 2, k, H // group)[:, side], group, axis=-1)
        out = np.zeros_like(rows)
        for tap in range(min(k, B)):
            out[tap:] += (base[tap] + dynamic[tap:, tap]) * rows[: B - tap]
        return out

    def _attention(self, at, y, features, positions, anchor_pos, seen):
        config = self.config
        hd, n_kv = config["head_dim"], config["num_key_value_heads"]
        block = anchor_pos + np.arange(len(y))
        everywhere = np.concatenate([positions, block])
        inputs = np.concatenate([features.reshape(-1, y.shape[1]), y])
        heads = {
            name: (rows @ self._tensors[f"{at}{name}_proj.weight"].T).reshape(len(rows), -1, hd)
            for name, rows in (("q", y), ("k", inputs), ("v", inputs))
        }
        q = self._turned(self._norm(heads["q"], at + "q_norm.weight"), block)
        k = self._turned(self._norm(heads["k"], at + "k_norm.weight"), everywhere)
        group = q.shape[1] // n_kv
        out = np.empty_like(q)
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // group].T / np.sqrt(hd)
            scores = np.where(seen, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[:, head] = weights @ heads["v"][:, head // group]
        return out.reshape(len(y), -1) @ self._tensors[at + "o_proj.weight"].T

    def _turned(self, heads, positions):
        """Split-half rotation; angles in float32, as the published code makes them."""
        hd = heads.shape[-1]
        scaling = self.config.get("rope_parameters") or {}
        theta = scaling.get("rope_theta", self.config["rope_theta"])
        frequencies = (theta ** -(np.arange(0, hd, 2) / hd) / scaling.get("factor", 1.0)).astype(
            "f4"
        )
        angles = positions.astype("f4")[:, None, None] * frequencies
        cos, sin = np.cos(angles.astype("f8")), np.sin(angles.astype("f8"))
        low, high = heads[..., : hd // 2], heads[..., hd // 2 :]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    def _norm(self, rows, name):
        scale = np.sqrt((rows**2).mean(axis=-1, keepdims=True) + self.config["rms_norm_eps"])
        return rows / scale * self._tensors[name]
