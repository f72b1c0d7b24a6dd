"""Text that the target writes, and what the drafter is taught of it."""

import pytest

torch = pytest.importorskip("torch", reason="torch (extra `train`) is not installed")

import numpy as np  # noqa: E402
from support.trainer_cases import DRAFTER, SMALL, random_drafter, random_target  # noqa: E402

from drafter_svc.train.decode import generate  # noqa: E402
from drafter_svc.train.lessons import AnchorDraw, read_lessons  # noqa: E402
from drafter_svc.train.pretrain import Windows  # noqa: E402

torch.set_num_threads(1)
WRITTEN, WIDTH = 16, DRAFTER.sliding_window + 16


def test_greedy_rows_are_the_best_ids_of_one_pass() -> None:
    """Prompts are read in parts and joined; a row must not go on from another row's state."""
    net = random_target()
    prompts = torch.randint(2, 128, (3, 40), generator=torch.Generator().manual_seed(0))
    rows = generate(net, prompts, 60, torch.zeros(3))
    with torch.no_grad():
        best = net.logits(net(rows).hidden).argmax(-1)
    assert torch.equal(rows[:, 40:], best[:, 39:-1])


def test_a_temperature_changes_its_own_row_only() -> None:
    """Half the rows are greedy, in the same batch as the others."""
    torch.manual_seed(0)
    net = random_target()
    prompts = torch.randint(2, 128, (2, 12), generator=torch.Generator().manual_seed(0))
    greedy = generate(net, prompts, 30, torch.zeros(2))
    mixed = generate(net, prompts, 30, torch.tensor([0.0, 5.0]))
    assert torch.equal(mixed[0], greedy[0])
    assert not torch.equal(mixed[1], greedy[1])


def lessons():
    """Rows shorter than the width, of the width, and longer, and the target that reads them."""
    net = random_target()
    rng = np.random.default_rng(0)
    lengths = (20, WIDTH, WIDTH + 30)
    kinds = [rng.integers(2, 128, (2, length)).astype(np.uint16) for length in lengths]
    return net, kinds, read_lessons(net, kinds, list(DRAFTER.target_layer_ids), WIDTH, part=64)


def test_lessons_hold_the_end_of_each_row_at_its_position() -> None:
    """Rows of three lengths share one width; one column off pairs taps with the wrong ids."""
    net, kinds, read = lessons()
    for kind, rows in enumerate(kinds):
        ids = torch.from_numpy(rows.astype(np.int64))
        with torch.no_grad():
            out = net(ids, taps=[1, 2])
        kept, at = min(WIDTH, ids.shape[1]), slice(2 * kind, 2 * kind + 2)
        assert torch.equal(read.ids[at, WIDTH - kept :].long(), ids[:, -kept:])
        taps = torch.cat(out.taps, -1)[:, -kept:]
        torch.testing.assert_close(read.taps[at, WIDTH - kept :], taps)
        assert read.first[at].tolist() == [ids.shape[1] - WIDTH] * 2


def test_a_block_drawn_from_lessons_is_the_block_of_the_whole_row() -> None:
    """Cut and padded rows must give what serving gives: same rows seen, same positions."""
    net, kinds, read = lessons()
    drafter, head = random_drafter(), net.embed_tokens.weight
    draw = AnchorDraw(read, WRITTEN, DRAFTER.block_size, 3)
    seen = set()
    for _ in range(12):
        taps, first, where, ids, labels, previous = draw.draw(2, 3)
        with torch.no_grad():
            cut = drafter(taps, where, ids, head, first)
        for row in range(2):
            length = int(first[row]) + WIDTH
            seen.add(length)
            texts = torch.from_numpy(next(k for k in kinds if k.shape[1] == length).astype(int))
            text = next(t for t in texts if torch.equal(t[where[row]], ids[row]))[None]
            with torch.no_grad():
                out = net(text, taps=[1, 2])
                whole = drafter(torch.cat(out.taps, -1), where[row][None], ids[row][None], head)
                best = net.logits(out.hidden).argmax(-1)[0]
            torch.testing.assert_close(cut[row], whole[0], atol=1e-4, rtol=1e-3)
            slots = where[row][:, None] + torch.arange(DRAFTER.block_size - 1)
            assert torch.equal(labels[row], best[slots])
            assert torch.equal(previous[row], text[0][slots])
            assert where[row].min() >= length - WRITTEN
    assert seen == {20, WIDTH, WIDTH + 30}


def test_windows_begin_where_files_begin_when_asked() -> None:
    """Held-out prompts are the heads of files; the drafter should meet such text."""
    ids = np.arange(1, 1001, dtype=np.uint16) % 500
    windows = Windows(ids, torch.device("cpu"), 0)
    rows = windows.draw(8, 20, from_start=0.5)
    assert rows[:4, 0].tolist() == [1] * 4
    assert SMALL.eos_token_id == 0
