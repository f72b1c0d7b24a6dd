"""A whole run with a real coordinator and stand-in workers: orders, logs, nothing left."""

import asyncio
import sys
import threading

import pytest

from common.config import load
from common.errors import BadRequest, PeerLost
from common.launcher import launch, up
from common.launcher.logs import read_logs
from common.launcher.orders import ask
from common.launcher.plan import ProcessSpec, make_spec

STAND_IN = (sys.executable, "-c", "import time; print('stand-in', flush=True); time.sleep(60)")


def stand_ins(config, folder, roles=()):
    """The real coordinator, and workers that never say hello."""
    coordinator = make_spec(config, folder, "coordinator", 1)
    workers = [
        ProcessSpec(name, name.split(".")[0], STAND_IN, {}, 60.0, 3, 0.1)
        for name in ("target.1", "drafter.1")
    ]
    return [coordinator, *workers]


@pytest.fixture
def resolved(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "plan", stand_ins)
    monkeypatch.setattr(launch, "check_models", lambda config: None)
    return load(None, {"run.run_dir": str(tmp_path / "run"), "run.grace_s": 1.0}, {})


def with_run(resolved, work):
    """Do blocking work in a thread while a run is up; returns what it returned."""

    async def main():
        async with launch.launched(resolved) as (supervisor, _, run_dir):
            while not any(row.state == "ready" for row in supervisor.rows()):
                await asyncio.sleep(0.02)
            return await asyncio.to_thread(work, run_dir.path)

    return asyncio.run(main())


def test_ps_shows_every_process_and_down_leaves_nothing(resolved, tmp_path):
    """The order socket, from a command's side."""

    def work(folder):
        snapshot = ask(folder, "ps")
        sockets = sorted(path.name for path in folder.glob("*.sock"))
        ask(folder, "down")
        return snapshot, sockets

    snapshot, sockets = with_run(resolved, work)
    rows = {row["name"]: row for row in snapshot["processes"]}
    assert list(rows) == ["coordinator", "target.1", "drafter.1"]
    assert rows["coordinator"]["state"] == "ready"
    assert rows["target.1"]["state"] == "starting"
    assert snapshot["state"] == "starting"
    assert sockets == ["control.sock", "launcher.sock"]
    assert not (tmp_path / "run").exists()
    with pytest.raises(PeerLost):
        ask(tmp_path / "run", "ps")


def test_orders_that_make_no_sense_come_back_as_typed_errors(resolved):
    """The error crosses the socket with its type, so that the exit code is right."""

    def work(folder):
        with pytest.raises(BadRequest, match="scale target=0"):
            ask(folder, "scale", target=0)
        with pytest.raises(BadRequest, match="no worker"):
            ask(folder, "restart", name="coordinator")
        with pytest.raises(BadRequest, match="known: ps"):
            ask(folder, "dance")

    with_run(resolved, work)


def test_logs_of_all_processes_are_kept_and_named(resolved):
    """`logs NAME` is the first thing an operator types when something is odd."""

    def work(folder):
        lines = []
        for _ in range(200):
            lines = list(read_logs(folder, None, follow=False))
            if sum("stand-in" in line for line in lines) == 2:
                break
            threading.Event().wait(0.02)
        with pytest.raises(BadRequest, match=r"there are coordinator, drafter\.1, target\.1"):
            list(read_logs(folder, "nobody", follow=False))
        return lines, list(read_logs(folder, "target.1", follow=False))

    lines, of_target = with_run(resolved, work)
    assert of_target == ["stand-in"]
    assert any("coordinator | info listening" in line for line in lines)


def test_stop_clears_what_a_killed_launcher_left(tmp_path):
    """`down` must work after `kill -9` of the launcher, too."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "control.sock").write_text("")
    assert up.stop(folder, 1.0) is True
    assert not folder.exists()
    assert up.stop(folder, 1.0) is False
