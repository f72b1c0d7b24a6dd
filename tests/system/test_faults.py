"""What happens when a process dies: the text goes on, nothing hangs, nothing is left behind."""

import contextlib
import os
import signal
import threading
import time

import psutil
import pytest
from support.running import System, prompt_files, prompt_of, running, wait_until

from common.errors import DFlashError
from common.sdk import Client

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


@pytest.fixture
def system():
    with running() as started:
        yield started


def stream_and(system, act, prompt, after, max_tokens=200):
    """Stream one request; call `act` once `after` tokens have come. Returns (ids, stats)."""
    ids, stats = [], None
    with Client(run_dir=system.run_dir, timeout_s=60) as client:
        for event in client.stream(prompt, max_tokens=max_tokens, ignore_eos=True):
            if getattr(event, "ids", None):
                ids.extend(event.ids)
            if act is not None and len(ids) >= after:
                act()
                act = None
            stats = getattr(event, "stats", None) or stats
    return ids, stats


def test_killed_drafter_costs_time_and_no_output_and_comes_back(system):
    """kill -9 in the middle of a generation."""
    prompt = prompt_of(prompt_files()[0])
    undisturbed, _ = stream_and(system, None, prompt, 0)
    first = system.worker("drafter.1")["pid"]

    disturbed, stats = stream_and(system, lambda: os.kill(first, signal.SIGKILL), prompt, 20)

    assert disturbed == undisturbed or stats["near_ties"] > 0
    assert stats["drafts_sent"] > 0

    def back():
        worker = system.worker("drafter.1")
        return worker["state"] in ("ready", "busy") and worker["pid"] != first

    wait_until(back, "drafter.1 ready again")
    again, stats = stream_and(system, None, prompt, 0)
    assert again == undisturbed or stats["near_ties"] > 0
    assert stats["drafts_accepted"] > 0


def test_stopped_drafter_is_waited_for_only_until_the_deadline(system):
    """SIGSTOP: the connection stays, nothing answers; the text goes on plain."""
    prompt = prompt_of(prompt_files()[3])
    undisturbed, _ = stream_and(system, None, prompt, 0, max_tokens=400)
    pid = system.worker("drafter.1")["pid"]
    try:
        stopped, stats = stream_and(
            system, lambda: os.kill(pid, signal.SIGSTOP), prompt, 1, max_tokens=400
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    assert stopped == undisturbed or stats["near_ties"] > 0
    assert stats["plain_reasons"].get("no_draft_came", 0) > 0


def test_killed_target_is_a_typed_error_and_comes_back(system):
    """A client must never hang on a dead target; the next request works."""
    pid = system.worker("target.1")["pid"]
    started = time.monotonic()

    with pytest.raises(DFlashError) as caught:
        stream_and(system, lambda: os.kill(pid, signal.SIGKILL), "import os\n", 5, max_tokens=1500)

    assert caught.value.retryable
    assert time.monotonic() - started < 60

    def back():
        worker = system.worker("target.1")
        return worker["state"] in ("ready", "busy") and worker["pid"] != pid

    wait_until(back, "target.1 ready again", 60)
    ids, _ = stream_and(system, None, "import os\n", 0, max_tokens=8)
    assert len(ids) == 8


def test_four_requests_at_once_each_get_the_result_they_have_alone(system):
    """Interleaved rounds share the model, never the state."""
    prompts = [prompt_of(path) for path in prompt_files()[2:6]]
    alone = [stream_and(system, None, prompt, 0, max_tokens=100) for prompt in prompts]
    together = [None] * 4

    def ask(index):
        together[index] = stream_and(system, None, prompts[index], 0, max_tokens=100)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)

    for (ids, stats), (ids_alone, _) in zip(together, alone, strict=True):
        assert ids == ids_alone or stats["near_ties"] > 0
    assert sum(stats["drafts_accepted"] for _, stats in together) > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_foreground_run_ends_cleanly_on_a_signal(number):
    """`dflash-up` in a terminal, then Ctrl-C: exit 0 and nothing left."""
    system = System()
    process = system.popen()
    try:
        wait_until(
            lambda: (
                (system.run_dir / "launcher.sock").exists()
                and any(worker["state"] == "ready" for worker in system.ps())
            ),
            "a ready worker",
            90,
        )
        process.send_signal(number)

        assert process.wait(40) == 0
        wait_until(lambda: not system.processes(), "no process left", 5)
        assert not system.run_dir.exists()
    finally:
        process.kill()
        process.communicate()
        system.stop()


def test_launcher_killed_with_kill_9_leaves_no_process(system):
    """The kernel ends the children, or they see that their parent is gone."""
    launcher = next(
        process
        for process in system.processes()
        if psutil.pid_exists(process.pid) and process.pid in _launcher_pids(system)
    )
    children = [process for process in system.processes() if process.pid != launcher.pid]
    assert len(children) >= 3

    launcher.kill()

    wait_until(lambda: not system.processes(), "no process left", 10)
    system.start()  # a stale run folder does not stand in the way


def _launcher_pids(system):
    import json

    return {json.loads((system.run_dir / "pids.json").read_text())["launcher"]["pid"]}
