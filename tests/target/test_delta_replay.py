"""A GPU's way through Gated DeltaNet, on kernels spelled in NumPy: packing, replay, roll-back.

Here the kept rows of a round wait for the next forward, which replays them; the states hold them
only then. What kernels compute is tested in `test_delta_source` and on devices (`tests/device`).
"""

import mlx.core as mx
import numpy as np
import pytest
from support.plain_delta import PlainKernels
from support.target_cases import feed
from support.tiny import make_tiny_target

from target_svc.models.blocks import gated_delta
from target_svc.models.blocks.delta_kernel import fit_sizes
from target_svc.models.blocks.delta_library import LibraryDelta
from target_svc.models.blocks.delta_source import kernel_source
from target_svc.models.family import run_rows
from target_svc.models.qwen4_exp import load
from target_svc.rollback import abandon, commit

IDS = np.random.default_rng(4).integers(8, 500, 200).tolist()
FIELDS = {"num_hidden_layers": 4, "indexer_budget": 1024}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_target(tmp_path_factory.mktemp("delta"), dtype="F32", **FIELDS)


@pytest.fixture(scope="module")
def plain(folder):
    """The model as a CPU runs it."""
    return load(folder)


@pytest.fixture(scope="module")
def launched(folder):
    """The same model on kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gated_delta, "delta_kernels", PlainKernels)
        return load(folder)


def close(one, other):
    assert np.abs(np.asarray(one) - np.asarray(other)).max() < 2e-5


@pytest.mark.parametrize("parts", [(40,), (1,) * 12, (5, 5, 5, 5), (64, 6), (65, 6), (100, 3)])
def test_kernels_and_matrix_form_give_the_same_scores(plain, launched, parts):
    """A packed row read at another offset, or a replay that was forgotten."""
    states = plain.new_state(), launched.new_state()
    start = 0
    for part in parts:
        ids = IDS[start : start + part]
        close(feed(plain, states[0], ids), feed(launched, states[1], ids))
        start += part
    close(states[0].pieces["recurrent"].states, states[1].pieces["recurrent"].states)


def test_mlx_own_update_gives_the_same_scores_over_rounds(plain, folder, monkeypatch):
    """Where a device refuses the kernels, accepted rows must be replayed all the same."""
    monkeypatch.setattr(gated_delta, "delta_kernels", LibraryDelta)
    model = load(folder)
    states = plain.new_state(), model.new_state()
    start = 0
    for part, keep in ((70, 70), (8, 3), (16, 16), (1, 1), (5, 2), (4, 4)):
        scores = []
        for one, state in zip((plain, model), states, strict=True):
            scores.append(np.array(run_rows(one, IDS[start : start + part], state)))
            commit(state, keep)
        close(*scores)
        start += keep


@pytest.mark.parametrize("keep", range(1, 17))
def test_kept_rows_are_replayed_and_wrong_ones_are_not(launched, keep):
    """Every accepted count of a verify of 16 rows, with two different wrong tails."""
    after = []
    for tail in (7, 300):
        state = launched.new_state()
        feed(launched, state, IDS[:20])
        rows = [*IDS[20 : 20 + keep], *[tail] * (16 - keep)]
        mx.eval(run_rows(launched, rows, state), *state.arrays())
        commit(state, keep)
        after.append(feed(launched, state, IDS[20 + keep : 26 + keep]))
    assert (after[0] == after[1]).all()
    whole = launched.new_state()
    feed(launched, whole, IDS[: 20 + keep])
    close(after[0], feed(launched, whole, IDS[20 + keep : 26 + keep]))


def test_a_replay_that_is_skipped_is_noticed(launched, monkeypatch):
    """Shows that the tests above can fail."""
    state = launched.new_state()
    feed(launched, state, IDS[:20])
    wanted = launched.new_state()
    feed(launched, wanted, IDS[:20])
    feed(launched, state, IDS[20:25])
    feed(launched, wanted, IDS[20:25])
    state.pieces["recurrent"]._keep = 0
    skipped = feed(launched, state, IDS[25:27])
    assert np.abs(skipped - feed(launched, wanted, IDS[25:27])).max() > 1e-3


def test_an_abandoned_forward_leaves_waiting_rows_waiting(launched):
    """A replay done by a forward that was thrown away would happen twice."""
    state, wanted = launched.new_state(), launched.new_state()
    for one in (state, wanted):
        feed(launched, one, IDS[:20])
        feed(launched, one, IDS[20:23])
    mx.eval(run_rows(launched, [9, 10, 11], state), *state.arrays())
    abandon(state)
    assert (feed(launched, state, IDS[23:26]) == feed(launched, wanted, IDS[23:26])).all()


def test_settling_folds_waiting_rows_in_once(launched):
    """A copy of the state made between rounds must not lack rows, nor hold them twice."""
    state, wanted = launched.new_state(), launched.new_state()
    for one in (state, wanted):
        feed(launched, one, IDS[:20])
        feed(launched, one, IDS[20:23])
    before = np.array(state.pieces["recurrent"].states)
    assert (np.array(state.pieces["recurrent"].states) == before).all()
    close(feed(launched, state, IDS[23:26]), feed(launched, wanted, IDS[23:26]))


def test_both_languages_are_the_same_text_but_for_their_words():
    """A fix made in one language only."""
    sizes = fit_sizes((16, 3), (128, 128), 4, is_silu=False, floor=1e-6, unit_eps=1e-6)
    assert sizes is not None
    for body in ("prepare", "rows", "finish"):
        texts = [kernel_source(body, sizes, language) for language in ("cuda", "metal")]
        tails = [text[text.index("constexpr int HK") :] for text in texts]
        assert tails[0] == tails[1]
        assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("heads", "dims"), [((16, 3), (128, 128)), ((2, 2), (64, 64)), ((2, 3), (16, 16))]
)
def test_sizes_fit_whole_warps(heads, dims):
    """A layout that reads past a head's numbers."""
    sizes = fit_sizes(heads, dims, 4, is_silu=True, floor=1e-6, unit_eps=1e-6)
    assert sizes is not None
    assert sizes.key_dim % (4 * sizes.lanes) == 0
    assert sizes.value_dim % sizes.columns == 0
    assert sizes.lanes * sizes.columns % 32 == 0


def test_sizes_that_do_not_fit_are_left_to_the_matrix_form():
    """Heads of a width that no layout divides."""
    assert fit_sizes((2, 2), (30, 30), 4, is_silu=True, floor=1e-6, unit_eps=1e-6) is None
