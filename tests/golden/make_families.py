"""Make `families.npz`: what transformers computes on the tiny targets of qwen3, llama and qwen3_5.

Run with the `reference` extra installed: PYTHONPATH=tests python tests/golden/make_families.py
The checkpoints are made from a seed, so only results are stored: logits of every sixteenth id, five
sequences of the main cases and one of the others. Token ids are searched until no row has a tie
among its experts, because the reference does not say how ties fall, and no row of a recurrent layer
is so near to zero before its norm that the reference differs from its own one-row steps.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from support import tiny_llama, tiny_qwen3, tiny_qwen3_5
from support.tiny import EOS_ID

OUT = Path(__file__).with_name("families.npz")
N_TOKENS = 150
STRIDE = 16  # of stored ids; all logits come from one product
LEAST_GAP = 1e-4
MOST_SPREAD = 1e-5
MAIN = ("qwen3", "qwen3_moe", "llama", "qwen3_5", "qwen3_5_moe")  # five sequences each
CLASSES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}


def token_ids(seed):
    """150 ids, with the end of a text at four places, two of them next to each other."""
    ids = np.random.default_rng(seed).integers(EOS_ID + 1, 310, size=N_TOKENS)
    ids[[20, 41, 42, 90]] = EOS_ID
    return ids


def make(case, folder):
    """Write the tiny target of a case; returns the folder and the reference's class."""
    if case in tiny_qwen3.CASES:
        tiny_qwen3.make_tiny_qwen3(folder, case=case)
    elif case in tiny_llama.CASES:
        tiny_llama.make_tiny_llama(folder, case=case)
    else:  # the text part alone, as the reference's text classes read it
        tiny_qwen3_5.make_tiny_qwen3_5(folder, case=case, prefix="model.")
        text = tiny_qwen3_5.tiny_config(case=case)["text_config"]
        (folder / "config.json").write_text(json.dumps(text))
    return folder, CLASSES[json.loads((folder / "config.json").read_text())["model_type"]]


def load_reference(folder, name):
    """Load the folder with transformers, strictly."""
    model, report = getattr(transformers, name).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"]:
        raise SystemExit(f"names do not fit: {report}")
    return model.eval()


def run(model, ids):
    """Logits [150, V] and the smallest gap at the cut among experts."""
    gaps, topk = [1.0], torch.topk

    def spy(scores, k, *args, **kwargs):
        ranked = scores.sort(descending=True, dim=-1).values.double()
        gaps.extend((ranked[..., k - 1] - ranked[..., k]).flatten().tolist())
        return topk(scores, k, *args, **kwargs)

    torch.topk = spy
    try:
        logits = model(input_ids=torch.tensor(ids[None]), use_cache=False).logits[0].numpy()
    finally:
        torch.topk = topk
    return logits, min(gaps)


def spread(model, ids, logits):
    """How far the reference is from itself, fed row by row."""
    if not hasattr(model.config, "linear_num_key_heads"):
        return 0.0
    cache, most = None, 0.0
    for at, token in enumerate(ids):
        out = model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        cache, row = out.past_key_values, out.logits[0, 0].numpy()
        most = max(most, float(np.abs(row - logits[at]).max()))
    return most


def golden(case, stored):
    """Add one case's ids, logits and, of its first sequence, the residual after layer 1."""
    with tempfile.TemporaryDirectory() as place:
        model = load_reference(*make(case, Path(place)))
    residuals = []
    model.model.layers[1].register_forward_hook(
        lambda _m, _a, out: residuals.append(out if torch.is_tensor(out) else out[0])
    )
    found, seed = [], -1
    while len(found) < (5 if case in MAIN else 1):
        seed += 1
        ids = token_ids(seed)
        logits, gap = run(model, ids)
        residual = residuals[-1]
        if gap < LEAST_GAP or spread(model, ids, logits) > MOST_SPREAD:
            continue
        if not found:
            stored[f"{case}.residual"] = residual.reshape(N_TOKENS, -1).numpy()[:: STRIDE // 2]
        print(case, "seed", seed, "gap", gap, "largest logit", np.abs(logits).max())
        found.append((ids.astype(np.int32), logits[:, ::STRIDE]))
    stored[f"{case}.ids"] = np.stack([ids for ids, _ in found])
    stored[f"{case}.logits"] = np.stack([logits for _, logits in found])


def main():
    """Write the file."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    stored = {}
    for case in (*tiny_qwen3.CASES, *tiny_llama.CASES, *tiny_qwen3_5.CASES):
        golden(case, stored)
    np.savez_compressed(OUT, **stored)
    print(OUT, OUT.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
