"""The supervisor over tiny fake processes: order, restarts, ends, nothing left."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from common.config import load
from common.errors import BadRequest, DFlashError, ModelMismatch, NotReady
from common.launcher.plan import ProcessSpec
from common.launcher.rundir import ProcessId, claim, read_pids
from common.launcher.scaling import restart, scale
from common.launcher.supervisor import Supervisor

SLEEP = "import time; time.sleep(60)"


class FakeLink:
    """A coordinator that calls every process ready whose pid file appeared."""

    def __init__(self):
        self.ready = True
        self.gone = []
        self.drained = []
        self.supervisor = None

    async def status(self):
        pids = {} if self.supervisor is None else self.supervisor.alive()
        workers = [
            {"name": name, "pid": pid, "state": "ready" if self.ready else "starting"}
            for name, pid in pids.items()
        ]
        return {"workers": workers, "requests": {"running": 0, "queued": 0}}

    async def exited(self, name, reason):
        self.gone.append((name, reason))

    async def drain(self, name, timeout_s):
        self.drained.append(name)
        return True


class Watched(Supervisor):
    def alive(self):
        return {child.spec.name: child.id.pid for child in self.children if child.is_alive}


def spec(name, program=SLEEP, **changes):
    values = {
        "name": name,
        "role": name.split(".")[0],
        "argv": (sys.executable, "-c", program),
        "environ": {},
        "ready_timeout_s": 20.0,
        "restarts": 3,
        "backoff_s": 0.01,
    }
    return ProcessSpec(**{**values, **changes})


def trio(**target):
    return [spec("coordinator", restarts=0), spec("target.1", **target), spec("drafter.1")]


async def until(condition, timeout_s=10.0):
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, "the condition did not come true in time"
        await asyncio.sleep(0.01)


@pytest.fixture
def run_dir(tmp_path):
    run = claim(tmp_path / "run")
    yield run
    run.release()


def drive(run_dir, specs, story, **flags):
    """Run a supervisor while `story(supervisor, link)` happens; returns (code, link, pids)."""

    async def main():
        link = FakeLink()
        config = load(None, {"run.grace_s": 1.0, **flags}, {}).config
        supervisor = Watched(config, run_dir, specs, link, lambda rows, status: None)
        link.supervisor = supervisor
        task = asyncio.create_task(supervisor.run())
        seen = {}
        try:
            await story(supervisor, link, seen)
        finally:
            supervisor.end()
            code = await task
        return code, link, seen

    return asyncio.run(main())


def all_ready(supervisor):
    return lambda: all(child.state == "ready" for child in supervisor.children)


def test_orderly_end_leaves_no_process(run_dir):
    """The one promise of a launcher."""

    async def story(supervisor, link, seen):
        await until(all_ready(supervisor))
        seen.update(supervisor.alive())

    code, _, seen = drive(run_dir, trio(), story)
    assert code == 0
    assert set(seen) == {"coordinator", "target.1", "drafter.1"}
    assert not any(psutil.pid_exists(pid) for pid in seen.values())


def test_written_pids_are_those_of_the_processes(run_dir):
    """`down` after a crash of the launcher goes by this file."""

    async def story(supervisor, link, seen):
        await until(all_ready(supervisor))
        written = {name: entry.pid for name, entry in read_pids(run_dir.path).items()}
        assert written == {"launcher": os.getpid(), **supervisor.alive()}

    drive(run_dir, trio(), story)


def test_killed_drafter_is_reported_and_comes_back(run_dir):
    """The coordinator hears of a death at once, not after missed heartbeats."""

    async def story(supervisor, link, seen):
        await until(all_ready(supervisor))
        first = supervisor.alive()["drafter.1"]
        os.kill(first, signal.SIGKILL)
        await until(lambda: supervisor.alive().get("drafter.1", first) != first)
        await until(all_ready(supervisor))
        seen["restarts"] = [row.restarts for row in supervisor.rows()]

    _, link, seen = drive(run_dir, trio(), story)
    assert seen["restarts"] == [0, 0, 1]
    assert link.gone[0] == ("drafter.1", "SIGKILL: SIGKILL")


def test_end_of_the_coordinator_ends_the_run(run_dir):
    """Workers without a coordinator serve nobody."""

    async def story(supervisor, link, seen):
        await until(all_ready(supervisor))
        os.kill(supervisor.alive()["coordinator"], signal.SIGKILL)
        await until(lambda: not supervisor.alive())

    with pytest.raises(DFlashError, match=r"coordinator ended \(SIGKILL"):
        drive(run_dir, trio(), story)


def test_target_that_cannot_live_ends_the_run_after_its_tries(run_dir):
    """A crash loop before the first token must not look like a slow start."""
    broken = "import sys; sys.exit('| error no memory')"

    async def story(supervisor, link, seen):
        await until(lambda: not supervisor.alive() and supervisor.children[1].state == "given up")
        seen["restarts"] = supervisor.children[1].n_restarts

    with pytest.raises(DFlashError, match=r"target\.1 ended \(exit 1: no memory\)"):
        drive(run_dir, trio(argv=(sys.executable, "-c", broken)), story)


def test_mismatch_at_start_ends_the_run_with_its_code_at_once(run_dir):
    """Exit 5 will not get better by trying again."""
    program = "import sys; print('x | error fc_hash differs', file=sys.stderr); sys.exit(5)"

    async def story(supervisor, link, seen):
        link.ready = False
        await until(lambda: supervisor.children[2].state == "given up")
        assert supervisor.children[2].n_restarts == 0

    specs = [*trio()[:2], spec("drafter.1", program)]
    with pytest.raises(ModelMismatch, match="fc_hash differs") as caught:
        drive(run_dir, specs, story)
    assert caught.value.exit_code == 5


def test_start_that_takes_too_long_is_not_ready(run_dir):
    """Every wait has an end."""

    async def story(supervisor, link, seen):
        link.ready = False
        await until(lambda: not supervisor.alive() and supervisor.children[1].state != "waiting")

    with pytest.raises(NotReady, match=r"target\.1: not ready in 0\.2 s"):
        drive(run_dir, trio(ready_timeout_s=0.2), story)


def test_scale_up_starts_and_scale_down_drains_the_highest(run_dir, monkeypatch):
    """Draining before the end is what keeps running requests whole."""
    monkeypatch.setattr(
        "common.launcher.supervisor.make_spec",
        lambda config, folder, role, index, place: spec(f"{role}.{index}"),
    )

    async def story(supervisor, link, seen):
        await until(all_ready(supervisor))
        seen["up"] = await scale(supervisor, "drafter", 3)
        await until(all_ready(supervisor))
        seen["down"] = await scale(supervisor, "drafter", 1)
        seen["left"] = set(supervisor.alive())

    _, link, seen = drive(run_dir, trio(), story)
    assert seen["up"] == ["drafter.2", "drafter.3"]
    assert seen["down"] == ["drafter.2", "drafter.3"]
    assert sorted(link.drained) == ["drafter.2", "drafter.3"]
    assert seen["left"] == {"coordinator", "target.1", "drafter.1"}


def test_workers_of_a_coordinator_elsewhere_count_as_ready_once_started(run_dir):
    """`up --only drafter --wait` must return, although nobody here can ask the coordinator."""

    async def story(supervisor, link, seen):
        link.ready = False
        assert await supervisor.wait_until_settled()
        seen["state"] = supervisor.state()

    _, _, seen = drive(run_dir, [spec("drafter.1@box")], story)
    assert seen["state"] == "ready"


@pytest.mark.parametrize(("role", "n"), [("target", 0), ("drafter", -1), ("coordinator", 2)])
def test_scale_refuses_what_makes_no_sense(run_dir, role, n):
    """No target at all is `down`, and there is one coordinator."""

    async def story(supervisor, link, seen):
        await until(all_ready(supervisor))
        with pytest.raises(BadRequest, match=f"scale {role}={n}"):
            await scale(supervisor, role, n)

    drive(run_dir, trio(), story)


def test_restart_gives_the_same_name_a_new_process(run_dir):
    """A rolling restart keeps names, so logs and dashboards go on."""

    async def story(supervisor, link, seen):
        await until(all_ready(supervisor))
        before = supervisor.alive()["target.1"]
        await restart(supervisor, "target.1")
        await until(all_ready(supervisor))
        assert supervisor.alive()["target.1"] != before
        with pytest.raises(BadRequest, match="no worker"):
            await restart(supervisor, "target.7")

    _, link, _ = drive(run_dir, trio(), story)
    assert link.drained == ["target.1"]


def test_workers_live_until_the_coordinator_has_let_requests_finish(run_dir):
    """The first Ctrl-C lets answers finish: their target must not be gone before."""
    slow = """
        import signal, sys, time
        def end(*_):
            time.sleep(0.4)
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        time.sleep(60)
    """
    program = (sys.executable, "-c", textwrap.dedent(slow))

    async def story(supervisor, link, seen):
        await until(all_ready(supervisor))
        await asyncio.sleep(0.2)  # for the fake to set its handler
        supervisor.end()
        while "coordinator" in (alive := supervisor.alive()):
            seen["left"] = set(alive)
            await asyncio.sleep(0.01)

    specs = [spec("coordinator", argv=program), *trio()[1:]]
    code, _, seen = drive(run_dir, specs, story)
    assert code == 0
    assert "target.1" in seen["left"]


def test_second_signal_kills_and_exits_forced(run_dir):
    """A user who presses Ctrl-C twice means it."""
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"

    async def story(supervisor, link, seen):
        await until(all_ready(supervisor))
        supervisor.on_signal(signal.SIGINT)
        supervisor.on_signal(signal.SIGINT)
        await until(lambda: not supervisor.alive())

    code, _, _ = drive(run_dir, trio(argv=(sys.executable, "-c", stubborn)), story)
    assert code == 130


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel for the signal")
def test_kill_nine_of_the_launcher_leaves_no_child(tmp_path):
    """Nobody is left to clean up, so the kernel must."""
    program = textwrap.dedent(
        f"""
        import asyncio, sys
        from common.launcher.plan import ProcessSpec
        from common.launcher.processes import Child
        from pathlib import Path

        async def main():
            argv = (sys.executable, "-c", {SLEEP!r})
            spec = ProcessSpec("x.1", "target", argv, {{}}, 9.0, 3, 0.1)
            child = Child(spec, Path({str(tmp_path)!r}))
            await child.start()
            print(child.id.pid, flush=True)
            await child.wait()

        asyncio.run(main())
        """
    )
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    child = ProcessId.of(int(launcher.stdout.readline()))
    assert child.find()
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    asyncio.run(until(lambda: child.find() is None, timeout_s=2.0))
