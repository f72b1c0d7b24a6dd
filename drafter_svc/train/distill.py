"""Train the drafter on the target's own text.

Owns anchors, labels, losses and the loop. The target is frozen: its taps and its best next ids
are computed once for all rows and kept on the device, so a step costs the drafter alone.

Source: slot weights and labels by the DFlash paper; the selector's loss is the K-way cross entropy
over the unary candidates with the true predecessor, gold put in at the last place when absent.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from drafter_svc.train.drafter_net import DrafterNet, start_weights, tap_layers
from drafter_svc.train.export import read_drafter, read_target, write_drafter
from drafter_svc.train.files import Meter, WorkFolder, pick_device
from drafter_svc.train.optim import Optimiser, schedule
from drafter_svc.train.recipe import DrafterDims, Recipe
from drafter_svc.train.target_net import TargetNet


@dataclass(slots=True)
class Lessons:
    """Rows with what the frozen target says about them, on the device."""

    ids: Tensor  # int16 [R, L]
    taps: Tensor  # [R, L, T*H], position by position
    best: Tensor  # int16 [R, L], the target's choice for the next position


@torch.no_grad()
def read_lessons(net: TargetNet, rows: np.ndarray, layers: list[int], part: int = 64) -> Lessons:
    """Run the target once over rows uint16 [R, L]."""
    device = net.embed_tokens.weight.device
    half = device.type == "cuda"
    dtype = torch.bfloat16 if half else torch.float32
    ids = torch.from_numpy(rows.astype(np.int16)).to(device)
    width = len(layers) * net.dims.hidden_size
    taps = torch.empty(*ids.shape, width, dtype=dtype, device=device)
    best = torch.empty_like(ids)
    with torch.autocast(device.type, torch.bfloat16, enabled=half):
        for start in range(0, len(ids), part):
            out = net(ids[start : start + part].long(), taps=layers, dtype=dtype)
            taps[start : start + part] = torch.cat(out.taps, -1)
            best[start : start + part] = net.logits(out.hidden).argmax(-1).to(torch.int16)
    return Lessons(ids, taps, best)


def slot_losses(
    drafter: DrafterNet, h: Tensor, head: Tensor, labels: Tensor, previous: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses of the slots of many blocks.

    Args:
        drafter: for its selector.
        h: [B, N, K - 1, H] hidden rows of the slots.
        head: [V, H], the target's.
        labels: int64 [B, N, K - 1], the target's choice at each slot's position.
        previous: int64 [B, N, K - 1], the true id before each slot.
        weights: float32 [K - 1].

    Returns:
        Unary loss, selector loss (0 for version 1), hits bool [B, N, K - 1].
    """
    logits = functional.linear(h, head.to(h.dtype)).float()
    unary = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    unary = (unary.view(labels.shape) * weights).mean()
    if drafter.dims.version == 1:
        return unary, unary.new_zeros(()), logits.argmax(-1) == labels
    values, candidates = logits.topk(drafter.dims.selector_top_k, -1)
    found = candidates == labels[..., None]
    absent = ~found.any(-1)
    last = torch.where(absent, labels, candidates[..., -1])
    candidates = torch.cat([candidates[..., :-1], last[..., None]], -1)
    gold = logits.gather(-1, labels[..., None])
    values = torch.cat(
        [values[..., :-1], torch.where(absent[..., None], gold, values[..., -1:])], -1
    )
    place = torch.where(absent, candidates.shape[-1] - 1, found.int().argmax(-1))
    scores = drafter.candidate_selector.scores(h, values, candidates, previous)
    selector = functional.cross_entropy(scores.flatten(0, -2), place.flatten(), reduction="none")
    selector = (selector.view(labels.shape) * weights).mean()
    return unary, selector, (scores.argmax(-1) == place) & ~absent


class AnchorDraw:
    """Draws rows, and sorted anchors among the positions that the target wrote."""

    def __init__(self, lessons: Lessons, first: int, block: int, seed: int):
        self.lessons, self.first, self.block = lessons, first, block
        self.generator = torch.Generator(device=lessons.ids.device).manual_seed(seed)

    def draw(self, batch: int, anchors: int) -> tuple[Tensor, ...]:
        """Taps, anchors, their ids, labels and previous ids of a batch of blocks."""
        ids, device = self.lessons.ids, self.lessons.ids.device
        rows = torch.randint(0, len(ids), (batch,), generator=self.generator, device=device)
        span = ids.shape[1] - self.block - self.first
        keys = torch.rand(batch, span, generator=self.generator, device=device)
        where = keys.topk(min(anchors, span), -1).indices.sort(-1).values + self.first
        slots = where[..., None] + torch.arange(1, self.block, device=device)
        flat = (slots - 1).flatten(1)
        picked, best = ids[rows].long(), self.lessons.best[rows].long()
        labels = best.gather(1, flat).view(slots.shape)
        previous = picked.gather(1, flat).view(slots.shape)
        return self.lessons.taps[rows], where, picked.gather(1, where), labels, previous


def slot_weights(dims: DrafterDims, decay: float, device: torch.device) -> Tensor:
    """float32 [K - 1]: early slots matter more, since a miss ends the block."""
    return torch.exp(-torch.arange(dims.block_size - 1, device=device) / decay)


def _losses(
    drafter: DrafterNet,
    batch: tuple[Tensor, ...],
    head: Tensor,
    weights: Tensor,
    loss_of: Callable[..., tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    taps, where, ids, labels, previous = batch
    half = taps.device.type == "cuda"
    with torch.autocast(taps.device.type, torch.bfloat16, enabled=half):
        h = drafter(taps, where, ids, head)[:, :, 1:]
        return loss_of(drafter, h, head, labels, previous, weights)


def _say(meter: Meter, step: int, unary: Tensor, selector: Tensor, hits: Tensor) -> float:
    hits = hits.float().flatten(0, -2)
    length = 1 + hits.cumprod(-1).sum(-1).mean().item()
    slots = " ".join(f"{x:.2f}" for x in hits.mean(0).tolist())
    print(
        f"{meter.elapsed():.0f} s step {step} unary {unary.item():.3f} selector "
        f"{selector.item():.3f} length {length:.3f} slots {slots}",
        flush=True,
    )
    return length


class Lesson:
    """One training run: the frozen target's head, the drafter, and where its blocks come from."""

    def __init__(self, recipe: Recipe, work: WorkFolder, device: torch.device) -> None:
        self.plan, self.device = recipe.distill, device
        target = read_target(recipe.target, work.target).to(device).eval().requires_grad_(False)
        rows = np.load(work.regenerated)["rows"]
        layers = tap_layers(recipe.target.num_hidden_layers, recipe.drafter.num_taps)
        lessons = read_lessons(target, rows, layers)
        self.head = target.embed_tokens.weight.detach()
        if self.plan.warm_start and work.drafter.exists():
            self.drafter = read_drafter(recipe.drafter, recipe.target, work.drafter)
        else:
            self.drafter = DrafterNet(recipe.drafter, recipe.target)
            start_weights(self.drafter, recipe.seed + 4)
        self.drafter.to(device)
        first, block = recipe.regenerate.prompt, recipe.drafter.block_size
        self.draws = AnchorDraw(lessons, first, block, recipe.seed + 5)
        self.weights = slot_weights(recipe.drafter, self.plan.slot_decay, device)
        self.loss_of: Callable[..., tuple[Tensor, ...]] = slot_losses

    def compile(self) -> None:
        """Compile and run every part once; parts that cannot be compiled stay eager."""
        torch._dynamo.config.suppress_errors = True
        for layer in self.drafter.layers:
            layer.compile(dynamic=False)
        self.loss_of = torch.compile(slot_losses, dynamic=False)
        for _ in range(2):
            self.backward()
        self.drafter.zero_grad(set_to_none=True)
        torch.cuda.synchronize()

    def backward(self) -> tuple[Tensor, ...]:
        """Losses of fresh blocks, with gradients; also their hits."""
        batch = self.draws.draw(self.plan.batch, self.plan.anchors)
        unary, selector, hits = _losses(self.drafter, batch, self.head, self.weights, self.loss_of)
        (unary + self.plan.selector_weight * selector).backward()
        return unary, selector, hits


def train_drafter(recipe: Recipe, work: WorkFolder) -> None:
    """Train for `distill.seconds` and write the drafter."""
    plan, device, total = recipe.distill, pick_device(), Meter()
    lesson = Lesson(recipe, work, device)
    if plan.compile and device.type == "cuda":
        lesson.compile()
    print(f"ready after {total.elapsed():.0f} s", flush=True)
    seconds = min(plan.seconds, plan.total_seconds - total.elapsed())
    optimiser = Optimiser(lesson.drafter, plan.muon_lr, plan.adam_lr, plan.weight_decay)
    meter, step, length = Meter(), 0, 0.0
    while meter.elapsed() < seconds:
        losses = lesson.backward()
        rate = schedule(meter.elapsed() / seconds, plan.warmup, plan.decay)
        optimiser.step(rate, plan.clip)
        step += 1
        if meter.due() or step == 1:
            length = _say(meter, step, *losses)
    write_drafter(lesson.drafter, recipe.target, work.drafter)
    work.note(
        "drafter",
        {
            "version": recipe.drafter.version,
            "steps": step,
            "blocks": step * plan.batch * plan.anchors,
            "seconds": round(meter.elapsed(), 1),
            "last_length": round(length, 3),
            "parameters": sum(p.numel() for p in lesson.drafter.parameters()),
        },
    )
