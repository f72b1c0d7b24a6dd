"""Make `qwen4.npz`: what transformers computes on the tiny target that `support.tiny` writes.

Run with the `reference` extra installed:  PYTHONPATH=tests python tests/golden/make_qwen4.py
The checkpoint is made from a seed, so only results are stored. Token ids are searched until no
query has a tie at the indexer's cut, because the reference does not say how ties fall.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from support.tiny import EOS_ID, GOLDEN_CASES, TEXT, make_tiny_target
from transformers import Qwen4ExpForConditionalGeneration

OUT = Path(__file__).with_name("qwen4.npz")
N_TOKENS = 72
TAPPED = (1, 3, 6)  # streams after these layers are stored as their mean
READ = (2, 4, 7)  # inputs of these layers' mixers
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": TEXT["hidden_size"],
    "num_position_embeddings": 16,
}


def token_ids(seed):
    """72 ids, with the end of a text at four places, two of them next to each other."""
    ids = np.random.default_rng(seed).integers(EOS_ID + 1, 490, size=N_TOKENS)
    ids[[20, 41, 42, 60]] = EOS_ID
    return ids


def load_reference(folder):
    """Load the folder with transformers; it insists on a vision part, so a small one is named."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config |= {"vision_config": VISION} | {name: 500 + i for i, name in enumerate(tokens)}
    path.write_text(json.dumps(config))
    torch.manual_seed(0)
    model = Qwen4ExpForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def watch(model):
    """Hooks that collect layers' outputs, mixers' inputs and the indexers' score cuts."""
    seen = {"out": {}, "read": {}, "rows": None}
    text = model.model.language_model
    for index, layer in enumerate(text.layers):
        layer.register_forward_hook(
            lambda _m, _a, out, index=index: seen["out"].__setitem__(index, out[0].numpy())
        )
        layer.attn_hyper_connection.register_forward_hook(
            lambda _m, _a, out, index=index: seen["read"].__setitem__(index, out[0][0].numpy())
        )
    table = text.layers[1].ple.ple_embedding.ngram_embedding
    table.register_forward_pre_hook(
        lambda _m, args: seen.__setitem__("rows", args[0].numpy().reshape(N_TOKENS, -1))
    )
    return seen


def reference_cuts(model, ids):
    """Smallest gap between the last kept and the first dropped block's score of any query."""
    gaps, topk = [], torch.Tensor.topk

    def spy(scores, k, *args, **kwargs):
        if scores.dim() == 1 and scores.shape[0] > k:
            ranked = scores.sort(descending=True).values
            gaps.append(float(ranked[k - 1] - ranked[k]))
        return topk(scores, k, *args, **kwargs)

    torch.Tensor.topk = spy
    try:
        logits = model(input_ids=torch.tensor(ids[None]), use_cache=False).logits[0].numpy()
    finally:
        torch.Tensor.topk = topk
    return logits, min(gaps)


def main():
    """Write the file."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    stored = {}
    for name, changes in GOLDEN_CASES.items():
        with tempfile.TemporaryDirectory() as place:
            folder = make_tiny_target(Path(place), seed=0, **changes)
            model = load_reference(folder)
            seen = watch(model)
            for seed in range(200):
                ids = token_ids(seed)
                logits, gap = reference_cuts(model, ids)
                if gap > 1e-4:
                    break
            print(name, "seed", seed, "gap", gap, "largest logit", np.abs(logits).max())
            stored[f"{name}.ids"] = ids.astype(np.int32)
            stored[f"{name}.logits"] = logits
            stored[f"{name}.rows"] = seen["rows"].astype(np.int32)
            if name == "main":
                streams = TEXT["hc_count"]
                for index in TAPPED:
                    mean = seen["out"][index].reshape(N_TOKENS, streams, -1).mean(1)
                    stored[f"{name}.mean{index}"] = mean
                for index in READ:
                    stored[f"{name}.read{index}"] = seen["read"][index]
    np.savez_compressed(OUT, **stored)
    print(OUT, OUT.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
