"""Train the target on the corpus, for a given time.

Owns the training loop and the held-out loss. Does not know where tokens come from.
Layers are compiled one kind at a time, so that eight layers cost two compilations.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from drafter_svc.train.export import read_target, write_target
from drafter_svc.train.files import Meter, WorkFolder, pick_device
from drafter_svc.train.optim import Optimiser, schedule
from drafter_svc.train.recipe import Recipe
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

    def __init__(self, ids: np.ndarray, device: torch.device, seed: int):
        self.ids = torch.from_numpy(ids.astype(np.int16)).to(device)
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, batch: int, length: int) -> Tensor:
        """Ids int64 [batch, length]."""
        top = len(self.ids) - length
        starts = torch.randint(0, top, (batch,), generator=self.generator).to(self.ids.device)
        rows = starts[:, None] + torch.arange(length, device=self.ids.device)
        return self.ids[rows].long()


def _loss_parts(
    net: TargetNet, ids: Tensor, loss_of: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    half = ids.device.type == "cuda"
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=half):
        out = net(ids[:, :-1], dtype=torch.bfloat16 if half else torch.float32)
        loss = loss_of(out.hidden, net.embed_tokens.weight, ids[:, 1:])
    return loss, out.balance / len(net.layers)


def fresh_target(recipe: Recipe, device: torch.device) -> TargetNet:
    """A target at its start; the indexers are frozen, since nothing trains them."""
    net = TargetNet(recipe.target)
    start_weights(net, recipe.seed)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("indexer" not in name)
    return net.to(device)


def _compiled_loss(
    net: TargetNet, train: Windows, batch: int, sequence: int
) -> Callable[..., Tensor]:
    compile_parts(net)
    loss_of = torch.compile(next_token_loss, dynamic=False)
    for _ in range(2):  # compile before the clock of the schedule starts
        loss, balance = _loss_parts(net, train.draw(batch, sequence + 1), loss_of)
        (loss + balance).backward()
    torch.cuda.synchronize()
    net.zero_grad(set_to_none=True)
    return loss_of


def pretrain(recipe: Recipe, work: WorkFolder) -> None:
    """Train for `pretrain.seconds` and write the target."""
    plan, device, meter = recipe.pretrain, pick_device(), Meter()
    train = Windows(np.load(work.tokens("train")), device, recipe.seed + 1)
    net, loss_of = fresh_target(recipe, device), next_token_loss
    if plan.compile and device.type == "cuda":
        loss_of = _compiled_loss(net, train, plan.batch, plan.sequence)
    print(f"ready after {meter.elapsed():.0f} s", flush=True)
    seconds = min(plan.seconds, plan.total_seconds - meter.elapsed())
    optimiser = Optimiser(net, plan.muon_lr, plan.adam_lr, plan.weight_decay)
    meter, step, loss = Meter(), 0, torch.zeros(())
    while meter.elapsed() < seconds:
        rate = schedule(meter.elapsed() / seconds, plan.warmup, plan.decay)
        ids = train.draw(plan.batch, plan.sequence + 1)
        loss, balance = _loss_parts(net, ids, loss_of)
        (loss + plan.balance_loss * balance).backward()
        norm = optimiser.step(rate, plan.clip)
        step += 1
        if meter.due() or step == 1:
            speed = step * plan.batch * plan.sequence / meter.elapsed()
            print(
                f"{meter.elapsed():.0f} s step {step} loss {loss.item():.3f} balance "
                f"{balance.item():.2f} norm {norm.item():.2f} lr x{rate:.2f} {speed:.0f} tok/s",
                flush=True,
            )
    write_target(net, work.target)
    work.note(
        "pretrain",
        {
            "steps": step,
            "tokens": step * plan.batch * plan.sequence,
            "seconds": round(meter.elapsed(), 1),
            "last_loss": round(loss.item(), 4),
            "parameters": sum(p.numel() for p in net.parameters()),
        },
    )


@torch.no_grad()
def nats_per_token(net: TargetNet, ids: np.ndarray, sequence: int, limit: int) -> float:
    """Mean loss over consecutive windows of a flat array; a window starts with no context."""
    device = net.embed_tokens.weight.device
    count = min(limit, (len(ids) - 1) // sequence)
    if count == 0:
        return math.nan
    rows = torch.from_numpy(ids[: count * sequence + 1].astype(np.int64)).to(device)
    losses = []
    for start in range(0, count, 8):
        stop = min(count, start + 8)
        x = rows[start * sequence : stop * sequence].view(-1, sequence)
        y = rows[start * sequence + 1 : stop * sequence + 1].view(-1, sequence)
        loss = next_token_loss(net(x).hidden, net.embed_tokens.weight, y)
        losses.append(loss.item() * len(x))
    return sum(losses) / count


def validate(recipe: Recipe, work: WorkFolder, limit: int = 400) -> dict[str, float]:
    """Loss of the written target on the validation packages, with and without its table."""
    device = pick_device()
    net = read_target(recipe.target, work.target).to(device).eval()
    ids = np.load(work.tokens("validation"))
    sizes = np.load(work.root / "validation_bytes.npy")
    bytes_per_token = float(sizes[0] / len(ids))
    length = recipe.pretrain.sequence
    nats = nats_per_token(net, ids, length, limit)
    for layer in recipe.target.ple_layer_ids:
        table = net.layers[layer - 1].ple.ple_embedding.ngram_embedding
        table.weight.data.zero_()
    zeroed = nats_per_token(net, ids, length, limit)
    values = {
        "nats_per_token": nats,
        "bytes_per_token": bytes_per_token,
        "nats_per_byte": nats / bytes_per_token,
        "nats_per_byte_without_table": zeroed / bytes_per_token,
    }
    work.note("validate", {k: round(v, 4) for k, v in values.items()})
    return values
