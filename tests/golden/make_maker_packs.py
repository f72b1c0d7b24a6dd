"""Write tiny packs by the code of those who make them, and the logits it gives for them.

Run from the repository's root with the reference extra:
`PYTHONPATH=.:tests python tests/golden/make_maker_packs.py`. Makes `maker_packs/<case>/` (config
and weights as the maker saves them, in bfloat16) and `maker_packs.npz` (ids, and float32 logits
[T, V] by case). mlx-lm packs by its `convert`; mlx-vlm by the functions that its `convert` calls,
which itself wants an image processor. Logits are the maker's own network, loaded from the pack by
the maker's own loader and run in float32. Vision parts are named by the configs and left out.
"""

import json
import shutil
import tempfile
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import mlx_vlm.utils
import numpy as np
from mlx.utils import tree_map
from mlx_lm.convert import convert
from mlx_vlm.convert import mixed_quant_predicate_builder, skip_multimodal_module
from mlx_vlm.quant_utils import quantize_model
from support.tiny_glm5_next import make_tiny_glm5_next
from support.tiny_qwen3_5 import make_tiny_qwen3_5

GOLDEN = Path(__file__).parent
PLACE = GOLDEN / "maker_packs"
#: Widths that groups of 64 divide; two layers.
QWEN = {
    "num_hidden_layers": 2,
    "layer_types": None,
    "full_attention_interval": 2,
    "vocab_size": 256,
    "intermediate_size": 128,
    "linear_value_head_dim": 32,
    "linear_num_value_heads": 4,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GLM = {
    "vocab_size": 256,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "mlp_layer_types": ["dense", "sparse"],
    "layer_types": ["linear_attention", "full_attention"],
    "indexer_types": ["full"] * 2,
    "index_n_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "index_topk": 4096,  # nothing is dropped, so no tie can be cut two ways
}
QWEN_VISION = {
    "model_type": "qwen3_5",
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 2,
    "num_position_embeddings": 4,
}
GLM_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 2,
    "image_size": 8,
    "out_hidden_size": 64,
    "projection_intermediate_size": 16,
}
LM_CASES = {
    "lm_affine": ("qwen3_5", {"q_bits": 4, "q_group_size": 64}),
    "lm_mixed": ("qwen3_5", {"q_group_size": 32, "q_bits": 3, "quant_predicate": "mixed_3_6"}),
    "lm_mxfp4": ("qwen3_5", {"q_mode": "mxfp4"}),
    "lm_nvfp4": ("qwen3_5", {"q_mode": "nvfp4"}),
    "lm_moe": ("qwen3_5_moe", {"q_bits": 4, "q_group_size": 64}),
    "lm_moe_mxfp4": ("qwen3_5_moe", {"q_mode": "mxfp4"}),
}
VLM_CASES = {
    "vlm_mixed": ("qwen3_5", {"recipe": "mixed_4_8"}),
    "vlm_moe": ("qwen3_5_moe", {"q_bits": 4, "q_group_size": 32}),
    "glm_affine": ("glm5_next", {"q_bits": 4, "q_group_size": 64}),
    "glm_mixed": ("glm5_next", {"recipe": "mixed_4_8"}),
    "glm_nvfp4": ("glm5_next", {"q_bits": 4, "q_group_size": 16, "mode": "nvfp4"}),
}


def published(family: str, folder: Path) -> Path:
    """A tiny checkpoint as it is published, in bfloat16."""
    if family == "glm5_next":
        make_tiny_glm5_next(folder, seed=3, dtype="BF16", **GLM)
    else:
        own = MOE if family == "qwen3_5_moe" else {}
        make_tiny_qwen3_5(folder, seed=3, case=family, dtype="BF16", **QWEN, **own)
    vision = GLM_VISION if family == "glm5_next" else QWEN_VISION | {"model_type": family}
    config = json.loads((folder / "config.json").read_text()) | {"vision_config": vision}
    (folder / "config.json").write_text(json.dumps(config))
    words = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder


def pack_by_mlx_vlm(source: Path, out: Path, *, recipe: str = "", **fields) -> None:
    """What mlx-vlm's `convert` does between loading and copying files."""
    model = mlx_vlm.utils.load_model(source, lazy=True, strict=False)
    own = getattr(model, "quant_predicate", None)

    def rule(path, module):
        if skip_multimodal_module(path):
            return False
        return True if own is None else own(path, module)

    chosen = mixed_quant_predicate_builder(recipe, model) if recipe else rule
    fields = fields or {"q_group_size": 64, "q_bits": 4}
    config = mlx_vlm.utils.load_config(source)
    model, config = quantize_model(
        model,
        config,
        fields["q_group_size"],
        fields["q_bits"],
        mode=fields.get("mode", "affine"),
        quant_predicate=chosen,
    )
    mlx_vlm.utils.save_weights(out, model, donate_weights=True)
    mlx_vlm.utils.save_config(config, config_path=out / "config.json")


def logits_of(model, ids: np.ndarray) -> np.ndarray:
    """The maker's network in float32, scales and biases of packs included."""

    def widened(value):
        return value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value

    model.update(tree_map(widened, model.parameters()))
    model.eval()
    language = getattr(model, "language_model", model)
    out = language(mx.array(ids[None]), cache=None)
    return np.array(getattr(out, "logits", out)[0])


def embed_in_float32() -> None:
    """Rows of an mxfp4 or nvfp4 embedding come out as bfloat16, and layers would go on in that."""
    embed = nn.QuantizedEmbedding.__call__
    nn.QuantizedEmbedding.__call__ = lambda self, ids: embed(self, ids).astype(mx.float32)


def main() -> None:
    """Make all packs."""
    mx.set_default_device(mx.cpu)
    embed_in_float32()
    ids = np.random.default_rng(3).integers(8, 256, 32).astype(np.int32)
    stored = {"ids": ids}
    shutil.rmtree(PLACE, ignore_errors=True)
    for name, (family, fields) in {**LM_CASES, **VLM_CASES}.items():
        with tempfile.TemporaryDirectory() as made:
            source, out = published(family, Path(made) / "source"), Path(made) / "pack"
            if name in LM_CASES:
                convert(str(source), str(out), quantize=True, **fields)
                model = mlx_lm.utils.load_model(out)[0]
            else:
                pack_by_mlx_vlm(source, out, **fields)
                model = mlx_vlm.utils.load_model(out)
            stored[name] = logits_of(model, ids)
            (PLACE / name).mkdir(parents=True)
            for file in ("config.json", "model.safetensors"):
                shutil.copy(out / file, PLACE / name)
        size = (PLACE / name / "model.safetensors").stat().st_size
        print(name, size, "bytes, max |logit|", np.abs(stored[name]).max())
    np.savez_compressed(GOLDEN / "maker_packs.npz", **stored)


if __name__ == "__main__":
    main()
