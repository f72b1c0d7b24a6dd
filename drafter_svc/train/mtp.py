"""Train the MTP head on the frozen target, for a given time.

Owns the loop and the loss of its chain. Labels are the target's own choices. Link d + 1 starts from
the streams of link d in training too, so that the head meets its own output before it is served.
"""

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter_svc.train.export import MTP, bfloat16_tensors, read_target
from drafter_svc.train.files import Meter, Progress, WorkFolder, pick_device, write_whole
from drafter_svc.train.mtp_net import MtpHead, start_from_target
from drafter_svc.train.optim import Optimiser, schedule
from drafter_svc.train.pretrain import Windows, next_token_loss
from drafter_svc.train.recipe import MtpPlan, Recipe, TargetDims
from drafter_svc.train.target_net import TargetNet


def chain_losses(
    head: MtpHead, target: TargetNet, ids: Tensor, depth: int
) -> tuple[list[Tensor], Tensor]:
    """Losses of links 1..depth over ids int64 [B, T], and the indexer's loss of the first link."""
    half = ids.device.type == "cuda"
    dtype = torch.bfloat16 if half else torch.float32
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=half):
        with torch.no_grad():
            out = target(ids, dtype=dtype)
            best = target.logits(out.hidden).argmax(-1)
            embedded = target.embed_tokens(ids).to(dtype)
        streams, losses, lesson = out.streams, [], best.new_zeros(())
        for link in range(1, depth + 1):
            # row j now holds the streams that precede the token at position j + link
            streams, taught = head(embedded[:, link:], streams[:, :-1])
            lesson = taught if link == 1 else lesson
            hidden = head.read(streams)
            losses.append(next_token_loss(hidden, target.embed_tokens.weight, best[:, link:]))
    return losses, lesson


def train_mtp(recipe: Recipe, work: WorkFolder) -> None:
    """Train for `mtp.seconds` and write the head's tensors."""
    if work.mtp.exists():
        print("mtp: the head is there", flush=True)
        return
    plan, device, total = recipe.mtp, pick_device(), Meter()
    target = read_target(recipe.target, work.target).to(device).eval().requires_grad_(False)
    head = MtpHead(recipe.target)
    start_from_target(head, target, recipe.seed + 6)
    head.to(device)
    head.layers[0].self_attn.teach = True
    windows = Windows(np.load(work.tokens("train")), device, recipe.seed + 7)
    progress = Progress("mtp", plan.seconds, work.checkpoint("mtp"), save_s=1e9)
    losses = _loop(head, target, windows, plan, progress)
    write_mtp(head, work)
    named = {f"loss_{i + 1}": round(x.item(), 4) for i, x in enumerate(losses)}
    size = sum(p.numel() for p in head.parameters())
    clock = {"seconds": round(progress.elapsed(), 1), "stage_seconds": round(total.elapsed(), 1)}
    work.note("mtp", {"steps": progress.step, "parameters": size} | clock | named)


def _loop(
    head: MtpHead, target: TargetNet, windows: Windows, plan: MtpPlan, progress: Progress
) -> list[Tensor]:
    optimiser = Optimiser(head, plan.muon_lr, plan.adam_lr, plan.weight_decay)
    losses: list[Tensor] = []
    while not losses or progress.elapsed() < progress.seconds:
        ids = windows.draw(plan.batch, plan.sequence)
        losses, lesson = chain_losses(head, target, ids, plan.depth)
        weighted = sum(plan.depth_weight**i * loss for i, loss in enumerate(losses))
        (weighted + lesson).backward()
        optimiser.step(schedule(progress.done, plan.warmup, plan.decay), plan.clip)
        progress.step += 1
        if progress.meter.due() or progress.step == 1:
            progress.say("loss " + " ".join(f"{loss.item():.3f}" for loss in losses))
    return losses


def write_mtp(head: MtpHead, work: WorkFolder) -> None:
    """Write the head's tensors as they will stand in the target's checkpoint."""
    tensors = bfloat16_tensors(head, MTP)
    write_whole(work.mtp, lambda path: save_file(tensors, path, {"format": "pt"}))


def read_mtp(dims: TargetDims, work: WorkFolder) -> MtpHead:
    """Read what `write_mtp` wrote, as float32."""
    head = MtpHead(dims)
    state = {n.removeprefix(MTP): t.float() for n, t in load_file(work.mtp).items()}
    head.load_state_dict(state)
    return head
