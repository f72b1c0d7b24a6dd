"""Let the target write the text its drafter learns from.

Owns the mix of prompts and temperatures and the filter of loops. Does not know drafters.
Short prompts, prompts longer than the drafter's window and prompts near the context's end are all
there, so that a drafter meets in training what it meets in serving.
"""

from pathlib import Path

import numpy as np
import torch

from drafter_svc.train.decode import generate
from drafter_svc.train.export import read_target
from drafter_svc.train.files import Meter, WorkFolder, pick_device, write_whole
from drafter_svc.train.pretrain import Windows
from drafter_svc.train.recipe import Recipe, RegeneratePlan


def loops(rows: np.ndarray, tail: int = 256, unique: float = 0.5) -> np.ndarray:
    """Which rows [N, L] repeat themselves: few of the 8-grams of their tail are unique."""
    tail = min(tail, rows.shape[1])
    ends = rows[:, -tail:].astype(np.uint64)
    count = max(1, tail - 7)
    mixed = np.zeros((len(rows), count), np.uint64)
    for shift in range(min(8, tail)):
        mixed = mixed * np.uint64(1000003) + ends[:, shift : shift + count] + np.uint64(1)
    distinct = 1 + (np.diff(np.sort(mixed, 1), axis=1) != 0).sum(1)
    return distinct < unique * count


def keep_rows(rows: np.ndarray, plan: RegeneratePlan) -> np.ndarray:
    """Drop looping rows beyond their share, the last ones first; returns the kept indices."""
    looping = loops(rows, plan.new_tokens, plan.loop_unique)
    straight = np.flatnonzero(~looping)
    allowed = int(plan.max_loops / max(1e-6, 1 - plan.max_loops) * len(straight))
    allowed = max(allowed, 1 if len(straight) == 0 else 0)
    return np.sort(np.concatenate([straight, np.flatnonzero(looping)[:allowed]]))


class Writer:
    """Writes batches and remembers what it kept, by prompt length."""

    def __init__(self, recipe: Recipe, work: WorkFolder) -> None:
        self.recipe, self.device = recipe, pick_device()
        self.net = read_target(recipe.target, work.target).to(self.device).eval()
        ids = np.load(work.tokens("train"))
        self.windows = Windows(ids, self.device, recipe.seed + 2)
        torch.manual_seed(recipe.seed + 3)
        self.kept: dict[int, list[np.ndarray]] = {}
        self.written = self.looping = 0

    def write(self, prompt: int, batch: int) -> None:
        """One batch of rows."""
        plan = self.recipe.regenerate
        mix = torch.tensor(plan.temperatures, device=self.device)
        temperatures = mix[torch.randperm(batch, device=self.device) % len(mix)]
        prompts = self.windows.draw(batch, prompt, plan.from_start)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            rows = generate(self.net, prompts, prompt + plan.new_tokens, temperatures)
        rows = rows.cpu().numpy().astype(np.uint16)
        self.written += batch
        self.looping += int(loops(rows, plan.new_tokens, plan.loop_unique).sum())
        self.kept.setdefault(prompt, []).append(rows[keep_rows(rows, plan)])


def regenerate(recipe: Recipe, work: WorkFolder) -> None:
    """Write every kind of row once, then the main kind until `regenerate.seconds` are over."""
    if work.regenerated.exists():
        print("regenerate: the rows are there", flush=True)
        return
    plan, total = recipe.regenerate, Meter()
    writer = Writer(recipe, work)
    meter, last = Meter(), 0.0
    jobs = [*plan.others, (plan.prompt, plan.batch)]
    while jobs or meter.elapsed() + last < plan.seconds:
        start = meter.elapsed()
        prompt, batch = jobs.pop(0) if jobs else (plan.prompt, plan.batch)
        writer.write(prompt, batch)
        last = meter.elapsed() - start
        done = min(100.0, 100 * meter.elapsed() / plan.seconds)
        print(f"regenerate {done:3.0f} % {batch} rows after {prompt}: {last:.1f} s", flush=True)
    rows = {f"after_{p}": np.concatenate(parts) for p, parts in writer.kept.items()}
    _save(work.regenerated, rows)
    kept = sum(len(part) for part in rows.values())
    values = {
        "rows": kept,
        "of": writer.written,
        "looping": round(writer.looping / writer.written, 3),
    }
    values |= {"written_tokens": kept * plan.new_tokens, "seconds": round(meter.elapsed(), 1)}
    work.note("regenerate", values | {"stage_seconds": round(total.elapsed(), 1)})


def _save(path: Path, rows: dict[str, np.ndarray]) -> None:
    def write(unfinished: Path) -> None:
        with unfinished.open("wb") as file:
            np.savez(file, **rows)

    write_whole(path, write)
