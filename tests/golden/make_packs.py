"""Write tiny MLX packs with mlx-vlm's own names and quantizer, and the logits it gives for them.

Run from the repository's root with the reference extra:
`PYTHONPATH=.:tests python tests/golden/make_packs.py`. Makes `packs/<name>/` (config, weights,
tokenizer) and `packs.npz` (ids, and float32 logits [T, V] per pack).
"""

import json
import shutil
import tempfile
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.models.qwen4_exp import Model, ModelConfig
from support.tiny import make_tiny_target

GOLDEN = Path(__file__).parent
SMALL = {
    "num_hidden_layers": 4,
    "vocab_size": 256,
    "num_experts": 4,
    "ngram_vocab_size_base": 100,
    "hc_lowrank": 32,
    "indexer_budget": 1024,  # nothing is dropped, so no tie can be cut two ways
}
VISION = {"deepstack_visual_indexes": [], "depth": 1, "hidden_size": 8, "num_heads": 1}
TABLES = {
    "affine": {"group_size": 32, "bits": 4, "mode": "affine"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}
OWN = {"group_size": 64, "bits": 8, "mode": "affine"}  # of routers and of the embedding


def reference(folder: Path) -> Model:
    """mlx-vlm's network with a published checkpoint's weights."""
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] = VISION
    model = Model(ModelConfig.from_dict(config))
    weights = model.sanitize(dict(mx.load(str(folder / "model.safetensors"))))
    own = [(name[15:], v) for name, v in weights.items() if name.startswith("language_model.")]
    derived = dict(tree_flatten(model.language_model.parameters()))  # hash constants keep theirs
    buffers = {name: v for name, v in derived.items() if ".ple_embedding.ngram_h" in name}
    buffers |= {name: v for name, v in derived.items() if name.endswith("layer_multipliers")}
    model.language_model.load_weights([*buffers.items(), *own], strict=True)
    model.eval()
    return model


def pack(model: Model, table: dict) -> dict:
    """Quantize in place; returns the table with what differs by module."""
    own = {}

    def rule(path, module):
        if not hasattr(module, "to_quantized") or "shards" in path:
            return False
        if path.endswith(("mlp.gate", "embed_tokens")):
            own["language_model." + path] = OWN
            return OWN
        return module.weight.shape[-1] % table["group_size"] == 0

    nn.quantize(
        model.language_model,
        group_size=table["group_size"],
        bits=table["bits"],
        mode=table["mode"],
        class_predicate=rule,
    )
    return table | own


def main() -> None:
    """Make all packs."""
    mx.set_default_device(mx.cpu)
    ids = np.random.default_rng(3).integers(8, 256, 48).astype(np.int32)
    arrays = {"ids": ids}
    for name, table in TABLES.items():
        with tempfile.TemporaryDirectory() as made:
            folder = make_tiny_target(Path(made) / "t", seed=5, dtype="F32", **SMALL)
            model = reference(folder)
            quantization = pack(model, table)
            language = model.language_model
            logits = language(mx.array(ids[None]), cache=language.make_cache()).logits
            out = GOLDEN / "packs" / name
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir(parents=True)
            tensors = {
                "language_model." + path: value
                for path, value in tree_flatten(language.parameters())
            }
            mx.save_safetensors(str(out / "model.safetensors"), tensors)
            config = json.loads((folder / "config.json").read_text())
            config["quantization"] = config["quantization_config"] = quantization
            (out / "config.json").write_text(json.dumps(config, indent=1))
            shutil.copy(folder / "tokenizer.json", out)
            arrays[name] = np.array(logits[0].astype(mx.float32))
    np.savez_compressed(GOLDEN / "packs.npz", **arrays)


if __name__ == "__main__":
    main()
