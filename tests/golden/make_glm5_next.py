"""Make `glm5_next.npz`: what transformers computes on the target of `support.tiny_glm5_next`.

Run with the `reference` extra installed: PYTHONPATH=tests python tests/golden/make_glm5_next.py
The checkpoint is made from a seed, so only results are stored. Token ids are searched until no
query has a tie at the indexer's cut or among its experts, because the reference does not say how
ties fall. Logits are stored for every fourth id: all come from one product.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from support.tiny_glm5_next import EOS_ID, TEXT, make_tiny_glm5_next
from transformers import Glm5NextForConditionalGeneration

OUT = Path(__file__).with_name("glm5_next.npz")
N_SEQUENCES = 5
N_TOKENS = 150
STRIDE = 4  # of stored ids
LEAST_GAP = 1e-4
TAPPED = (0, 2, 3)  # of the first sequence, the mean of the streams after these layers
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "image_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": TEXT["hidden_size"],
    "projection_intermediate_size": 64,
}


def token_ids(seed):
    """150 ids, with the end of a text at four places, two of them next to each other."""
    ids = np.random.default_rng(seed).integers(EOS_ID + 1, 310, size=N_TOKENS)
    ids[[20, 41, 42, 90]] = EOS_ID
    return ids


def load_reference(folder):
    """Load the folder with transformers; it insists on a vision part, so a small one is named."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"vision_config": VISION}))
    torch.manual_seed(0)
    model, report = Glm5NextForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    missing = [name for name in report["missing_keys"] if "visual" not in name]
    if missing or report["unexpected_keys"]:
        raise SystemExit(f"names do not fit: {missing} {report['unexpected_keys']}")
    return model.eval()


def run(model, ids):
    """Logits [150, V] and the smallest gap at any cut of scores, of pools and of experts."""
    gaps, topk = {2: [], 3: []}, torch.Tensor.topk
    free = torch.topk

    def spy(scores, k, *args, **kwargs):
        if scores.dim() in gaps and scores.shape[-1] > k:
            ranked = scores.sort(descending=True, dim=-1).values.double()
            gap = (ranked[..., k - 1] - ranked[..., k])[ranked[..., k] > -1e30]
            gaps[scores.dim()] += gap.flatten().tolist()
        return topk(scores, k, *args, **kwargs)

    torch.Tensor.topk = torch.topk = spy
    try:
        logits = model(input_ids=torch.tensor(ids[None]), use_cache=False).logits[0].numpy()
    finally:
        torch.Tensor.topk, torch.topk = topk, free
    return logits, min(gaps[3]), min(gaps[2])


def main():
    """Write the file."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        model = load_reference(make_tiny_glm5_next(Path(place)))
    seen = {}
    for index in TAPPED:
        model.model.language_model.layers[index].register_forward_hook(
            lambda _m, _a, out, index=index: seen.__setitem__(index, out[0][0].numpy())
        )
    stored, seed = {"ids": [], "logits": []}, -1
    while len(stored["ids"]) < N_SEQUENCES:
        seed += 1
        ids = token_ids(seed)
        logits, pools, experts = run(model, ids)
        if min(pools, experts) < LEAST_GAP:
            continue
        print("seed", seed, "gaps", pools, experts, "largest logit", np.abs(logits).max())
        if not stored["ids"]:
            stored |= {f"mean{index}": value.mean(1) for index, value in seen.items()}
        stored["ids"].append(ids.astype(np.int32))
        stored["logits"].append(logits[:, ::STRIDE])
    stored |= {"ids": np.stack(stored["ids"]), "logits": np.stack(stored["logits"])}
    np.savez_compressed(OUT, **stored)
    print(OUT, OUT.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
