"""Train the target on the corpus, for a given time.

Owns the training loop. Does not know where tokens come from.
Layers are compiled one kind at a time, so that eight layers cost two compilations. Attention is
dense first and keeps to the indexers' choice later; the indexers learn from both.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from drafter_svc.train.export import write_target
from drafter_svc.train.files import Meter, Progress, WorkFolder, pick_device, wait_for
from drafter_svc.train.optim import Optimiser, schedule
from drafter_svc.train.recipe import PretrainPlan, Recipe
from drafter_svc.train.target_net import TargetNet, start_weights


def compile_parts(net: TargetNet) -> None:
    """Compile every layer in place; layers of one kind share the compiled code."""
    torch._dynamo.config.suppress_errors = True  # a part that cannot be compiled runs eagerly
    torch._dynamo.config.cache_size_limit = 64
    for index, layer in enumerate(net.layers):
        layer.compile(dynamic=False)
        if index + 1 in net.dims.ple_layer_ids:
            layer.ple.compile(dynamic=False)
    net.hyper_connection_mixer.compile(dynamic=False)


def next_token_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of labels int64 [B, T] under hidden [B, T, H] and the tied head."""
    logits = functional.linear(hidden, weight.to(hidden.dtype)).float()
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Windows:
    """Random windows of a flat token array that lives on the device."""

    def __init__(self, ids: np.ndarray, device: torch.device, seed: int, eos: int = 0):
        self.ids = torch.from_numpy(ids.astype(np.int16)).to(device)
        self.starts = torch.from_numpy(np.flatnonzero(ids[:-1] == eos) + 1)
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, batch: int, length: int, from_start: float = 0.0) -> Tensor:
        """Ids int64 [batch, length]; a share of the rows begins where a document begins."""
        top = len(self.ids) - length
        starts = torch.randint(0, top, (batch,), generator=self.generator)
        count = int(from_start * batch)
        fitting = self.starts[self.starts < top]
        if count and len(fitting):
            pick = torch.randint(0, len(fitting), (count,), generator=self.generator)
            starts[:count] = fitting[pick]
        rows = starts.to(self.ids.device)[:, None] + torch.arange(length, device=self.ids.device)
        return self.ids[rows].long()


class Pretraining:
    """The net, its losses, and what compiles them."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.plan, self.device = recipe.pretrain, device
        self.net = TargetNet(recipe.target)
        start_weights(self.net, recipe.seed)
        self.net.to(device)
        self.net.select(sparse=False, teach=True)
        self.loss_of: Callable[..., Tensor] = next_token_loss

    def backward(self, ids: Tensor) -> dict[str, Tensor]:
        """Losses of ids int64 [B, T + 1], with gradients."""
        half = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            out = self.net(ids[:, :-1], dtype=torch.bfloat16 if half else torch.float32)
            loss = self.loss_of(out.hidden, self.net.embed_tokens.weight, ids[:, 1:])
        layers, indexers = len(self.net.layers), max(1, len(self.net.attention()))
        balance, lesson = out.balance / layers, out.lesson / indexers
        plan = self.plan
        (loss + plan.balance_loss * balance + plan.index_loss * lesson).backward()
        return {"loss": loss, "balance": balance, "indexer": lesson}

    def compile(self) -> None:
        """Compile and run both kinds of attention once, on made-up ids."""
        compile_parts(self.net)
        self.loss_of = torch.compile(next_token_loss, dynamic=False)
        shape = (self.plan.batch, self.plan.sequence + 1)
        ids = torch.randint(2, self.net.dims.vocab_size, shape, device=self.device)
        for sparse in (True, False):
            self.net.select(sparse=sparse, teach=True)
            for _ in range(2):
                self.backward(ids)
        torch.cuda.synchronize()
        self.net.zero_grad(set_to_none=True)

    def note(self, progress: Progress, losses: dict[str, Tensor], took: float) -> dict[str, float]:
        """Numbers for the report."""
        tokens = progress.step * self.plan.batch * self.plan.sequence
        named = {name: round(value.item(), 4) for name, value in losses.items()}
        size = sum(p.numel() for p in self.net.parameters())
        clock = {"seconds": round(progress.elapsed(), 1), "stage_seconds": round(took, 1)}
        return {"steps": progress.step, "tokens": tokens, "parameters": size} | clock | named


def pretrain(recipe: Recipe, work: WorkFolder) -> None:
    """Train for `pretrain.seconds` and write the target; goes on where it was killed."""
    if work.target_config.exists():
        print("pretrain: the target is there", flush=True)
        return
    plan, device, total = recipe.pretrain, pick_device(), Meter()
    training = Pretraining(recipe, device)
    if plan.compile and device.type == "cuda":
        training.compile()
    print(f"pretrain ready after {total.elapsed():.0f} s", flush=True)
    wait_for(work.tokens("train"), plan.wait_s)
    train = Windows(np.load(work.tokens("train")), device, recipe.seed + 1)
    seconds = max(1.0, min(plan.seconds, plan.total_seconds - total.elapsed()))
    progress = Progress("pretrain", seconds, work.checkpoint("pretrain"), plan.save_s)
    losses = _loop(training, train, plan, progress)
    write_target(training.net, work.target)
    values = training.note(progress, losses, total.elapsed())
    work.note("pretrain", {"seed": recipe.seed} | values)
    progress.finish()


def _loop(
    training: Pretraining, train: Windows, plan: PretrainPlan, progress: Progress
) -> dict[str, Tensor]:
    optimiser = Optimiser(training.net, plan.muon_lr, plan.adam_lr, plan.weight_decay)
    saved = progress.resume(training.device)
    if saved is not None:
        training.net.load_state_dict(saved["net"])
        optimiser.restore(saved["optimiser"])
        train.generator.set_state(saved["generator"].cpu())
    progress.start()
    losses: dict[str, Tensor] = {}
    while not losses or progress.elapsed() < progress.seconds:
        training.net.select(sparse=progress.done >= plan.sparse_from, teach=True)
        rate = schedule(progress.done, plan.warmup, plan.decay)
        losses = training.backward(train.draw(plan.batch, plan.sequence + 1))
        norm = optimiser.step(rate, plan.clip)
        progress.step += 1
        if progress.meter.due() or progress.step == 1:
            _say(progress, losses, norm, rate, plan)
        progress.save_if_due(
            lambda: {
                "net": training.net.state_dict(),
                "optimiser": optimiser.state(),
                "generator": train.generator.get_state(),
            }
        )
    return losses


def _say(
    progress: Progress, losses: dict[str, Tensor], norm: Tensor, rate: float, plan: PretrainPlan
) -> None:
    speed = progress.step * plan.batch * plan.sequence / max(progress.elapsed(), 1e-9)
    named = " ".join(f"{name} {value.item():.3f}" for name, value in losses.items())
    kind = "sparse" if progress.done >= plan.sparse_from else "dense"
    progress.say(f"{named} norm {norm.item():.2f} lr x{rate:.2f} {kind} {speed:.0f} tok/s")
