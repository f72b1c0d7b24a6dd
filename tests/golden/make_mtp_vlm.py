"""Make `mtp_vlm.npz`: what mlx-vlm's own `qwen4_exp_mtp` drafter computes on random checkpoints.

Run from the repository's root with the reference extra:
`PYTHONPATH=.:tests python tests/golden/make_mtp_vlm.py`. The checkpoints are those that
`make_tiny_target` makes of a seed, so only results are stored, per case: 70 ids, the head's logits
for every row of one pass (row j: token j + 1 with the trunk's streams of position j), and per
anchor a chain of six greedy drafts with the logits that each was chosen from. "dense" attends to
everything, "sparse" to 16 tokens and the tail, in trunk and head.
"""

import json
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
from make_packs import reference
from mlx_vlm.speculative.drafters.qwen4_exp_mtp import Model as Head
from mlx_vlm.speculative.drafters.qwen4_exp_mtp import ModelConfig as HeadConfig
from support.tiny import MTP_CASES, make_tiny_target

OUT = Path(__file__).with_name("mtp_vlm.npz")
ANCHORS = (1, 5, 22, 47, 64)
CHAIN = 6


def load_head(folder: Path, model) -> Head:
    """mlx-vlm's head with the checkpoint's weights, bound to its trunk."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    head = Head(HeadConfig.from_dict({"text_config": text}))
    tensors = mx.load(str(folder / "model.safetensors"))
    own = {name: value for name, value in tensors.items() if name.startswith("mtp.")}
    head.load_weights(list(head.sanitize(own).items()), strict=True)
    head.eval()
    head.reset(model)
    return head


def chain(head: Head, model, ids: np.ndarray, streams: mx.array, anchor: int):
    """Drafts after `anchor`, by the drafter's own loop, and the logits behind each."""
    head.reset(model)
    seen, scores = [], head._lm_head_fn

    def noted(hidden):
        seen.append(scores(hidden)[0, -1])
        return seen[-1][None, None]

    head._lm_head_fn = noted
    context = mx.array(ids[None, :anchor])
    bonus = int(ids[anchor])
    head.prefill_from_target_hidden(context, streams[:, :anchor], bonus, None, greedy=True)
    drafts = head.draft_block(bonus, None, None, CHAIN + 1, None, greedy=True)
    return np.array(drafts)[0], np.array(mx.stack(seen))


def main() -> None:
    """Compute and store."""
    mx.set_default_device(mx.cpu)
    stored = {}
    for name, fields in MTP_CASES.items():
        with tempfile.TemporaryDirectory() as made:
            folder = make_tiny_target(Path(made) / "t", dtype="F32", has_head=True, **fields)
            model = reference(folder)
            head = load_head(folder, model)
            ids = np.random.default_rng(6).integers(8, 256, 70).astype(np.int32)
            ids[20] = ids[45] = 7  # the end of a text
            language, streams = model.language_model, []
            language.model(
                mx.array(ids[None]),
                cache=language.make_cache(),
                capture_layer_ids=[],
                hidden_sink=streams,
            )
            hidden, _ = head._forward_tokens(mx.array(ids[None, 1:]), streams[0], mx.int32)
            stored[f"{name}:ids"] = ids
            stored[f"{name}:logits"] = np.array(head._lm_head_fn(hidden)[0])
            for anchor in ANCHORS:
                drafts, logits = chain(head, model, ids, streams[0], anchor)
                stored[f"{name}:drafts:{anchor}"] = drafts
                stored[f"{name}:chain:{anchor}"] = logits
            print(name, "max |logit|", np.abs(stored[f"{name}:logits"]).max())
    np.savez_compressed(OUT, **stored)
    print(OUT, OUT.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
