"""Replay greedy text offline and count what a drafter would have had accepted.

Owns the rounds, their split into novel and copied, prompt lookup for comparison. Needs no serving
loop: on text that the target itself wrote greedily, accepted drafts are those that equal it.
A round is copied if the three ids that end at its anchor occurred before, else novel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from drafter_svc.train.drafter_net import DrafterNet, tap_layers
from drafter_svc.train.export import read_drafter, read_target
from drafter_svc.train.files import WorkFolder, pick_device
from drafter_svc.train.pretrain import nats_per_token, validate
from drafter_svc.train.recipe import Recipe
from drafter_svc.train.regenerate import generate
from drafter_svc.train.target_net import TargetNet
from drafter_svc.train.tokenizer import load_tokenizer


@dataclass(slots=True)
class Rounds:
    """Lengths (accepted + bonus) of the rounds of one drafter, and their kind."""

    lengths: list[int] = field(default_factory=list)
    novel: list[bool] = field(default_factory=list)

    def add(self, length: int, novel: bool) -> None:
        """Count one round."""
        self.lengths.append(length)
        self.novel.append(novel)

    def summary(self, block: int) -> dict[str, float | int | list[int]]:
        """Mean lengths over all, novel and copied rounds, and the histogram by length."""
        lengths, novel = np.array(self.lengths), np.array(self.novel, bool)
        means = {"all": lengths, "novel": lengths[novel], "copied": lengths[~novel]}
        out: dict[str, float | int | list[int]] = {
            name: round(float(x.mean()), 3) if len(x) else 0.0 for name, x in means.items()
        }
        out |= {"rounds": len(lengths), "novel_rounds": int(novel.sum())}
        out["histogram"] = np.bincount(lengths, minlength=block + 1)[1:].tolist()
        return out


def is_novel(ids: Sequence[int], anchor: int) -> bool:
    """Whether the three ids that end at the anchor have not occurred before it."""
    gram = tuple(ids[anchor - 2 : anchor + 1])
    return all(tuple(ids[i : i + 3]) != gram for i in range(anchor - 2))


def lookup(ids: Sequence[int], anchor: int, count: int) -> list[int]:
    """Prompt lookup: what followed the latest earlier occurrence of the last 4, 3 or 2 ids."""
    for size in (4, 3, 2):
        gram = list(ids[anchor - size + 1 : anchor + 1])
        for start in range(anchor - size, -1, -1):
            if list(ids[start : start + size]) == gram:
                return list(ids[start + size : start + size + count])
    return []


def agreed(drafts: Sequence[int], truth: Sequence[int]) -> int:
    """Leading drafts that equal the truth."""
    for index, draft in enumerate(drafts):
        if index >= len(truth) or draft != truth[index]:
            return index
    return len(drafts)


@torch.no_grad()
def draft_everywhere(
    target: TargetNet, drafter: DrafterNet, ids: Tensor, first: int, part: int = 32
) -> np.ndarray:
    """Drafts at every anchor first .. T - 1 of ids int64 [1, T]: [T - first, K - 1]."""
    layers = tap_layers(target.dims.num_hidden_layers, drafter.dims.num_taps)
    taps = torch.cat(target(ids, taps=layers).taps, -1)
    head = target.embed_tokens.weight
    out = []
    for anchors in torch.arange(first, ids.shape[1], device=ids.device).split(part):
        h = drafter(taps, anchors[None], ids[:, anchors], head)[:, :, 1:]
        out.append(drafter.walk(h, target.logits(h), ids[:, anchors])[0][0])
    return torch.cat(out).cpu().numpy()


def replay(ids: list[int], prompt: int, drafts: np.ndarray, ours: Rounds, copies: Rounds) -> None:
    """Jump through one text; prompt lookup is asked in the same rounds, without moving on."""
    anchor, gamma = prompt, drafts.shape[1]
    while anchor + gamma < len(ids):  # whole blocks only, so no round is cut by the end
        truth, novel = ids[anchor + 1 : anchor + 1 + gamma], is_novel(ids, anchor)
        taken = agreed(drafts[anchor - prompt].tolist(), truth)
        ours.add(taken + 1, novel)
        copies.add(agreed(lookup(ids, anchor, gamma), truth) + 1, novel)
        anchor += taken + 1


def greedy_texts(
    recipe: Recipe, target: TargetNet, tokenizer_path: Path
) -> dict[str, tuple[list[int], int]]:
    """Prompt plus greedy continuation of every held-out file, and the prompt's length."""
    plan, tokenizer = recipe.evaluate, load_tokenizer(tokenizer_path)
    device = target.embed_tokens.weight.device
    texts = {}
    for path in sorted(Path(plan.prompts).glob("*.py.txt")):
        ids = tokenizer.encode(path.read_text(encoding="utf-8")).ids[: plan.max_prompt]
        prompt = torch.tensor([ids], device=device)
        zero = torch.zeros(1, device=device)
        whole = generate(target, prompt, len(ids) + plan.new_tokens, zero)
        texts[path.name] = (whole[0].tolist(), len(ids))
    return texts


def file_loss(target: TargetNet, folder: Path, tokenizer_path: Path, length: int) -> float:
    """Nats per byte over whole held-out files in windows of the context."""
    tokenizer = load_tokenizer(tokenizer_path)
    nats = size = 0.0
    for path in sorted(folder.glob("*.py.txt")):
        text = path.read_text(encoding="utf-8")
        ids = np.array([0, *tokenizer.encode(text).ids], np.int64)
        window = min(length, len(ids) - 1)
        count = (len(ids) - 1) // window
        nats += nats_per_token(target, ids, window, count) * count * window
        size += len(text.encode()) * count * window / (len(ids) - 1)
    return nats / size if size else 0.0


def evaluate(recipe: Recipe, work: WorkFolder) -> None:
    """Measure the written pair and add the numbers to the report."""
    device = pick_device()
    validate(recipe, work)
    torch.set_float32_matmul_precision("highest")
    target = read_target(recipe.target, work.target).to(device).eval()
    drafter = read_drafter(recipe.drafter, recipe.target, work.drafter).to(device).eval()
    texts = greedy_texts(recipe, target, work.tokenizer)
    ours, copies, by_file = Rounds(), Rounds(), {}
    for name, (ids, prompt) in texts.items():
        drafts = draft_everywhere(target, drafter, torch.tensor([ids], device=device), prompt)
        own = Rounds()
        replay(ids, prompt, drafts, own, copies)
        by_file[name] = round(float(np.mean(own.lengths)), 3)
        ours.lengths += own.lengths
        ours.novel += own.novel
    block, folder = recipe.drafter.block_size, recipe.corpus.held_out or recipe.evaluate.prompts
    loss = file_loss(target, Path(folder), work.tokenizer, recipe.pretrain.sequence)
    work.note("held_out", {"nats_per_byte": round(loss, 4), "by_file": by_file})
    work.note("acceptance", ours.summary(block))
    work.note("prompt_lookup", copies.summary(block))
