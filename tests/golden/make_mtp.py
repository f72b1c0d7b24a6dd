"""Make `mtp.npz`: what the trainer's torch code computes with a tiny target and its MTP head.

Run with torch installed:  PYTHONPATH=.:tests python tests/golden/make_mtp.py
Stored are the checkpoint itself (published names, bfloat16 values as float32, the config as JSON),
60 ids, the trunk's logits, the head's logits for every row of one pass (row j: token j + 1 with the
streams of position j), and chains of six greedy drafts with their logits after some anchors.
The indexer's budget is 32 tokens, so later rows of trunk and head attend to a selection.
"""

import json
from pathlib import Path

import numpy as np
import torch
from support.trainer_cases import SMALL, random_head, random_target
from torch.nn import functional

from drafter_svc.train.export import MTP, bfloat16_tensors, target_config, target_tensors
from drafter_svc.train.mtp_net import Chain

OUT = Path(__file__).with_name("mtp.npz")
ANCHORS = (1, 7, 30, 41, 58)
CHAIN = 6


def rounded(net):
    """The net with its weights rounded to bfloat16, as a checkpoint holds them."""
    with torch.no_grad():
        for name, p in net.named_parameters():
            if not name.endswith("A_log"):
                p.copy_(p.to(torch.bfloat16).float())
    return net


def chain_logits(chain, target, head, anchor, drafts):
    """The head's logits of each link of a chain, link by link with a cache."""
    cache = {k: v.clone() if torch.is_tensor(v) else v for k, v in chain.cache.items()}
    cache["position"].fill_(anchor)
    streams, rows = chain.out[:, anchor - 1 : anchor], []
    for draft in drafts:
        rows.append(target.logits(head.read(streams))[0, 0])
        embedded = functional.embedding(torch.tensor([[draft]]), target.embed_tokens.weight)
        streams, _ = head(embedded, streams, cache)
    return torch.stack(rows).numpy()


def main():
    """Compute and store."""
    target, head = rounded(random_target()), rounded(random_head())
    ids = torch.randint(2, SMALL.vocab_size, (1, 60), generator=torch.Generator().manual_seed(9))
    ids[0, 20] = ids[0, 45] = SMALL.eos_token_id
    config = target_config(SMALL)
    config["text_config"]["mtp_num_hidden_layers"] = 1
    tensors = target_tensors(target) | bfloat16_tensors(head, MTP)
    stored = {f"tensor:{name}": value.float().numpy() for name, value in tensors.items()}
    for name, value in tensors.items():
        if not value.is_floating_point():
            stored[f"tensor:{name}"] = value.numpy()
    with torch.no_grad():
        trunk = target(ids)
        chain = Chain(head, target, ids, trunk.streams)
        stored["trunk_logits"] = target.logits(trunk.hidden)[0].numpy()
        stored["head_logits"] = target.logits(head.read(chain.out))[0].numpy()
        for anchor in ANCHORS:
            drafts = chain.draft(anchor, CHAIN)
            stored[f"drafts:{anchor}"] = np.array(drafts)
            stored[f"chain_logits:{anchor}"] = chain_logits(chain, target, head, anchor, drafts)
    np.savez_compressed(OUT, config=json.dumps(config), ids=ids[0].numpy(), **stored)
    print(OUT, OUT.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
