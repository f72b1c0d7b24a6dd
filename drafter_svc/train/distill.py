"""Train the drafter on the target's own text.

Owns the losses and the loop. The target is frozen: its taps and its best next ids are computed once
for all rows and kept on the device, so a step costs the drafter alone.

Source: slot weights and labels by the DFlash paper; the selector's loss is the K-way cross entropy
over the unary candidates with the true predecessor, gold put in at the last place when absent.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from drafter_svc.train.drafter_net import DrafterNet, start_weights, taps_of
from drafter_svc.train.export import read_drafter, read_target, write_drafter
from drafter_svc.train.files import Meter, Progress, WorkFolder, pick_device, wait_for
from drafter_svc.train.lessons import AnchorDraw, Lessons, blank_lessons, load_rows, read_lessons
from drafter_svc.train.optim import Optimiser, schedule
from drafter_svc.train.recipe import DrafterDims, Recipe


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
    taps, first, where, ids, labels, previous = batch
    half = taps.device.type == "cuda"
    with torch.autocast(taps.device.type, torch.bfloat16, enabled=half):
        h = drafter(taps, where, ids, head, first)[:, :, 1:]
        return loss_of(drafter, h, head, labels, previous, weights)


class Lesson:
    """One training run: the frozen target's head, the drafter, and where its blocks come from."""

    def __init__(self, recipe: Recipe, work: WorkFolder, device: torch.device) -> None:
        self.recipe, self.plan, self.device = recipe, recipe.distill, device
        self.layers = taps_of(recipe.drafter, recipe.target)
        self.width = recipe.drafter.sliding_window + recipe.regenerate.new_tokens
        target = read_target(recipe.target, work.target).to(device).eval()
        self.target = target.requires_grad_(False)
        self.head = target.embed_tokens.weight.detach()
        folder = work.drafter(recipe.drafter.version)
        if self.plan.warm_start and (folder / "config.json").exists():
            self.drafter = read_drafter(recipe.drafter, recipe.target, folder)
        else:
            self.drafter = DrafterNet(recipe.drafter, recipe.target)
            start_weights(self.drafter, recipe.seed + 4)
        self.drafter.to(device)
        self.weights = slot_weights(recipe.drafter, self.plan.slot_decay, device)
        self.loss_of: Callable[..., tuple[Tensor, ...]] = slot_losses
        size = len(self.layers) * recipe.target.hidden_size
        self.study(blank_lessons(self.plan.batch, self.width, size, device))

    def study(self, lessons: Lessons) -> None:
        """Draw blocks from these lessons from now on."""
        written, block = self.recipe.regenerate.new_tokens, self.recipe.drafter.block_size
        self.draws = AnchorDraw(lessons, written, block, self.recipe.seed + 5)

    def read(self, work: WorkFolder) -> int:
        """Read the regenerated rows; how many there are."""
        kinds = load_rows(work.regenerated, self.plan.max_rows)
        self.study(read_lessons(self.target, kinds, self.layers, self.width))
        return len(self.draws.lessons.ids)

    def compile(self) -> None:
        """Compile every part on blank lessons; parts that cannot be compiled stay eager."""
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
    """Train for `distill.seconds` and write the drafter; goes on where it was killed."""
    version, total = recipe.drafter.version, Meter()
    name, folder = f"drafter v{version}", work.drafter(version)
    if (folder / "config.json").exists() and not recipe.distill.warm_start:
        print(f"{name}: it is there", flush=True)
        return
    plan, device = recipe.distill, pick_device()
    wait_for(work.target_config, plan.wait_s)
    lesson = Lesson(recipe, work, device)
    if plan.compile and device.type == "cuda":
        lesson.compile()
    print(f"{name} compiled after {total.elapsed():.0f} s", flush=True)
    wait_for(work.regenerated, plan.wait_s)
    rows = lesson.read(work)
    print(f"{name} has read {rows} rows after {total.elapsed():.0f} s", flush=True)
    seconds = max(1.0, min(plan.seconds, plan.total_seconds - total.elapsed()))
    progress = Progress(name, seconds, work.checkpoint(f"drafter-v{version}"), plan.save_s)
    last = _loop(lesson, progress)
    write_drafter(lesson.drafter, recipe.target, folder)
    blocks = progress.step * plan.batch * plan.anchors
    size = sum(p.numel() for p in lesson.drafter.parameters())
    values = {"version": version, "steps": progress.step, "blocks": blocks, "rows": rows}
    clock = {"seconds": round(progress.elapsed(), 1), "stage_seconds": round(total.elapsed(), 1)}
    work.note(f"drafter_v{version}", values | clock | {"parameters": size} | last)
    progress.finish()


def _loop(lesson: Lesson, progress: Progress) -> dict[str, float]:
    plan, drafter = lesson.plan, lesson.drafter
    optimiser = Optimiser(drafter, plan.muon_lr, plan.adam_lr, plan.weight_decay)
    saved = progress.resume(lesson.device)
    if saved is not None:
        drafter.load_state_dict(saved["net"])
        optimiser.restore(saved["optimiser"])
        lesson.draws.generator.set_state(saved["generator"].cpu())
    progress.start()
    losses: tuple[Tensor, ...] = ()
    while not losses or progress.elapsed() < progress.seconds:
        losses = lesson.backward()
        optimiser.step(schedule(progress.done, plan.warmup, plan.decay), plan.clip)
        progress.step += 1
        if progress.meter.due() or progress.step == 1:
            _say(progress, *losses)
        progress.save_if_due(
            lambda: {
                "net": drafter.state_dict(),
                "optimiser": optimiser.state(),
                "generator": lesson.draws.generator.get_state(),
            }
        )
    return _say(progress, *losses)


def _say(progress: Progress, unary: Tensor, selector: Tensor, hits: Tensor) -> dict[str, float]:
    hits = hits.float().flatten(0, -2)
    length = 1 + hits.cumprod(-1).sum(-1).mean().item()
    slots = " ".join(f"{x:.2f}" for x in hits.mean(0).tolist())
    progress.say(
        f"unary {unary.item():.3f} selector {selector.item():.3f} length {length:.3f} slots {slots}"
    )
    return {"last_length": round(length, 3), "last_unary": round(unary.item(), 4)}
