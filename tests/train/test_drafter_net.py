"""The trainable drafter: isolation of blocks, window, selector, and the official package."""

import importlib.util
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch (extra `train`) is not installed")

from drafter_svc.train.distill import slot_losses  # noqa: E402
from drafter_svc.train.drafter_net import DrafterNet, start_weights, tap_layers  # noqa: E402
from drafter_svc.train.export import drafter_config, read_drafter, write_drafter  # noqa: E402
from drafter_svc.train.recipe import DrafterDims, TargetDims  # noqa: E402

torch.set_num_threads(1)
TARGET = TargetDims(vocab_size=96, hidden_size=32)
DIMS = DrafterDims(
    intermediate_size=48, head_dim=8, sliding_window=24, selector_rank=8, selector_top_k=4
)


def random_drafter(dims: DrafterDims = DIMS) -> DrafterNet:
    g = torch.Generator().manual_seed(2)
    net = DrafterNet(dims, TARGET).eval()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(
                torch.randn(p.shape, generator=g) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 1.0)
            )
    return net


def random_inputs(rows: int = 60) -> tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]:
    g = torch.Generator().manual_seed(4)
    ids = torch.randint(2, 96, (1, rows), generator=g)
    return ids, torch.randn(1, rows, 96, generator=g), torch.randn(96, 32, generator=g)


@pytest.mark.parametrize("version", [1, 2])
def test_many_anchors_give_what_each_gives_alone(version: int) -> None:
    """A mask or convolution that leaks between blocks trains on drafts of the neighbour."""
    net = random_drafter(replace(DIMS, version=version))
    ids, taps, table = random_inputs()
    anchors = torch.tensor([[10, 11, 30, 59]])
    with torch.no_grad():
        together = net(taps, anchors, ids[:, anchors[0]], table)
        for index, anchor in enumerate(anchors[0].tolist()):
            alone = net(taps[:, :anchor], anchors[:, index : index + 1], ids[:, [anchor]], table)
            torch.testing.assert_close(together[:, index : index + 1], alone, atol=2e-5, rtol=1e-4)


def test_rows_at_and_after_the_anchor_change_nothing() -> None:
    """At serving time they do not exist."""
    net = random_drafter()
    ids, taps, table = random_inputs()
    anchor = torch.tensor([[30]])
    other = taps.clone()
    other[:, 30:] = torch.randn_like(other[:, 30:])
    with torch.no_grad():
        assert torch.equal(
            net(taps, anchor, ids[:, [30]], table), net(other, anchor, ids[:, [30]], table)
        )


def test_the_window_ends_where_it_says() -> None:
    """One row too many is seen in training and missing from the serving cache."""
    net = random_drafter()
    ids, taps, table = random_inputs()
    anchor = torch.tensor([[40]])
    edge = 40 - DIMS.sliding_window
    with torch.no_grad():
        before = net(taps, anchor, ids[:, [40]], table)
        for row, changes in ((edge, False), (edge + 1, True)):
            other = taps.clone()
            other[:, row] += 1.0
            after = net(other, anchor, ids[:, [40]], table)
            assert torch.equal(before, after) is not changes


def test_a_fresh_drafter_of_version_2_acts_like_version_1() -> None:
    """The convolutions must start as the identity."""
    second, first = DrafterNet(DIMS, TARGET), DrafterNet(replace(DIMS, version=1), TARGET)
    start_weights(second, 0)
    first.load_state_dict({n: p for n, p in second.state_dict().items() if n in first.state_dict()})
    ids, taps, table = random_inputs()
    anchor = torch.tensor([[20]])
    args = (taps, anchor, ids[:, [20]], table)
    torch.testing.assert_close(first(*args), second(*args))


def test_the_gold_label_is_scored_even_when_no_candidate_has_it() -> None:
    """Otherwise the selector learns nothing from the slots that the unary head gets wrong."""
    net = random_drafter()
    g = torch.Generator().manual_seed(0)
    h, head = torch.randn(1, 2, 7, 32, generator=g), torch.randn(96, 32, generator=g)
    labels = (h @ head.T).argmin(-1)
    previous = torch.zeros_like(labels)
    _, selector, hits = slot_losses(net, h, head, labels, previous, torch.ones(7))
    assert torch.isfinite(selector)
    assert selector > 0
    assert not hits.any()


def test_taps_follow_the_published_rule() -> None:
    """Taps one layer off lower acceptance without an error."""
    assert tap_layers(36, 5) == [1, 9, 17, 25, 33]
    assert tap_layers(8, 3) == [1, 3, 5]
    assert tap_layers(8, 1) == [4]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_drafts_are_those_of_the_official_package(tmp_path) -> None:
    """Same file, same features, same block: same hidden rows and drafts."""
    if importlib.util.find_spec("dflash") is None:
        pytest.skip("dflash (extra `reference`) is not installed")
    from dflash.model import DFlash2DraftModel
    from transformers import Qwen3Config

    write_drafter(random_drafter(), TARGET, tmp_path)
    ours = read_drafter(DIMS, TARGET, tmp_path).eval()
    config = Qwen3Config(**drafter_config(DIMS, TARGET))
    theirs = DFlash2DraftModel(config).float().eval()
    state = ours.state_dict()  # its loader adds the suffix that the file does not have
    theirs.load_state_dict({n + ".weight" * ("codebook" in n): p for n, p in state.items()})
    ids, taps, table = random_inputs()
    head = torch.nn.Linear(32, 96, bias=False)
    head.weight.data.copy_(table)
    for anchor in (10, 40):
        block = torch.full((1, 8), DIMS.mask_token_id)
        block[0, 0] = ids[0, anchor]
        with torch.no_grad():
            h = ours(taps[:, :anchor], torch.tensor([[anchor]]), block[:, :1], table)[:, 0, 1:]
            drafts, _ = ours.walk(h, h @ table.T, block[:, 0])
            rows = theirs(
                target_hidden=taps[:, :anchor],
                noise_embedding=table[block],
                position_ids=torch.arange(anchor + 8)[None],
            )[:, 1:]
            proposed = theirs.propose(rows, block[:, 0], head, 0.0)[0]
        torch.testing.assert_close(rows, h, atol=1e-4, rtol=1e-4)
        assert proposed.tolist() == drafts.tolist()
