"""What a run leaves: shards, the MTP head, the refitted prior; and how it is taken up again."""

import json

import pytest

torch = pytest.importorskip("torch", reason="torch (extra `train`) is not installed")

from support.trainer_cases import (  # noqa: E402
    DRAFTER,
    SMALL,
    random_drafter,
    random_head,
    random_target,
)

from common.checkpoint.index import index_tensors  # noqa: E402
from common.errors import NotReady  # noqa: E402
from drafter_svc.train.export import read_target, write_drafter, write_target  # noqa: E402
from drafter_svc.train.files import Progress, WorkFolder, wait_for  # noqa: E402
from drafter_svc.train.mtp import write_mtp  # noqa: E402
from drafter_svc.train.optim import Optimiser  # noqa: E402
from drafter_svc.train.publish import publish  # noqa: E402
from drafter_svc.train.recipe import Recipe  # noqa: E402


@pytest.fixture
def work(tmp_path, monkeypatch) -> WorkFolder:
    """A finished toy run, exported in shards of at most 40 kB."""
    monkeypatch.setattr("drafter_svc.train.publish.SHARD_BYTES", 40_000)
    work = WorkFolder(tmp_path)
    write_target(random_target(), work.target)
    work.tokenizer.write_text("{}")
    write_mtp(random_head(), work)
    write_drafter(random_drafter(), SMALL, work.drafter(2))
    work.note("calibration", {"prior_v2": {"intercept": -0.5, "slope": 1.25}})
    publish(Recipe(target=SMALL, drafter=DRAFTER), work)
    return work


def test_shards_hold_trunk_and_head_and_read_back(work) -> None:
    """A shard over the limit cannot be carried; a lost one is found only when it is served."""
    out = work.root / "export" / "target"
    files = sorted(out.glob("model-*.safetensors"))
    assert len(files) > 2
    assert all(path.stat().st_size < 60_000 for path in files)  # header included
    names = index_tensors(out)
    assert sum(name.startswith("mtp.") for name in names) == 31
    config = json.loads((out / "config.json").read_text())
    assert config["text_config"]["mtp_num_hidden_layers"] == 1
    first, back = read_target(SMALL, work.target), read_target(SMALL, out)
    for name, value in first.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name


def test_the_refitted_prior_stands_in_the_drafters_config(work) -> None:
    """The policy reads it there; the published prior stays the default for drafters without."""
    config = json.loads((work.root / "export" / "drafter" / "config.json").read_text())
    assert config["dflash_config"]["calibration_prior"] == {"intercept": -0.5, "slope": 1.25}


def test_waiting_for_a_stage_beside_has_an_end(tmp_path) -> None:
    """A stage that died must not hold the others, and the machine, for ever."""
    with pytest.raises(NotReady, match=r"rows\.npz"):
        wait_for(tmp_path / "rows.npz", 0.0)


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path) -> None:
    """Weights without their moments, or a clock that starts again, make another run of it."""
    path, net = tmp_path / "stage.resume", torch.nn.Linear(4, 4)
    optimiser = Optimiser(net, 0.1, 0.1, 0.0)

    def train(net, optimiser) -> None:
        net(torch.ones(2, 4)).square().sum().backward()
        optimiser.step(1.0, 1.0)

    progress = Progress("stage", 100.0, path, save_s=0.0)
    train(net, optimiser)
    progress.step = 7
    progress.save_if_due(lambda: {"net": net.state_dict(), "optimiser": optimiser.state()})
    train(net, optimiser)
    again, other = Progress("stage", 50.0, path, save_s=0.0), torch.nn.Linear(4, 4)
    restored = Optimiser(other, 0.1, 0.1, 0.0)
    saved = again.resume(torch.device("cpu"))
    other.load_state_dict(saved["net"])
    restored.restore(saved["optimiser"])
    train(other, restored)
    assert again.step == 7
    assert again.seconds == 100.0
    torch.testing.assert_close(other.weight, net.weight)
    torch.testing.assert_close(other.bias, net.bias)
