"""A published checkpoint as a pack: its matrices quantized by MLX, under the names of makers."""

import json
import shutil

import mlx.core as mx

GROUP = 32
#: Ends of names of what stays plain, as makers leave it.
PLAIN = ("mlp.gate.weight", "conv1d.weight", "index_kpool_compress_gate")


def make_pack(source, folder, *, mode="affine", bits=4):
    """Write `source`, a folder with one weights file, as a pack; returns the new folder."""
    group = {"nvfp4": 16}.get(mode, GROUP)
    folder.mkdir()
    out = {}
    for name, value in mx.load(str(source / "model.safetensors")).items():
        if not _is_packed(name, value, group):
            out[name] = value
            continue
        module = _switched(name).removesuffix(".weight")
        parts = mx.quantize(value.astype(mx.float32), group, bits, mode)
        out |= dict(zip((f"{module}.{part}" for part in PARTS), parts, strict=False))
    mx.save_safetensors(str(folder / "model.safetensors"), out)
    config = json.loads((source / "config.json").read_text())
    config["quantization"] = {"group_size": group, "bits": bits, "mode": mode}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "tokenizer.json", folder)
    return folder


PARTS = ("weight", "scales", "biases")


def _is_packed(name, value, group):
    is_matrix = name.endswith((".weight", "experts.gate_up_proj", "experts.down_proj"))
    is_wide = value.ndim >= 2 and value.shape[-1] % group == 0
    return is_matrix and is_wide and "ngram_embedding" not in name and not name.endswith(PLAIN)


def _switched(name):
    """Makers store the experts of a layer as `switch_mlp`, with `.weight`."""
    for part in ("gate_up_proj", "down_proj"):
        if name.endswith(f".experts.{part}"):
            return name.replace(f".experts.{part}", f".switch_mlp.{part}.weight")
    return name
