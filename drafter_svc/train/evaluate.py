"""Replay greedy text offline and report what every drafter would have had accepted.

Owns which texts are asked for and what is reported. Needs no serving loop: on text that the target
itself wrote greedily, accepted drafts are those that equal it. Numbers on the held-out files are
reported; the prior is fitted on validation files, so that it is not fitted on what it is judged by.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafter_svc.train.calibration import Outcomes, refit, table
from drafter_svc.train.decode import generate
from drafter_svc.train.drafter_net import DrafterNet, taps_of
from drafter_svc.train.export import read_drafter, read_target
from drafter_svc.train.files import WorkFolder, pick_device
from drafter_svc.train.losses import file_loss, validate
from drafter_svc.train.mtp import read_mtp
from drafter_svc.train.mtp_net import Chain, MtpHead
from drafter_svc.train.recipe import Recipe
from drafter_svc.train.regenerate import loops
from drafter_svc.train.rounds import Rounds, beside, lookup, replay
from drafter_svc.train.target_net import TargetNet
from drafter_svc.train.tokenizer import load_tokenizer


@dataclass(slots=True)
class Text:
    """Ids of a prompt and its greedy continuation."""

    name: str
    ids: list[int]
    prompt: int


@dataclass(slots=True)
class Pair:
    """A target and the drafters that there are, by version."""

    recipe: Recipe
    target: TargetNet
    drafters: dict[int, DrafterNet]
    head: MtpHead | None

    @classmethod
    def read(cls, recipe: Recipe, work: WorkFolder, device: torch.device) -> "Pair":
        """Read what a run has written so far."""
        target = read_target(recipe.target, work.target).to(device).eval()
        drafters = {}
        for version in (2, 1):
            dims = recipe.drafter_of(version)
            if (work.drafter(version) / "config.json").exists():
                net = read_drafter(dims, recipe.target, work.drafter(version))
                drafters[version] = net.to(device).eval()
        head = read_mtp(recipe.target, work).to(device).eval() if work.mtp.exists() else None
        return cls(recipe, target, drafters, head)

    @property
    def device(self) -> torch.device:
        """Where everything lies."""
        return self.target.embed_tokens.weight.device


@torch.no_grad()
def draft_everywhere(
    target: TargetNet, drafter: DrafterNet, ids: Tensor, first: int, part: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Drafts and confidences [T - first, K - 1] at every anchor first .. T - 1 of ids [1, T]."""
    layers = taps_of(drafter.dims, target.dims)
    start = max(0, first - drafter.dims.sliding_window)
    taps = torch.cat([t[:, start:] for t in target(ids, taps=layers).taps], -1)
    head, since = target.embed_tokens.weight, torch.tensor([start], device=ids.device)
    drafts, said = [], []
    for anchors in torch.arange(first, ids.shape[1], device=ids.device).split(part):
        h = drafter(taps, anchors[None], ids[:, anchors], head, since)[:, :, 1:]
        picked, shares = drafter.walk(h, target.logits(h), ids[:, anchors])
        drafts.append(picked[0])
        said.append(shares[0])
    return torch.cat(drafts).cpu().numpy(), torch.cat(said).cpu().numpy()


def held_out_texts(pair: Pair, tokenizer_path: Path) -> list[Text]:
    """Prompt plus greedy continuation of every held-out file."""
    plan, tokenizer, texts = pair.recipe.evaluate, load_tokenizer(tokenizer_path), []
    for path in sorted(Path(plan.prompts).glob("*.py.txt")):
        ids = tokenizer.encode(path.read_text(encoding="utf-8")).ids[: plan.max_prompt]
        whole = _continue(pair, torch.tensor([ids], device=pair.device))
        texts.append(Text(path.name, whole[0].tolist(), len(ids)))
    return texts


def context_texts(pair: Pair, ids: np.ndarray, context: int) -> list[Text]:
    """Continuations of the same places of long validation files after `context` tokens each."""
    plan, longest = pair.recipe.evaluate, max(pair.recipe.evaluate.contexts)
    ends = np.flatnonzero(ids == pair.recipe.target.eos_token_id)
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else np.zeros(0, np.int64)
    places = [s + longest for s, e in zip(starts, ends, strict=True) if e - s > longest]
    places = places[: plan.files]
    if not places:
        return []
    rows = np.stack([ids[place - context : place] for place in places]).astype(np.int64)
    whole = _continue(pair, torch.from_numpy(rows).to(pair.device)).tolist()
    return [Text(f"{i}", row, context) for i, row in enumerate(whole)]


def _continue(pair: Pair, prompts: Tensor) -> Tensor:
    greedy = torch.zeros(len(prompts), device=pair.device)
    length = prompts.shape[1] + pair.recipe.evaluate.new_tokens
    return generate(pair.target, prompts, length, greedy)


def block_rounds(pair: Pair, version: int, text: Text, outcomes: Outcomes) -> Rounds:
    """One drafter over one text; adds what its confidences came to."""
    drafter, block = pair.drafters[version], pair.recipe.drafter.block_size
    ids = torch.tensor([text.ids], device=pair.device)
    drafts, said = draft_everywhere(pair.target, drafter, ids, text.prompt)
    rounds = replay(text.ids, text.prompt, block, lambda a: drafts[a - text.prompt].tolist())
    for anchor, length in zip(rounds.anchors, rounds.lengths, strict=True):
        outcomes.add(said[anchor - text.prompt], length - 1)
    return rounds


@torch.no_grad()
def chain_rounds(pair: Pair, text: Text) -> Rounds:
    """The MTP head over one text."""
    count = pair.recipe.evaluate.chain
    ids = torch.tensor([text.ids], device=pair.device)
    if pair.head is None:
        return Rounds()
    chain = Chain(pair.head, pair.target, ids, pair.target(ids).streams)
    return replay(text.ids, text.prompt, count + 1, lambda a: chain.draft(a, count))


def _over(texts: Sequence[Text], rounds_of: Callable[[Text], Rounds]) -> tuple[Rounds, list[float]]:
    all_rounds, by_text = Rounds(), []
    for text in texts:
        rounds = rounds_of(text)
        all_rounds.extend(rounds)
        by_text.append(round(rounds.mean(), 3))
    return all_rounds, by_text


def evaluate(recipe: Recipe, work: WorkFolder) -> None:
    """Measure what a run has written and add the numbers to the report."""
    device = pick_device()
    validate(recipe, work)
    torch.set_float32_matmul_precision("highest")  # drafts are compared with serving in float32
    pair = Pair.read(recipe, work, device)
    folder = Path(recipe.corpus.held_out or recipe.evaluate.prompts)
    loss = file_loss(pair.target, folder, work.tokenizer, recipe.pretrain.sequence)
    texts = held_out_texts(pair, work.tokenizer)
    written = np.array([text.ids[text.prompt :] for text in texts])
    looping = float(loops(written, written.shape[1]).mean()) if len(texts) else 0.0
    work.note("held_out", {"nats_per_byte": round(loss, 4), "looping": round(looping, 3)})
    outcomes = _held_out(pair, work, texts)
    _contexts(pair, work, outcomes)


def _held_out(pair: Pair, work: WorkFolder, texts: list[Text]) -> dict[int, Outcomes]:
    """Acceptance of every drafter on the held-out files; outcomes by version."""
    block = pair.recipe.drafter.block_size
    outcomes = {version: Outcomes() for version in pair.drafters}
    for version, said in outcomes.items():
        rounds, by_text = _over(texts, lambda t, v=version, s=said: block_rounds(pair, v, t, s))
        by_file = {text.name: mean for text, mean in zip(texts, by_text, strict=True)}
        work.note(f"acceptance_v{version}", rounds.summary(block) | {"by_file": by_file})
    if 2 in pair.drafters:
        copies, _ = _over(texts, lambda t: _copies(pair, t, block))
        work.note("prompt_lookup", copies.summary(block))
    if pair.head is not None:
        chained, _ = _over(texts, lambda t: chain_rounds(pair, t))
        work.note("acceptance_mtp", chained.summary(pair.recipe.evaluate.chain + 1))
    return outcomes


def _copies(pair: Pair, text: Text, block: int) -> Rounds:
    rounds = block_rounds(pair, 2, text, Outcomes())
    return beside(text.ids, rounds, block, lambda a: lookup(text.ids, a, block - 1))


def _contexts(pair: Pair, work: WorkFolder, held_out: dict[int, Outcomes]) -> None:
    """Acceptance by length of context, and the prior fitted on these texts."""
    ids, report = np.load(work.tokens("validation")), dict[str, Any]()
    outcomes = {version: Outcomes() for version in pair.drafters}
    means: dict[int, list[float]] = {version: [] for version in pair.drafters}
    for context in pair.recipe.evaluate.contexts:
        texts = context_texts(pair, ids, context)
        for version, said in outcomes.items():
            rounds, _ = _over(texts, lambda t, v=version, s=said: block_rounds(pair, v, t, s))
            summary = rounds.summary(pair.recipe.drafter.block_size)
            report[f"v{version}_after_{context}"] = summary
            means[version].append(rounds.mean())
    for version, values in means.items():
        if values and values[0] > 0:
            report[f"v{version}_last_over_first"] = round(values[-1] / values[0], 3)
    work.note("contexts", report)
    fits = {version: refit(said) for version, said in outcomes.items()}
    priors = {f"prior_v{v}": {"intercept": f[0], "slope": f[1]} for v, f in fits.items()}
    tables = {f"bins_v{v}": table(said, fits[v]) for v, said in held_out.items() if said.said}
    work.note("calibration", priors | tables)
    for name, rows in tables.items():
        print(name, *rows, sep="\n  ", flush=True)
