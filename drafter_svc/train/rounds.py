"""Count what a drafter would have had accepted in text that the target wrote greedily.

Owns rounds, their split into novel and copied, prompt lookup for comparison. Knows token ids only.
A round is copied if the three ids that end at its anchor occurred before, else novel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

DraftAt = Callable[[int], Sequence[int]]  # drafts after an anchor


@dataclass(slots=True)
class Rounds:
    """Lengths (accepted + bonus) of the rounds of one drafter, their kind and their anchors."""

    lengths: list[int] = field(default_factory=list)
    novel: list[bool] = field(default_factory=list)
    anchors: list[int] = field(default_factory=list)

    def add(self, length: int, novel: bool, anchor: int = 0) -> None:
        """Count one round."""
        self.lengths.append(length)
        self.novel.append(novel)
        self.anchors.append(anchor)

    def extend(self, other: "Rounds") -> None:
        """Count the rounds of another text too."""
        self.lengths += other.lengths
        self.novel += other.novel
        self.anchors += other.anchors

    def mean(self) -> float:
        """Mean length; 0 without a round."""
        return float(np.mean(self.lengths)) if self.lengths else 0.0

    def summary(self, block: int) -> dict[str, Any]:
        """Mean lengths over all, novel and copied rounds, and what happened by length and slot.

        `histogram` counts rounds by length; `by_slot` is P(slot accepted | those before it were).
        """
        lengths, novel = np.array(self.lengths, int), np.array(self.novel, bool)
        means = {"all": lengths, "novel": lengths[novel], "copied": lengths[~novel]}
        out: dict[str, Any] = {
            name: round(float(x.mean()), 3) if len(x) else 0.0 for name, x in means.items()
        }
        out |= {"rounds": len(lengths), "novel_rounds": int(novel.sum())}
        counts = np.bincount(lengths, minlength=block + 1)[1:]
        reached = counts[::-1].cumsum()[::-1]
        out["histogram"] = counts.tolist()
        out["by_slot"] = np.round(reached[1:] / np.maximum(1, reached[:-1]), 3).tolist()
        return out


def lookup(ids: Sequence[int], anchor: int, count: int) -> list[int]:
    """Prompt lookup: what followed the latest earlier occurrence of the last 4, 3 or 2 ids."""
    for size in (4, 3, 2):
        gram = list(ids[anchor - size + 1 : anchor + 1])
        for start in range(anchor - size, -1, -1):
            if list(ids[start : start + size]) == gram:
                return list(ids[start + size : min(start + size + count, anchor + 1)])
    return []


def agreed(drafts: Sequence[int], truth: Sequence[int]) -> int:
    """Leading drafts that equal the truth."""
    for index, draft in enumerate(drafts):
        if index >= len(truth) or draft != truth[index]:
            return index
    return len(drafts)


def replay(ids: Sequence[int], prompt: int, block: int, draft_at: DraftAt) -> Rounds:
    """Jump through one text of which `prompt` ids were given; whole blocks only."""
    rounds, anchor, drafts = Rounds(), prompt, block - 1
    firsts: dict[tuple[int, ...], int] = {}
    for start in range(len(ids) - 2):
        firsts.setdefault(tuple(ids[start : start + 3]), start)
    while anchor + drafts < len(ids):  # so no round is cut by the end
        taken = agreed(draft_at(anchor), ids[anchor + 1 : anchor + block])
        novel = firsts[tuple(ids[anchor - 2 : anchor + 1])] == anchor - 2
        rounds.add(taken + 1, novel, anchor)
        anchor += taken + 1
    return rounds


def beside(ids: Sequence[int], rounds: Rounds, block: int, draft_at: DraftAt) -> Rounds:
    """Ask another drafter in the same rounds, without moving on by what it gets right."""
    other = Rounds()
    for anchor, novel in zip(rounds.anchors, rounds.novel, strict=True):
        taken = agreed(draft_at(anchor), ids[anchor + 1 : anchor + block])
        other.add(taken + 1, novel, anchor)
    return other
