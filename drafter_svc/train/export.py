"""Write a trained pair in the published checkpoint format.

Owns names, shards, configs and dtypes on disk. Does not know training or the report's meaning.
What is written is bfloat16; later stages read these files back, so that the drafter learns from
exactly the weights that are served.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from common.errors import ModelMismatch
from drafter_svc.train.drafter_net import DrafterNet, taps_of
from drafter_svc.train.files import write_whole
from drafter_svc.train.recipe import DrafterDims, TargetDims
from drafter_svc.train.target_net import TargetNet

PREFIX = "model.language_model."
MTP = "mtp."
PRIOR = "calibration_prior"  # in `dflash_config`: {"intercept", "slope"} of a refitted prior
TABLE = "ple.ple_embedding.ngram_embedding.weight"
NOT_IN_CONFIG = ("full_attention_interval", "rope_theta", "partial_rotary_factor")


def target_config(dims: TargetDims) -> dict[str, Any]:
    """The `config.json` of a target."""
    text: dict[str, Any] = {"model_type": "qwen4_exp_text"}
    for name in dims.__dataclass_fields__:
        value = getattr(dims, name)
        if name not in NOT_IN_CONFIG:
            text[name] = list(value) if isinstance(value, tuple) else value
    pairs = int(dims.head_dim * dims.partial_rotary_factor) // 2
    text |= {
        "layer_types": dims.layer_types,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": dims.rope_theta,
            "partial_rotary_factor": dims.partial_rotary_factor,
            "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
            "mrope_interleaved": True,
        },
        "bos_token_id": dims.eos_token_id,
        "hidden_act": "silu",
        "output_gate_type": "sigmoid",
        "norm_topk_prob": True,
        "attention_bias": False,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 0,
        "dtype": "bfloat16",
    }
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "tie_word_embeddings": dims.tie_word_embeddings,
        "dtype": "bfloat16",
        "text_config": text,
    }


def drafter_config(dims: DrafterDims, target: TargetDims) -> dict[str, Any]:
    """The `config.json` of a drafter for that target."""
    inner: dict[str, Any] = {
        "block_size": dims.block_size,
        "mask_token_id": dims.mask_token_id,
        "target_layer_ids": taps_of(dims, target),
        "tap_contraction": "stream_mean",
    }
    if dims.version == 2:
        inner |= {
            "conv_kernel_size": dims.conv_kernel_size,
            "conv_group_size": dims.conv_group_size,
            "selector_rank": dims.selector_rank,
            "selector_top_k": dims.selector_top_k,
        }
    return {
        "architectures": ["DFlash2DraftModel" if dims.version == 2 else "DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": target.hidden_size,
        "intermediate_size": dims.intermediate_size,
        "num_hidden_layers": dims.num_hidden_layers,
        "num_attention_heads": dims.num_attention_heads,
        "num_key_value_heads": dims.num_key_value_heads,
        "head_dim": dims.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": dims.rms_norm_eps,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_position_embeddings,
        "rope_theta": dims.rope_theta,
        "rope_scaling": None,
        "layer_types": ["sliding_attention"] * dims.num_hidden_layers,
        "sliding_window": dims.sliding_window,
        "use_sliding_window": True,
        "max_window_layers": dims.num_hidden_layers,
        "is_causal": False,
        "num_target_layers": target.num_hidden_layers,
        "block_size": dims.block_size,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "dflash_config": inner,
    }


def bfloat16_tensors(net: nn.Module, prefix: str) -> dict[str, Tensor]:
    """A module's tensors under their published names; integers and decay rates stay as they are."""
    out: dict[str, Tensor] = {}
    for name, value in net.state_dict().items():
        exact = not value.is_floating_point() or name.endswith("A_log")
        value = value.detach().cpu()
        out[prefix + name] = (value if exact else value.to(torch.bfloat16)).contiguous()
    return out


def target_tensors(net: TargetNet) -> dict[str, Tensor]:
    """The published names and values of the trunk; the table in its shards."""
    out = bfloat16_tensors(net, PREFIX)
    for name in [name for name in out if name.endswith(TABLE)]:
        stem = name.removesuffix("weight")
        for index, shard in enumerate(out.pop(name).chunk(net.dims.split_ngram_parts)):
            out[f"{stem}shard_{index}.weight"] = shard.contiguous()
    return out


def write_target(net: TargetNet, folder: Path) -> None:
    """Write model.safetensors and then config.json (not the tokenizer)."""
    write_tensors(folder / "model.safetensors", target_tensors(net))
    write_json(folder / "config.json", target_config(net.dims))


def write_drafter(net: DrafterNet, target: TargetDims, folder: Path) -> None:
    """Write the drafter's model.safetensors, all bfloat16, and then its config.json."""
    write_tensors(folder / "model.safetensors", bfloat16_tensors(net, ""))
    write_json(folder / "config.json", drafter_config(net.dims, target))


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write one safetensors file."""
    write_whole(path, lambda unfinished: save_file(tensors, unfinished, {"format": "pt"}))


def write_shards(folder: Path, tensors: dict[str, Tensor], limit: int) -> None:
    """Write tensors in files of at most `limit` bytes each, and the index that names them.

    No tensor may be larger than the limit; the order of the names is kept.
    """
    parts: list[dict[str, Tensor]] = [{}]
    room = limit
    for name, value in tensors.items():
        if value.nbytes > room and parts[-1]:
            parts.append({})
            room = limit
        parts[-1][name] = value
        room -= value.nbytes
    names = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    for file, part in zip(names, parts, strict=True):
        write_tensors(folder / file, part)
    where = {name: file for file, part in zip(names, parts, strict=True) for name in part}
    total = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    write_json(folder / "model.safetensors.index.json", index)


def read_target(dims: TargetDims, folder: Path) -> TargetNet:
    """Read what `write_target` wrote, as float32.

    Raises:
        ModelMismatch: the names in the file are not those of `dims`.
    """
    tensors = read_tensors(folder)
    tensors = {n: t for n, t in tensors.items() if not n.startswith(MTP)}
    shards = {n: t for n, t in tensors.items() if ".shard_" in n}
    state = {n.removeprefix(PREFIX): t for n, t in tensors.items() if n not in shards}
    if shards:
        stem = next(iter(shards)).rpartition("shard_")[0]
        order = [shards[f"{stem}shard_{index}.weight"] for index in range(len(shards))]
        state[stem.removeprefix(PREFIX) + "weight"] = torch.cat(order)
    return _fill(TargetNet(dims), state, folder)


def read_drafter(dims: DrafterDims, target: TargetDims, folder: Path) -> DrafterNet:
    """Read what `write_drafter` wrote, as float32.

    Raises:
        ModelMismatch: the names in the file are not those of `dims`.
    """
    return _fill(DrafterNet(dims, target), load_file(folder / "model.safetensors"), folder)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder, in one file or in shards."""
    files = sorted(folder.glob("model*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def _fill(net: Any, state: dict[str, Tensor], folder: Path) -> Any:
    want, have = set(net.state_dict()), set(state)
    if want != have:
        raise ModelMismatch(
            f"checkpoint {folder} does not fit the recipe: missing {sorted(want - have)[:5]}, "
            f"unexpected {sorted(have - want)[:5]}; use the recipe it was made with"
        )
    net.load_state_dict({n: t.float() if t.is_floating_point() else t for n, t in state.items()})
    return net


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an indented JSON object."""
    text = json.dumps(value, indent=2) + "\n"
    write_whole(path, lambda unfinished: unfinished.write_text(text, encoding="utf-8"))
