"""Where each stage keeps its files, and what device it runs on.

Owns paths inside one work folder. Every stage reads what the one before wrote, so a run can be
taken up at any stage.
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class WorkFolder:
    """Paths of one run."""

    root: Path

    @property
    def pair(self) -> Path:
        """The published files: `target/` and `drafter/`."""
        return self.root / "pair"

    @property
    def target(self) -> Path:
        """The target's checkpoint."""
        return self.pair / "target"

    @property
    def drafter(self) -> Path:
        """The drafter's checkpoint."""
        return self.pair / "drafter"

    @property
    def tokenizer(self) -> Path:
        """The vocabulary, beside the target's weights."""
        return self.target / "tokenizer.json"

    def tokens(self, part: str) -> Path:
        """Flat uint16 ids of `train` or `validation`."""
        return self.root / f"{part}.npy"

    @property
    def regenerated(self) -> Path:
        """Rows written by the target."""
        return self.root / "regenerated.npz"

    @property
    def report(self) -> Path:
        """All numbers, one object per stage."""
        return self.root / "report.json"

    def note(self, stage: str, values: dict[str, Any]) -> None:
        """Add a stage's numbers to the report and print them."""
        report = json.loads(self.report.read_text()) if self.report.exists() else {}
        report[stage] = values
        self.report.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        short = {k: v for k, v in values.items() if not isinstance(v, list)}
        print(f"{stage}: {json.dumps(short)}", flush=True)


def pick_device() -> torch.device:
    """CUDA where there is one; float32 products there may use TF32."""
    torch.set_float32_matmul_precision("high")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def save_tokens(path: Path, ids: np.ndarray) -> None:
    """Write a flat array of ids."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, ids)


class Meter:
    """Prints a line at most every `every` seconds."""

    def __init__(self, every: float = 10.0):
        self.every, self.start = every, time.monotonic()
        self.last = self.start

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    def due(self) -> bool:
        """Whether a line may be printed now."""
        now = time.monotonic()
        if now - self.last < self.every:
            return False
        self.last = now
        return True


def workers() -> int:
    """Processes for reading files."""
    return max(1, os.cpu_count() or 1)
