"""The worker's shell: registration, loss, draining, signals, data links."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from common.net.auth import new_keys
from common.net.links import Lost
from common.net.transport import CONTROL_LINK, Endpoint, Peer
from common.net.worker import WorkerShell
from common.net.zeromq import AsyncRouter
from common.wire.messages import (
    Bye,
    Close,
    Drain,
    Heartbeat,
    Hello,
    Link,
    LinkRefused,
    Progress,
    Ready,
    Reject,
    Renew,
    Welcome,
)
from common.wire.version import MAJOR, MINOR

LIMIT_S = 20.0


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="df-", dir="/tmp") as path:
        yield Path(path)


def hello(name="drafter.1"):
    return Hello(name.partition(".")[0], name, MAJOR, MINOR, "0", os.getpid())


class Echo:
    """Answers Close with the same Close, on whatever link; remembers losses."""

    def __init__(self, shell):
        self.shell, self.lost, self.seen, self.sessions = shell, [], [], 0
        self.threads = set()

    def on_message(self, peer, message, now):
        self.threads.add(threading.get_ident())
        self.seen.append((peer, message))
        if isinstance(message, Close | Renew):
            self.shell.send(peer, hello(message.session))

    def on_lost(self, peer, now):
        self.lost.append(peer)

    def work(self, now):
        return False

    def next_deadline(self):
        return None

    def on_time(self, now):
        raise AssertionError("no deadline was named")

    def heartbeat(self):
        return "ready", self.sessions, {"rounds": 3}


async def expect(router, kind):
    """The next arrival of a kind; other kinds are skipped."""
    while True:
        received = await router.recv()
        if isinstance(received.body, kind):
            return received


def scenario(folder, talk, *, actor=Echo, **options):
    """Run a shell in a thread against a router on this loop; returns exit code and actor."""
    address = f"ipc://{folder}/control.sock"
    made = []

    def work():
        with WorkerShell(
            role="drafter",
            name="drafter.1",
            control=Endpoint(address),
            hello=hello,
            heartbeat_ms=50,
            **options,
        ) as shell:
            made.append(actor(shell))
            shell.report(Ready(2))
            return shell.run(made[0])

    async def main():
        router = AsyncRouter()
        router.bind(address)
        running = asyncio.create_task(asyncio.to_thread(work))
        try:
            await talk(router, lambda: made[0])
            return await running
        finally:
            router.close()

    return asyncio.run(asyncio.wait_for(main(), LIMIT_S)), made[0]


async def joined(router):
    peer = (await expect(router, Hello)).id
    router.send(peer, Welcome("n", 50))
    await expect(router, Ready)
    return peer


def test_worker_joins_beats_answers_and_leaves(folder):
    """The whole life of a worker, once."""

    async def talk(router, _):
        peer = await joined(router)
        beat = (await expect(router, Heartbeat)).body
        assert (beat.state, beat.counters["rounds"]) == ("ready", 3)
        assert beat.rss_bytes > 0
        router.send(peer, Close("s"))
        assert (await expect(router, Hello)).body.name == "s"
        router.send(peer, Bye("done"))
        assert (await expect(router, Bye)).id == peer

    code, echo = scenario(folder, talk)
    assert code == 0
    assert len(echo.threads) == 1


def test_progress_is_heard_before_the_actor_exists(folder):
    """Loading takes minutes; the start-up view must move meanwhile."""
    address = f"ipc://{folder}/control.sock"

    async def main():
        router = AsyncRouter()
        router.bind(address)
        shell = await asyncio.to_thread(
            WorkerShell, role="target", name="target.1", control=Endpoint(address), hello=hello
        )
        await expect(router, Hello)
        shell.report(Progress("load", 0.5))
        assert (await expect(router, Progress)).body.done == 0.5
        assert (await expect(router, Heartbeat)).body.state == "starting"
        await asyncio.to_thread(shell.close)
        router.close()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_restarted_coordinator_gets_hello_and_ready_again(folder):
    """A worker that believes it is registered waits for ever."""

    async def talk(router, echo):
        await joined(router)
        router.close()
        second = AsyncRouter()
        second.bind(f"ipc://{folder}/control.sock")
        peer = await joined(second)
        while not echo().lost:
            await asyncio.sleep(0.005)
        second.send(peer, Bye(""))
        await expect(second, Bye)
        second.close()

    code, echo = scenario(folder, talk)
    assert code == 0
    assert echo.lost == [Peer(CONTROL_LINK)]


def test_unknown_to_the_coordinator_means_register_again(folder):
    """A worker that was given up while it slept must come back by itself."""

    async def talk(router, _):
        peer = await joined(router)
        router.send(peer, Reject("unknown", "you were silent for 2 s"))
        await joined(router)
        router.send(peer, Bye(""))

    code, echo = scenario(folder, talk)
    assert code == 0
    assert echo.lost == [Peer(CONTROL_LINK)]


def test_refused_model_ends_with_its_exit_code(folder):
    """Retrying a wrong checkpoint for ever hides the reason."""

    async def talk(router, _):
        peer = (await expect(router, Hello)).id
        router.send(peer, Reject("model_mismatch", "fc_hash differs"))

    assert scenario(folder, talk)[0] == 5


def test_drain_is_told_and_waits_for_goodbye(folder):
    """A drained worker must not leave before the coordinator agrees that it is empty."""

    async def talk(router, _):
        peer = await joined(router)
        router.send(peer, Drain("drafter.1"))
        while (await expect(router, Heartbeat)).body.state != "draining":
            pass
        router.send(peer, Bye("drained"))

    assert scenario(folder, talk)[0] == 0


def test_busy_compute_thread_shows_in_the_heartbeat(folder):
    """A busy loop answers pings for ever; only its progress age tells."""

    class Busy(Echo):
        def on_message(self, peer, message, now):
            while not any(thread.name == "let go" for thread in threading.enumerate()):
                time.sleep(0.001)

    async def talk(router, _):
        peer = await joined(router)
        router.send(peer, Close("s"))
        while (await expect(router, Heartbeat)).body.progress_age_ms < 200:
            pass
        done = threading.Event()
        helper = threading.Thread(target=done.wait, name="let go")
        helper.start()
        while (await expect(router, Heartbeat)).body.progress_age_ms > 100:
            pass
        done.set()
        router.send(peer, Bye(""))

    assert scenario(folder, talk, actor=Busy)[0] == 0


def test_message_is_read_between_two_pieces_of_work(folder):
    """Prefill of a long prompt must not hold up another session's round."""

    class Working(Echo):
        pieces, read_after = 0, None

        def work(self, now):
            self.pieces += 1
            return self.read_after is None

        def on_message(self, peer, message, now):
            self.read_after = self.pieces

    async def talk(router, actor):
        peer = await joined(router)
        while not actor().pieces:
            await asyncio.sleep(0.001)
        actor().shell._io._ending.set()  # no help from the other thread
        router.send(peer, Close("s"))
        while actor().read_after is None:
            await asyncio.sleep(0.001)
        router.send(peer, Bye(""))

    code, actor = scenario(folder, talk, actor=Working)
    assert code == 0
    assert actor.read_after > 0


def test_junk_from_the_coordinator_is_counted(folder):
    """A message that this role must not get is dropped, and seen in `ps`."""

    async def talk(router, _):
        peer = await joined(router)
        router.send(peer, Ready(1))  # workers send Ready, they do not get it
        while not (await expect(router, Heartbeat)).body.counters["bad_messages"]:
            pass
        router.send(peer, Bye(""))

    code, echo = scenario(folder, talk)
    assert code == 0
    assert echo.seen == []


class Target(Echo):
    def on_message(self, peer, message, now):
        super().on_message(peer, message, now)
        if isinstance(message, Link):
            self.shell.send(peer, LinkRefused(message.session, message.ticket, "no"))


class Drafter(Echo):
    """Dials whatever endpoint a Renew's ticket names, and hangs up on Close."""

    server_key = ""

    def on_message(self, peer, message, now):
        self.seen.append((peer, message))
        if isinstance(message, Renew):
            self.peer = self.shell.dial(message.ticket, self.server_key)
            assert self.shell.send(self.peer, Link("s", 0, "t", 0))
        if isinstance(message, Close):
            self.shell.hang_up(self.peer)
            assert not self.shell.send(self.peer, Link("s", 0, "t", 0))


def test_data_link_over_ipc_and_its_end(folder):
    """Link goes out on a fresh dial, the answer comes back, hanging up is a loss over there."""
    address = f"ipc://{folder}/data.sock"

    def target():
        with WorkerShell(
            role="target",
            name="target.1",
            control=Endpoint(f"ipc://{folder}/other.sock"),
            hello=lambda: hello("target.1"),
            data_bind=address,
        ) as shell:
            actor = Target(shell)
            threading.Thread(target=stop_when_lost, args=(shell, actor)).start()
            shell.run(actor)
            return actor

    def stop_when_lost(shell, actor):
        while not actor.lost:
            time.sleep(0.002)
        shell._handover.put(stop())
        shell._handover.wake()

    async def talk(router, drafter):
        peer = await joined(router)
        serving = asyncio.create_task(asyncio.to_thread(target))
        router.send(peer, Renew("s", address))
        while not any(isinstance(message, LinkRefused) for _, message in drafter().seen):
            await asyncio.sleep(0.002)
        router.send(peer, Close("s"))
        far = await serving
        assert [type(message) for _, message in far.seen] == [Link]
        assert far.lost == [far.seen[0][0]]
        router.send(peer, Bye(""))

    code, drafter = scenario(folder, talk, actor=Drafter)
    assert code == 0
    assert drafter.lost == []  # it hung up itself


def stop():
    from common.net.handover import Stop

    return Stop(0, "test is over")


def test_dialling_nobody_is_a_loss(folder, monkeypatch):
    """An Attach to a target that is gone must end in LinkLost, not in waiting."""
    monkeypatch.setattr("common.net.worker_io.DIAL_S", 0.05)

    async def talk(router, drafter):
        peer = await joined(router)
        router.send(peer, Renew("s", f"ipc://{folder}/nobody.sock"))
        while not drafter().lost:
            await asyncio.sleep(0.002)
        router.send(peer, Bye(""))

    _, drafter = scenario(folder, talk, actor=Drafter)
    assert drafter.lost == [Peer(f"ipc://{folder}/nobody.sock")]


@pytest.mark.parametrize(("role", "is_heard"), [("drafter", True), ("client", False)])
def test_data_link_over_tcp_is_for_drafter_keys(folder, role, is_heard):
    """A client's key must not read features."""
    own = new_keys(folder / "keys", "target-host", "target")
    guest = new_keys(folder / "keys", "guest", role)
    shell = WorkerShell(
        role="target",
        name="target.1",
        control=Endpoint(f"ipc://{folder}/none.sock"),
        hello=lambda: hello("target.1"),
        keys=own,
        data_bind="tcp://127.0.0.1:*",
    )
    far = WorkerShell(
        role="drafter",
        name="drafter.1",
        control=Endpoint(f"ipc://{folder}/none.sock"),
        hello=hello,
        keys=guest,
    )
    with shell, far:
        peer = far.dial(shell.data_endpoint, shell.data_public_key)
        far.send(peer, Link("s", 0, "t", 0))
        deadline = time.monotonic() + LIMIT_S
        while shell._handover.is_empty() and not shell._io.counters["bad_messages"]:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert shell._handover.is_empty() != is_heard


CHILD = """
import os, sys, time
sys.path.insert(0, sys.argv[2])
from test_worker import Echo, hello
from common.net.transport import Endpoint
from common.net.worker import WorkerShell
from common.wire.messages import Ready
shell = WorkerShell(role="drafter", name="drafter.1", control=Endpoint(sys.argv[1]), hello=hello,
                    heartbeat_ms=50, parent_pid=int(sys.argv[3]))
echo = Echo(shell)
echo.sessions = int(sys.argv[4])
shell.report(Ready(1))
sys.exit(shell.run(echo))
"""


def child_scenario(folder, talk, *, parent=None, sessions=0):
    address = f"ipc://{folder}/control.sock"

    async def main():
        router = AsyncRouter()
        router.bind(address)
        here = str(Path(__file__).parent)
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, address, here, str(parent or os.getpid()), str(sessions)]
        )
        try:
            await talk(router, child)
            return await asyncio.to_thread(child.wait, LIMIT_S)
        finally:
            child.kill()
            child.wait()
            router.close()

    return asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_first_signal_drains_and_says_goodbye(folder):
    """SIGTERM must not cut a request that could finish."""

    async def talk(router, child):
        await joined(router)
        child.send_signal(signal.SIGTERM)
        assert (await expect(router, Bye)).body.reason == "drained"

    assert child_scenario(folder, talk) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_second_signal_leaves_at_once(folder, number, code):
    """A person who presses Ctrl-C twice means it."""

    async def talk(router, child):
        await joined(router)
        child.send_signal(number)
        while (await expect(router, Heartbeat)).body.state != "draining":
            pass
        child.send_signal(number)

    assert child_scenario(folder, talk, sessions=1) == code


def test_worker_ends_with_its_parent(folder):
    """An orphan keeps a GPU busy for nobody."""

    async def talk(router, child):
        """It may leave before it connects."""

    assert child_scenario(folder, talk, parent=1) == 1


def test_killed_worker_is_lost_at_once(folder):
    """kill -9 of a worker must be seen in milliseconds, not after missed heartbeats."""

    async def talk(router, child):
        peer = await joined(router)
        child.kill()
        assert (await asyncio.wait_for(expect(router, Lost), 1.0)).id == peer

    assert child_scenario(folder, talk) == -signal.SIGKILL
