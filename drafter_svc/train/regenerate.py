"""Let the target write the text its drafter learns from.

Owns batched decoding, the mix of temperatures and the filter of loops. Does not know drafters.
"""

import numpy as np
import torch
from torch import Tensor

from drafter_svc.train.export import read_target
from drafter_svc.train.files import Meter, WorkFolder, pick_device
from drafter_svc.train.pretrain import Windows
from drafter_svc.train.recipe import Recipe, RegeneratePlan
from drafter_svc.train.target_net import TargetNet, TargetState


def join_states(states: list[TargetState]) -> TargetState:
    """Join the states of parts of a batch into one."""
    layers = []
    for parts in zip(*(state.layers for state in states), strict=True):
        joined = {}
        for name in parts[0]:
            if name.startswith("used_"):
                joined[name] = parts[0][name]
            else:
                joined[name] = torch.cat([part[name] for part in parts])
        layers.append(joined)
    return TargetState(layers, states[0].length)


@torch.no_grad()
def generate(
    net: TargetNet, prompts: Tensor, length: int, temperatures: Tensor, part: int = 512
) -> Tensor:
    """Continue prompts int64 [B, P] to [B, length]; temperatures [B], 0 is greedy.

    Prompts are read `part` rows at a time, decoding runs on all rows at once.
    """
    device = prompts.device
    half = device.type == "cuda"
    dtype = torch.bfloat16 if half else torch.float32
    out = prompts.new_zeros(len(prompts), length)
    out[:, : prompts.shape[1]] = prompts
    with torch.autocast(device.type, torch.bfloat16, enabled=half):
        states, last = [], []
        for rows in prompts.split(part):
            state = net.new_state()
            last.append(net(rows, state=state, dtype=dtype).hidden[:, -1])
            states.append(state)
        state, hidden = join_states(states), torch.cat(last)
        states.clear()
        for position in range(prompts.shape[1], length):
            logits = net.logits(hidden)
            noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-7, 1 - 1e-7)))
            ids = (logits + temperatures[:, None] * noise).argmax(-1)
            out[:, position] = ids
            if position + 1 < length:
                hidden = net(ids[:, None], state=state, dtype=dtype).hidden[:, -1]
    return out


def loops(rows: np.ndarray, tail: int = 256, unique: float = 0.5) -> np.ndarray:
    """Which rows [N, L] repeat themselves: few of the 8-grams of their tail are unique."""
    tail = min(tail, rows.shape[1])
    ends = rows[:, -tail:].astype(np.uint64)
    count = tail - 7
    mixed = np.zeros((len(rows), count), np.uint64)
    for shift in range(8):
        mixed = mixed * np.uint64(1000003) + ends[:, shift : shift + count] + np.uint64(1)
    distinct = 1 + (np.diff(np.sort(mixed, 1), axis=1) != 0).sum(1)
    return distinct < unique * count


def keep_rows(rows: np.ndarray, greedy: np.ndarray, plan: RegeneratePlan) -> np.ndarray:
    """Drop looping rows beyond their share, the last ones first; returns the kept indices."""
    looping = loops(rows, rows.shape[1] - plan.prompt, plan.loop_unique)
    straight = np.flatnonzero(~looping)
    allowed = int(plan.max_loops / (1 - plan.max_loops) * len(straight))
    kept = np.concatenate([straight, np.flatnonzero(looping)[:allowed]])
    print(f"rows {len(rows)} looping {looping.mean():.3f} kept {len(kept)}", flush=True)
    return np.sort(kept)


def regenerate(recipe: Recipe, work: WorkFolder) -> None:
    """Write rows for `regenerate.seconds` and save them."""
    plan, device = recipe.regenerate, pick_device()
    net = read_target(recipe.target, work.target).to(device).eval()
    windows = Windows(np.load(work.tokens("train")), device, recipe.seed + 2)
    torch.manual_seed(recipe.seed + 3)
    mix = torch.tensor(plan.temperatures, device=device)
    temperatures = mix.repeat(-(-plan.batch // len(mix)))[: plan.batch]
    meter, batches, last = Meter(), [], 0.0
    while not batches or meter.elapsed() + last < plan.seconds:
        start = meter.elapsed()
        prompts = windows.draw(plan.batch, plan.prompt)
        batches.append(generate(net, prompts, plan.length, temperatures).cpu().numpy())
        last = meter.elapsed() - start
        print(f"{meter.elapsed():.0f} s: {len(batches)} batches, {last:.1f} s each", flush=True)
    rows = np.concatenate(batches).astype(np.uint16)
    greedy = np.tile(temperatures.cpu().numpy() == 0, len(batches))
    kept = keep_rows(rows, greedy, plan)
    np.savez(work.regenerated, rows=rows[kept], greedy=greedy[kept])
    tokens = len(kept) * (plan.length - plan.prompt)
    work.note(
        "regenerate",
        {
            "rows": len(kept),
            "of": len(rows),
            "written_tokens": tokens,
            "seconds": round(meter.elapsed(), 1),
        },
    )
