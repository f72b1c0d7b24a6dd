"""Make `drafter.npz`: block logits, candidates and drafts of z-lab's `dflash` on tiny drafters.

Run with the `reference` extra: `python tests/golden/make_drafter.py`. Weights and taps are drawn
again from their seeds by the tests, so only results are stored. The reference sees each context in
one piece, without a cache.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from transformers import Qwen3Config

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.drafter_cases import CASES, LENGTHS, anchor_of, taps_of, target_tensors
from support.tiny_drafter import tiny_config, tiny_tensors


def reference_model(config, tensors):
    """The reference network with our tensors, every one used."""
    second = "selector_rank" in config["dflash_config"]
    fields = {name: value for name, value in config.items() if name != "architectures"}
    rope = {"rope_type": "default"} | fields.pop("rope_parameters", {})
    fields["rope_parameters"] = rope | {"rope_theta": fields.pop("rope_theta")}
    qwen = Qwen3Config(**fields)
    qwen._attn_implementation = "sdpa"
    model = (DFlash2DraftModel if second else DFlashDraftModel)(qwen).float().eval()
    state = {
        name + ".weight" * name.endswith("_codebook"): torch.from_numpy(tensor)
        for name, tensor in tensors.items()
    }
    model.load_state_dict(state, strict=True)
    return model


def run(model, config, embedding, head, taps, first_pos, anchor_id):
    """Logits [B-1, V], ascending candidates [B-1, K] and greedy drafts [B-1] of one block."""
    nested = config["dflash_config"]
    block = nested["block_size"]
    ids = torch.tensor([[anchor_id] + [nested["mask_token_id"]] * (block - 1)])
    scale = nested.get("input_embedding_scale", 1.0)
    hidden = model(
        position_ids=torch.arange(first_pos, first_pos + len(taps) + block)[None],
        noise_embedding=torch.nn.functional.embedding(ids, embedding) * scale,
        target_hidden=torch.from_numpy(taps)[None],
    )[:, 1:]
    logits = model.compute_logits(hidden, lambda rows: rows @ head.T)
    if not isinstance(model, DFlash2DraftModel):
        return logits[0], torch.zeros(block - 1, 0), logits[0].argmax(-1)
    path, candidates, _ = model.propose(hidden, ids[:, 0], lambda rows: rows @ head.T, 0.0)
    return logits[0], candidates[0].sort(-1).values, path[0]


@torch.inference_mode()
def main():
    torch.set_num_threads(1)
    embedding, head = (torch.from_numpy(tensor) for tensor in target_tensors())
    results = {}
    for name, case in CASES.items():
        config = tiny_config(case.target_config, is_second=case.is_second, **case.changes)
        model = reference_model(config, tiny_tensors(config, case.seed))
        for length in LENGTHS:
            taps = taps_of(config, length)
            anchor = anchor_of(length)
            found = run(model, config, embedding, head, taps, case.first_pos, anchor)
            for key, value in zip(("logits", "candidates", "drafts"), found, strict=True):
                kind = np.float32 if key == "logits" else np.int16
                results[f"{name}/{length}/{key}"] = value.numpy().astype(kind)
    path = Path(__file__).with_name("drafter.npz")
    np.savez_compressed(path, **results)
    print(f"{path.name}: {path.stat().st_size} bytes, {len(results)} arrays")


if __name__ == "__main__":
    main()
