"""Whole sessions in three runtimes: where they agree, where they do not, and whom we follow.

`README.md` beside this file tells it in words; here every word of it is held against what the
runtimes computed (`golden/make_drafter_runs.py`), by putting each one's rule into the formulas.
"""

from pathlib import Path

import numpy as np
import pytest
from support.drafter_cases import (
    KEPT_IDS,
    KEPT_SLOTS,
    RUN_SIZES,
    RUNS,
    RUNTIMES,
    anchor_of,
    config_of,
    taps_of,
)
from support.plain_drafter import PlainDrafter, published
from support.tiny_drafter import fuse, make_stand_in_target, make_tiny_drafter, tiny_tensors

from drafter_svc import device, host
from drafter_svc.drafter import Drafter
from drafter_svc.load import load

GOLDEN = Path(__file__).parents[1] / "golden" / "drafter_runs.npz"
ENDS = np.cumsum(RUN_SIZES).tolist()
CLOSE = 1e-4
#: Blocks, counted from 0, in which a runtime differs from z-lab's torch module.
ONE_ROW_WRAPPED = {4, 5, 6, 9, 10}  # single rows into a full ring
BEYOND_8 = set(range(2, len(ENDS)))  # more context than the last query of a block may see: 16 - 8
DIFFERS = {
    ("second_sliding", "zlab_mlx"): ONE_ROW_WRAPPED,
    ("second_mixed", "zlab_mlx"): ONE_ROW_WRAPPED,
    ("first_sliding", "zlab_mlx"): ONE_ROW_WRAPPED,
    ("first_causal", "zlab_mlx"): ONE_ROW_WRAPPED,
    ("second_sliding", "mlx_vlm"): BEYOND_8,
    ("second_mixed", "mlx_vlm"): BEYOND_8,
    ("first_sliding", "mlx_vlm"): set(range(len(ENDS))),
    ("first_causal", "mlx_vlm"): ONE_ROW_WRAPPED,
}


class Ring:
    """Positions by index in the rotating cache of mlx-lm and mlx-vlm, built for W - 1 rows."""

    def __init__(self, size):
        self.size, self.held, self._next = size, [], 0

    def append(self, positions):
        positions = positions[-self.size :]
        if len(positions) > 1:
            in_order = self.held[self._next :] + self.held[: self._next]
            kept = in_order[max(0, len(in_order) - self.size + 1) :]
            self.held = kept + positions
            self._next = len(self.held)
            return
        if len(self.held) > self.size:
            self.held = self.held[-self.size :]
            self._next = self.size
        if len(self.held) < self.size:
            self.held = self.held + positions
            self._next = len(self.held)
            return
        self._next = 0 if self._next == self.size else self._next
        self.held[self._next] = positions[0]
        self._next += 1


def rule_of(runtime, ring):
    """What a runtime's queries see, as `support.plain_drafter.published` has it."""

    def rule(config, layer, positions, anchor_pos):
        slides = config["layer_types"][layer] == "sliding_attention"
        B, C = config["dflash_config"]["block_size"], len(positions)
        said = config.get("is_causal")
        is_causal = bool(said) if runtime == "mlx_vlm" else slides if said is None else said
        order = ring.held if slides else list(positions)
        # By index in the cache, whatever position lies there; the block comes behind it.
        steps = len(order) + np.arange(B)[:, None] - np.arange(len(order) + B)
        by_index = np.ones(steps.shape, bool)
        if slides and (runtime == "zlab_mlx" or is_causal):
            by_index[:, : len(order)] = steps[:, : len(order)] < config["sliding_window"]
        if is_causal:
            by_index &= steps >= 0
        seen = np.zeros((B, C + B), bool)
        seen[:, [position - positions[0] for position in order]] = by_index[:, : len(order)]
        seen[:, C:] = by_index[:, len(order) :]
        return seen

    return published if runtime == "zlab" else rule


@pytest.fixture(scope="module")
def goldens():
    with np.load(GOLDEN) as file:
        return dict(file)


def kept(logits):
    return np.asarray(logits)[list(KEPT_SLOTS), KEPT_IDS]


def differing(goldens, name, runtime):
    """Blocks whose logits are not those of z-lab's torch module."""
    gap = abs(goldens[f"{name}/{runtime}/logits"] - goldens[f"{name}/zlab/logits"])
    return set(np.flatnonzero(gap.max(axis=(1, 2)) > CLOSE).tolist())


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", RUNS)
def test_a_runtimes_rule_explains_all_of_its_blocks(goldens, name, runtime):
    """Stops: a difference that is put down to the wrong cause, or one nobody has seen."""
    case = RUNS[name]
    config = config_of(case)
    tensors = tiny_tensors(config, case.seed)
    oracle = PlainDrafter(config, tensors)
    features = fuse(tensors, taps_of(config, ENDS[-1]))
    ring = Ring(config["sliding_window"] - 1)
    rule, start = rule_of(runtime, ring), 0
    for index, end in enumerate(ENDS):
        ring.append(list(range(start, end)))
        start, anchor = end, anchor_of(end)
        hidden, logits = oracle.logits(features[:end], np.arange(end), anchor, rule=rule)
        expected = goldens[f"{name}/{runtime}/logits"][index]
        np.testing.assert_allclose(kept(logits), expected, atol=CLOSE, err_msg=f"end {end}")
        drafts = oracle.drafts(hidden, logits, anchor)
        assert drafts == goldens[f"{name}/{runtime}/drafts"][index].tolist()


@pytest.mark.parametrize("runtime", RUNTIMES[1:])
@pytest.mark.parametrize("name", RUNS)
def test_runtimes_differ_where_the_readme_says(goldens, name, runtime):
    """Stops: a README that goes on telling of a fault that was mended, or misses a new one."""
    assert differing(goldens, name, runtime) == DIFFERS.get((name, runtime), set())


@pytest.mark.parametrize("kernels", [host, device], ids=["host", "device"])
@pytest.mark.parametrize("name", RUNS)
def test_we_draft_what_z_lab_drafts(goldens, tmp_path, name, kernels):
    """Stops: following the runtime that does not follow the config."""
    case = RUNS[name]
    config = config_of(case)
    target = make_stand_in_target(tmp_path / "target")
    folder = make_tiny_drafter(
        tmp_path / "drafter", target, case.seed, is_second=case.is_second, **case.changes
    )
    drafter = Drafter(load(folder, target, kernels))
    features = fuse(tiny_tensors(config, case.seed), taps_of(config, ENDS[-1]))
    context = drafter.open("s", 200)
    alike = dict.fromkeys(RUNTIMES, 0)
    for index, end in enumerate(ENDS):
        drafter.append(context, features[context.end : end], context.end)
        model, anchor = drafter._model, anchor_of(end)
        logits = kept(model.logits(model.hidden(anchor, context)))
        drafts = drafter.draft(context, anchor, drafter.n_drafts).draft_ids
        np.testing.assert_allclose(logits, goldens[f"{name}/zlab/logits"][index], atol=CLOSE)
        assert list(drafts) == goldens[f"{name}/zlab/drafts"][index].tolist()
        for runtime in RUNTIMES:
            gap = abs(logits - goldens[f"{name}/{runtime}/logits"][index]).max()
            alike[runtime] += bool(gap < CLOSE)
    assert alike == {r: len(ENDS) - len(DIFFERS.get((name, r), ())) for r in RUNTIMES}
