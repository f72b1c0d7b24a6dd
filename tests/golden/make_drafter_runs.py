"""Make `drafter_runs.npz`: sessions of tiny drafters in three runtimes, each with its own cache.

Run with the `reference` extra, from the repository's root:
`PYTHONPATH=.:tests python tests/golden/make_drafter_runs.py`.
The runtimes: z-lab's `dflash.model` (torch) and `dflash.model_mlx`, mlx-vlm's `dflash2` and
`qwen3_dflash`. Weights and taps are drawn again from their seeds by the tests; of every block one
logit in eight of three slots is kept, and all drafts. Also writes `packs/drafter`: a drafter packed
by mlx-vlm's network in 4 bits, its codebooks in 8, and `packed/..`: what mlx-vlm drafts with it.
"""

import json
import shutil
import tempfile
from pathlib import Path

import dflash.model_mlx as zlab_mlx
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from dflash.model import DFlash2DraftModel, _crop_to, _make_cache
from make_drafter import reference_model
from mlx.utils import tree_flatten
from mlx_vlm.speculative.drafters import dflash2, qwen3_dflash
from support.drafter_cases import (
    KEPT_IDS,
    KEPT_SLOTS,
    PACKED,
    RUN_SIZES,
    RUNS,
    anchor_of,
    config_of,
    taps_of,
    target_tensors,
)
from support.tiny_drafter import make_stand_in_target, make_tiny_drafter


def block_of(config, anchor):
    """Ids of a block's rows."""
    nested = config["dflash_config"]
    return [anchor] + [nested["mask_token_id"]] * (nested["block_size"] - 1)


class Torch:
    """z-lab's loop: context and block enter the cache, the block is cropped again."""

    def __init__(self, config, folder):
        self._config, self._model = config, reference_model(config, tiny_tensors_of(folder))
        self._embedding, self._head = (torch.from_numpy(t) for t in target_tensors())
        self._cache, self._end = _make_cache(self._model.config), 0

    def block(self, taps, anchor):
        start, self._end = self._end, self._end + len(taps)
        ids = torch.tensor([block_of(self._config, anchor)])
        scale = self._config["dflash_config"].get("input_embedding_scale", 1.0)
        with torch.inference_mode():
            hidden = self._model(
                position_ids=torch.arange(start, self._end + ids.shape[1])[None],
                noise_embedding=torch.nn.functional.embedding(ids, self._embedding) * scale,
                target_hidden=torch.from_numpy(taps)[None],
                past_key_values=self._cache,
                use_cache=True,
            )[:, 1:]
            _crop_to(self._cache, self._end)
            logits = self._model.compute_logits(hidden, self._scores)[0]
            drafts = logits.argmax(-1)
            if isinstance(self._model, DFlash2DraftModel):
                drafts = self._model.propose(hidden, ids[:, 0], self._scores, 0.0)[0][0]
        return logits.numpy(), drafts.numpy()

    def _scores(self, rows):
        return rows @ self._head.T


class Target:
    """What the MLX runtimes bind to."""

    def __init__(self):
        embedding, head = target_tensors()
        self.embed_tokens = nn.Embedding(*embedding.shape)
        self.embed_tokens.weight = mx.array(embedding)
        self.lm_head = nn.Linear(*head.shape[::-1], bias=False)
        self.lm_head.weight = mx.array(head)


class ZlabMlx:
    """z-lab's MLX module, read by its own loader."""

    def __init__(self, config, folder):
        zlab_mlx.snapshot_download = lambda path, **_: path
        self._config, self._model = config, zlab_mlx.load_draft(str(folder)).bind(Target())
        self._cache = self._model.make_cache()

    def block(self, taps, anchor):
        model, ids = self._model, mx.array([block_of(self._config, anchor)])
        hidden = model.hidden_states(ids, mx.array(taps)[None], self._cache, 1)
        logits = model.compute_logits(hidden)
        drafts = mx.argmax(logits, axis=-1)
        if isinstance(model, zlab_mlx.DFlash2DraftModel):
            drafts = model.candidate_selector.select(hidden, logits, ids[:, 0], 0.0)[0]
        return np.array(logits[0]), np.array(drafts[0])


class MlxVlm:
    """mlx-vlm's `dflash2`, or `qwen3_dflash` for DFlash, strictly loaded."""

    def __init__(self, config, folder):
        is_second = "selector_rank" in config["dflash_config"]
        package = dflash2 if is_second else qwen3_dflash
        model = package.Model(package.ModelConfig.from_dict(config))
        weights = model.sanitize(mx.load(str(folder / "model.safetensors")))
        model.load_weights(list(weights.items()), strict=True)
        target = Target()
        model.embed_tokens, model.lm_head = target.embed_tokens, target.lm_head
        self._config, self.model = config, model
        self._cache, self._other = model.make_cache(), model.make_cache()

    def block(self, taps, anchor):
        model, ids = self.model, mx.array([block_of(self._config, anchor)])
        rows = mx.array(taps)[None]
        logits = model(ids, rows, self._cache)[:, 1:]
        greedy = lambda scores: mx.argmax(scores, axis=-1)  # noqa: E731
        size = self._config["dflash_config"]["block_size"]
        drafts = model.draft_block(anchor, rows, self._other, size, greedy)
        return np.array(logits[0]), np.array(drafts[0])


def pack(session, folder):
    """Quantize a session's network, codebooks wider than the rest, and write it to `folder`."""
    table = {"group_size": 32, "bits": 4, "mode": "affine"}
    own = {}

    def rule(path, module):
        if not hasattr(module, "to_quantized") or path in ("embed_tokens", "lm_head"):
            return False
        if path.endswith("_codebook"):
            own[path] = {"group_size": 32, "bits": 8}
            return own[path]
        return True

    nn.quantize(session.model, group_size=32, bits=4, class_predicate=rule)
    bound = ("embed_tokens", "lm_head")
    weights = dict(tree_flatten(session.model.parameters()))
    weights = {name: w for name, w in weights.items() if not name.startswith(bound)}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    config = config_of(PACKED) | {"quantization": table | own, "quantization_config": table | own}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def follow(session, taps):
    """Kept logits and drafts of all rounds of one session."""
    found, end = [], 0
    for size in RUN_SIZES:
        found.append(session.block(taps[end : end + size], anchor_of(end + size)))
        end += size
    logits = np.stack([block[list(KEPT_SLOTS), KEPT_IDS] for block, _ in found])
    drafts = np.stack([drafts for _, drafts in found])
    return {"logits": logits.astype(np.float32), "drafts": drafts.astype(np.int16)}


def tiny_tensors_of(folder):
    """The tensors of a drafter's folder."""
    tensors = mx.load(str(folder / "model.safetensors"))
    return {name: np.array(tensor) for name, tensor in tensors.items()}


def main():
    torch.set_num_threads(1)
    mx.set_default_device(mx.cpu)
    results = {}
    for name, case in {**RUNS, "packed": PACKED}.items():
        config = config_of(case)
        taps = taps_of(config, sum(RUN_SIZES))
        with tempfile.TemporaryDirectory() as made:
            target = make_stand_in_target(Path(made) / "t")
            folder = make_tiny_drafter(
                Path(made) / "d", target, case.seed, is_second=case.is_second, **case.changes
            )
            sessions = {"zlab": Torch, "zlab_mlx": ZlabMlx, "mlx_vlm": MlxVlm}
            for runtime in sessions if name in RUNS else ["mlx_vlm"]:
                session = sessions[runtime](config, folder)
                if name == "packed":
                    pack(session, Path(__file__).parent / "packs" / "drafter")
                for key, value in follow(session, taps).items():
                    results[f"{name}/{runtime}/{key}"] = value
    path = Path(__file__).with_name("drafter_runs.npz")
    np.savez_compressed(path, **results)
    print(f"{path.name}: {path.stat().st_size} bytes, {len(results)} arrays")


if __name__ == "__main__":
    main()
