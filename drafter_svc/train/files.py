"""Where each stage keeps its files, what device it runs on, how it is taken up again.

Owns paths inside one work folder. Every stage reads what the one before wrote and skips what is
already there, so a run can be taken up at any stage; files appear whole or not at all.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.errors import NotReady


@dataclass(frozen=True, slots=True)
class WorkFolder:
    """Paths of one run."""

    root: Path

    @property
    def pair(self) -> Path:
        """Checkpoints: `target/` and one folder per drafter."""
        return self.root / "pair"

    @property
    def target(self) -> Path:
        """The target's checkpoint."""
        return self.pair / "target"

    @property
    def target_config(self) -> Path:
        """Written last, so a target is whole once this is there."""
        return self.target / "config.json"

    def drafter(self, version: int) -> Path:
        """A drafter's checkpoint: `drafter/` of DFlash2, `drafter-v1/` of DFlash."""
        return self.pair / ("drafter" if version == 2 else f"drafter-v{version}")

    @property
    def mtp(self) -> Path:
        """The MTP head's tensors; export puts them into the target's checkpoint."""
        return self.pair / "mtp.safetensors"

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

    def checkpoint(self, stage: str) -> Path:
        """What a stage needs to go on after it was killed."""
        return self.root / f"{stage}.resume"

    @property
    def report(self) -> Path:
        """All numbers, one object per stage."""
        return self.root / "report.json"

    def note(self, stage: str, values: dict[str, Any]) -> None:
        """Add a stage's numbers to the report and print them; stages may run side by side."""
        with (self.root / "report.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            report = self.read_report() | {stage: values}
            text = json.dumps(report, indent=1) + "\n"
            write_whole(self.report, lambda path: path.write_text(text, encoding="utf-8"))
        short = {k: v for k, v in values.items() if not isinstance(v, list)}
        print(f"{stage}: {json.dumps(short)}", flush=True)

    def read_report(self) -> dict[str, Any]:
        """The numbers so far."""
        return json.loads(self.report.read_text("utf-8")) if self.report.exists() else {}


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Call `write(temporary path)`, then move the file to its place in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"unfinished-{path.name}")
    write(unfinished)
    unfinished.chmod(0o644)
    unfinished.replace(path)


def pick_device() -> torch.device:
    """CUDA where there is one; float32 products there may use TF32."""
    torch.set_float32_matmul_precision("high")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def save_tokens(path: Path, ids: np.ndarray) -> None:
    """Write a flat array of ids."""

    def write(unfinished: Path) -> None:
        with unfinished.open("wb") as file:
            np.save(file, ids)

    write_whole(path, write)


def wait_for(path: Path, seconds: float) -> None:
    """Wait until another stage, running beside, has written a file.

    Raises:
        NotReady: it is not there in time.
    """
    meter = Meter(every=30.0)
    while not path.exists():
        if meter.elapsed() > seconds:
            raise NotReady(
                f"{str(path)!r} is not there after {seconds:.0f} s; run the stage that writes it"
            )
        if meter.due():
            print(f"waiting for {path.name}", flush=True)
        time.sleep(0.2)


class Meter:
    """Prints a line at most every `every` seconds."""

    def __init__(self, every: float = 10.0, start: float = 0.0):
        self.every, self.start = every, time.monotonic() - start
        self.last = time.monotonic()

    def elapsed(self) -> float:
        """Seconds since the start, those of an interrupted run included."""
        return time.monotonic() - self.start

    def due(self) -> bool:
        """Whether a line may be printed now."""
        now = time.monotonic()
        if now - self.last < self.every:
            return False
        self.last = now
        return True


class Progress:
    """The clock of a training loop: share done, lines to print, checkpoints to resume from."""

    def __init__(self, stage: str, seconds: float, path: Path, save_s: float):
        self.stage, self.seconds, self.path = stage, seconds, path
        self.saves, self.meter, self.step = Meter(save_s), Meter(), 0

    def resume(self, device: torch.device) -> dict[str, Any] | None:
        """What an interrupted run left, with the clock set to it."""
        if not self.path.exists():
            return None
        saved = torch.load(self.path, map_location=device, weights_only=True)
        self.seconds, self.step = saved["seconds"], saved["step"]
        self.meter = Meter(start=saved["elapsed"])
        print(f"{self.stage}: going on after step {self.step}", flush=True)
        return saved

    def start(self) -> None:
        """Start the clock, unless a resumed run has set it."""
        if self.step == 0:
            self.meter, self.saves = Meter(), Meter(self.saves.every)

    def save_if_due(self, state: Callable[[], dict[str, Any]]) -> None:
        """Write a checkpoint of `state()` every `save_s` seconds."""
        if self.saves.due():
            clock = {"step": self.step, "elapsed": self.elapsed(), "seconds": self.seconds}
            write_whole(self.path, lambda path: torch.save(state() | clock, path))

    def finish(self) -> None:
        """Forget the checkpoint: the stage's own output is there."""
        self.path.unlink(missing_ok=True)

    def elapsed(self) -> float:
        """Seconds of training so far."""
        return self.meter.elapsed()

    @property
    def done(self) -> float:
        """Share of the run, 0..1."""
        return min(1.0, self.elapsed() / self.seconds)

    def say(self, text: str) -> None:
        """Print a line of progress."""
        print(f"{self.stage} {100 * self.done:3.0f} % step {self.step} {text}", flush=True)


def workers() -> int:
    """Processes for reading files."""
    return max(1, os.cpu_count() or 1)
