"""A recipe so small that the whole chain runs in a minute on a CPU.

Owns the toy sizes: every part of the real recipe is there, each as small as it may be. What it
makes is worthless; that it comes out, loads and agrees with serving is the point.
"""

from dataclasses import replace

import numpy as np
import torch

from common.errors import ModelMismatch
from drafter_svc.train.decode import generate
from drafter_svc.train.export import read_target
from drafter_svc.train.files import WorkFolder, pick_device
from drafter_svc.train.recipe import Recipe


def smoke_recipe(recipe: Recipe, version: int = 2) -> Recipe:
    """The recipe with toy sizes and seconds; its seed and corpus rules are kept.

    Of what is compiled on a GPU only the second drafter is, to stay under a minute.
    """
    target = replace(
        recipe.target,
        vocab_size=384,
        hidden_size=64,
        head_dim=32,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        hc_lowrank=8,
        ple_embed_dim=32,
        ngram_vocab_size_base=200,
        indexer_head_dim=16,
        indexer_budget=32,
        max_position_embeddings=256,
    )
    drafter = replace(
        recipe.drafter,
        version=version,
        intermediate_size=96,
        head_dim=32,
        sliding_window=64,
        conv_group_size=16,
        selector_rank=16,
    )
    return replace(
        recipe,
        target=target,
        drafter=drafter,
        corpus=replace(recipe.corpus, max_total_mb=4.0, tokenizer_mb=1.0, max_files=8),
        pretrain=replace(
            recipe.pretrain, seconds=4.0, batch=4, sequence=128, compile=False, save_s=1.0
        ),
        mtp=replace(recipe.mtp, seconds=2.0, batch=4, sequence=64),
        regenerate=replace(
            recipe.regenerate,
            seconds=1.0,
            new_tokens=32,
            prompt=64,
            batch=16,
            others=((8, 8), (96, 8)),
        ),
        distill=replace(
            recipe.distill, seconds=3.0, batch=4, anchors=8, save_s=1.0, compile=version == 2
        ),
        evaluate=replace(
            recipe.evaluate, new_tokens=32, max_prompt=96, contexts=(32, 96), files=3, windows=8
        ),
    )


@torch.no_grad()
def check_decoding(recipe: Recipe, work: WorkFolder) -> None:
    """What the target writes step by step must be its best ids of one pass over it.

    Raises:
        ModelMismatch: more than a few ids differ (equal scores round differently).
    """
    device = pick_device()
    torch.set_float32_matmul_precision("highest")
    net = read_target(recipe.target, work.target).to(device).eval()
    ids = torch.from_numpy(np.load(work.tokens("train"))[: 8 * 80].astype(np.int64))
    rows = generate(net, ids.view(8, 80).to(device), 140, torch.zeros(8, device=device))
    best = net.logits(net(rows).hidden).argmax(-1)
    share = (rows[:, 80:] == best[:, 79:-1]).float().mean().item()
    print(f"decoding agrees with one pass in {100 * share:.2f} % of the ids", flush=True)
    if share < 0.97:
        raise ModelMismatch(
            f"decoded ids agree with one pass in {share:.3f} of the places; at least 0.97 must"
        )
