"""What the frozen target says about the text it wrote, and blocks drawn from it.

Owns taps, labels and anchors on the device. Does not know the drafter's network or losses.
Every row is cut to one width: the window before the written part, and that part. A row with less
before it starts below position 0; what stands there is masked.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from drafter_svc.train.target_net import TargetNet


@dataclass(slots=True)
class Lessons:
    """Rows with what the frozen target says about them, on the device."""

    ids: Tensor  # int16 [R, C]
    taps: Tensor  # [R, C, T*H], position by position
    best: Tensor  # int16 [R, C], the target's choice for the next position
    first: Tensor  # int64 [R], position of column 0; below 0 in short rows

    def fill(self, start: int, ids: Tensor, taps: Tensor, best: Tensor) -> None:
        """Put whole rows of the target's [P, L, ..] at row `start`, their ends aligned."""
        stop, width = start + len(ids), self.ids.shape[1]
        kept = min(width, ids.shape[1])
        self.ids[start:stop, width - kept :] = ids[:, -kept:].to(torch.int16)
        self.taps[start:stop, width - kept :] = taps[:, -kept:]
        self.best[start:stop, width - kept :] = best[:, -kept:].to(torch.int16)
        self.first[start:stop] = ids.shape[1] - width


def blank_lessons(rows: int, width: int, taps: int, device: torch.device) -> Lessons:
    """Lessons of the right shape, all zeros."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    small = {"dtype": torch.int16, "device": device}
    return Lessons(
        torch.zeros(rows, width, **small),
        torch.zeros(rows, width, taps, dtype=dtype, device=device),
        torch.zeros(rows, width, **small),
        torch.zeros(rows, dtype=torch.int64, device=device),
    )


def load_rows(path: Path, limit: int) -> list[np.ndarray]:
    """The regenerated rows uint16 [N, L] by length, at most about `limit`, all kinds alike."""
    with np.load(path) as file:
        kinds = [file[name] for name in sorted(file.files)]
    share = min(1.0, limit / sum(len(rows) for rows in kinds))
    return [rows[: max(1, int(share * len(rows)))] for rows in kinds]


@torch.no_grad()
def read_lessons(
    net: TargetNet, kinds: list[np.ndarray], layers: list[int], width: int, part: int = 131072
) -> Lessons:
    """Run the target once over rows uint16 [N, L] of several lengths, `part` tokens at a time."""
    device = net.embed_tokens.weight.device
    half = device.type == "cuda"
    dtype = torch.bfloat16 if half else torch.float32
    total = sum(len(rows) for rows in kinds)
    lessons = blank_lessons(total, width, len(layers) * net.dims.hidden_size, device)
    at = 0
    with torch.autocast(device.type, torch.bfloat16, enabled=half):
        for rows in kinds:
            for some in np.array_split(rows, -(-rows.size // part)):
                ids = torch.from_numpy(some.astype(np.int64)).to(device)
                out = net(ids, taps=layers, dtype=dtype)
                best = net.logits(out.hidden[:, -width:]).argmax(-1)
                lessons.fill(at, ids, torch.cat([t[:, -width:] for t in out.taps], -1), best)
                at += len(ids)
    return lessons


class AnchorDraw:
    """Draws rows, and sorted anchors among the last `written` positions of each."""

    def __init__(self, lessons: Lessons, written: int, block: int, seed: int):
        self.lessons, self.written, self.block = lessons, written, block
        self.generator = torch.Generator(device=lessons.ids.device).manual_seed(seed)

    def draw(self, batch: int, anchors: int) -> tuple[Tensor, ...]:
        """Taps, first positions, anchors' positions and ids, labels, previous ids of blocks."""
        lessons, device = self.lessons, self.lessons.ids.device
        rows = torch.randint(0, len(lessons.ids), (batch,), generator=self.generator, device=device)
        span = self.written - self.block + 1
        keys = torch.rand(batch, span, generator=self.generator, device=device)
        start = lessons.ids.shape[1] - self.written
        where = keys.topk(min(anchors, span), -1).indices.sort(-1).values + start
        slots = where[..., None] + torch.arange(1, self.block, device=device)
        flat = (slots - 1).flatten(1)
        picked, best = lessons.ids[rows].long(), lessons.best[rows].long()
        labels = best.gather(1, flat).view(slots.shape)
        previous = picked.gather(1, flat).view(slots.shape)
        first = lessons.first[rows]
        positions = where + first[:, None]
        return lessons.taps[rows], first, positions, picked.gather(1, where), labels, previous
