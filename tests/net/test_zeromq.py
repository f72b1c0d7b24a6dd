"""Routers and clients over real sockets: delivery, loss, marks, keys."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from common.errors import (
    AddressInUse,
    AuthRefused,
    ConfigError,
    KeyFault,
    NotReady,
    PeerLost,
    PeerSilent,
    WireError,
)
from common.net.auth import new_keys, revoke_keys, server_key
from common.net.links import Lost
from common.net.transport import Endpoint
from common.net.zeromq import AsyncClientLink, AsyncRouter, ClientLink
from common.wire.messages import Bye, Cancel, Status, StatusRequest

LIMIT_S = 20.0


@pytest.fixture
def folder():
    """A short private folder: pytest's own paths are over the socket limit on some systems."""
    with tempfile.TemporaryDirectory(prefix="df-", dir="/tmp") as path:
        yield Path(path)


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, LIMIT_S))


async def greeted(router, link):
    """Let a client be known to the router; returns its routing id and role."""
    await link.connect()
    link.send(StatusRequest("hello"))
    peer, body, role, _ = await router.recv()
    assert body == StatusRequest("hello")
    return peer, role


def test_message_and_answer_over_ipc(folder):
    """The plainest use of all."""

    async def scenario():
        router = AsyncRouter()
        address = router.bind(f"ipc://{folder}/c.sock")
        link = AsyncClientLink(Endpoint(address))
        peer, role = await greeted(router, link)
        assert role == ""
        assert router.send(peer, Status("hello", "{}"))
        assert await link.recv(LIMIT_S) == Status("hello", "{}")
        link.close()
        router.close()

    run(scenario())


def test_socket_file_is_private(folder):
    """On ipc the file mode is the only lock."""

    async def scenario():
        router = AsyncRouter()
        router.bind(f"ipc://{folder}/c.sock")
        assert (folder / "c.sock").stat().st_mode & 0o777 == 0o600
        router.close()

    run(scenario())


def test_many_messages_keep_their_order(folder):
    """Edge-triggered descriptors lose wake-ups when a look does not drain."""

    async def scenario():
        router = AsyncRouter()
        link = AsyncClientLink(Endpoint(router.bind(f"ipc://{folder}/c.sock")))
        peer, _ = await greeted(router, link)
        for index in range(900):
            assert router.send(peer, Status(str(index), ""))
        for index in range(900):
            assert (await link.recv(LIMIT_S)).request == str(index)
        link.close()
        router.close()

    run(scenario())


def test_client_that_leaves_is_lost_and_refused(folder):
    """Sending into nowhere must fail, not succeed silently."""

    async def scenario():
        router = AsyncRouter()
        link = AsyncClientLink(Endpoint(router.bind(f"ipc://{folder}/c.sock")))
        peer, _ = await greeted(router, link)
        link.close()
        assert await router.recv() == (peer, Lost(), "", "")
        assert not router.send(peer, Bye(""))
        router.close()

    run(scenario())


CHILD = """
import signal, sys
from common.net.transport import Endpoint
from common.net.zeromq import ClientLink
from common.wire.messages import StatusRequest
link = ClientLink(Endpoint(sys.argv[1])).connect()
link.send(StatusRequest("child"))
signal.pause()
"""


def test_killed_process_is_lost_at_once(folder):
    """A dead drafter must cost one round, not three heartbeats."""

    async def scenario():
        router = AsyncRouter()
        address = router.bind(f"ipc://{folder}/c.sock")
        child = subprocess.Popen([sys.executable, "-c", CHILD, address])
        peer, body, *_ = await router.recv()
        assert body == StatusRequest("child")
        os.kill(child.pid, signal.SIGKILL)
        lost = await asyncio.wait_for(router.recv(), 1.0)
        assert lost == (peer, Lost(), "", "")
        child.wait()
        router.close()

    run(scenario())


def test_peer_at_its_mark_is_refused(folder):
    """Without mandatory routing 2000 sends to a slow peer "succeed" and 11 arrive."""

    async def scenario():
        router = AsyncRouter(hwm=4)
        link = AsyncClientLink(Endpoint(router.bind(f"ipc://{folder}/c.sock")))
        peer, _ = await greeted(router, link)
        big = Status("r", "x" * 40_000)
        assert not all(router.send(peer, big) for _ in range(5000))
        link.close()
        router.close()

    run(scenario())


def test_client_waits_for_a_late_bind(folder):
    """Start order of processes must not matter."""

    async def scenario():
        address = f"ipc://{folder}/late.sock"
        link = AsyncClientLink(Endpoint(address))
        waiting = asyncio.create_task(link.connect())
        with pytest.raises(PeerLost):
            link.send(Cancel("too early"))
        router = AsyncRouter()
        router.bind(address)
        await waiting
        link.send(Cancel("r"))
        assert (await router.recv()).body == Cancel("r")
        link.close()
        router.close()

    run(scenario())


def test_junk_is_reported_and_the_link_lives(folder):
    """One bad message must neither vanish nor end the service."""

    async def scenario():
        router = AsyncRouter()
        link = AsyncClientLink(Endpoint(router.bind(f"ipc://{folder}/c.sock")))
        peer, _ = await greeted(router, link)
        link._link.send_frames([b"GET / HTTP/1.1", b""])
        assert isinstance((await router.recv()).body, WireError)
        link.send(Cancel("r"))
        assert await router.recv() == (peer, Cancel("r"), "", "")
        link.close()
        router.close()

    run(scenario())


def test_second_binder_is_refused_and_the_first_lives(folder):
    """libzmq unlinks the socket of a living process before it binds."""

    async def scenario():
        router, second = AsyncRouter(), AsyncRouter()
        address = router.bind(f"ipc://{folder}/c.sock")
        with pytest.raises(AddressInUse):
            second.bind(address)
        link = AsyncClientLink(Endpoint(address))
        await greeted(router, link)
        for end in (link, second, router):
            end.close()

    run(scenario())


def test_path_over_the_limit_is_refused_by_name(folder):
    """libzmq's own message is "File name too long", without the limit."""

    async def scenario():
        router = AsyncRouter()
        with pytest.raises(ConfigError, match="shorter run directory"):
            router.bind(f"ipc://{folder}/{'x' * 120}")
        router.close()

    run(scenario())


def test_stale_socket_file_is_taken_over(folder):
    """A killed coordinator leaves its socket file behind."""

    async def scenario():
        (folder / "c.sock").touch()
        router = AsyncRouter()
        link = AsyncClientLink(Endpoint(router.bind(f"ipc://{folder}/c.sock")))
        await greeted(router, link)
        link.close()
        router.close()

    run(scenario())


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "tcp://0.0.0.0:*"])
def test_tcp_without_keys_is_refused(address):
    """An open port without CURVE is the accident that the design rules out."""

    async def scenario():
        router = AsyncRouter()
        with pytest.raises(KeyFault):
            router.bind(address)
        router.close()

    run(scenario())


def test_insecure_is_for_loopback_only():
    """`insecure` must not open a port to the world."""

    async def scenario():
        router = AsyncRouter()
        assert router.bind("tcp://127.0.0.1:*", is_insecure=True)
        with pytest.raises(KeyFault):
            router.bind("tcp://0.0.0.0:*", is_insecure=True)
        router.close()

    run(scenario())


def keyed(folder):
    server = new_keys(folder / "server", "coordinator", "coordinator")
    client = new_keys(folder / "server", "gpu-2", "drafter")
    return server, client


def test_listed_key_connects_with_its_role(folder):
    """The role must come from the key, not from what the peer says."""

    async def scenario():
        server, client = keyed(folder)
        router = AsyncRouter()
        address = router.bind("tcp://127.0.0.1:*", server)
        link = AsyncClientLink(Endpoint(address, server_key(folder / "server")), client)
        peer, role = await greeted(router, link)
        assert role == "drafter"
        assert router.send(peer, Bye(""))
        assert await link.recv(LIMIT_S) == Bye("")
        link.close()
        router.close()

    run(scenario())


def test_unlisted_key_is_refused(folder):
    """CURVE without an allow-list accepts any key."""

    async def scenario():
        server, _ = keyed(folder)
        stranger = new_keys(folder / "elsewhere", "gpu-2", "drafter")
        router = AsyncRouter()
        address = router.bind("tcp://127.0.0.1:*", server)
        link = AsyncClientLink(Endpoint(address, server.public_key), stranger)
        with pytest.raises(AuthRefused):
            await link.connect()
        link.close()
        router.close()

    run(scenario())


@pytest.mark.parametrize("case", ["wrong server key", "no key"])
def test_peer_without_the_right_keys_never_gets_through(folder, case):
    """Neither a plain peer nor one that trusts another server may be heard."""

    async def scenario():
        server, client = keyed(folder)
        other = new_keys(folder / "other", "coordinator", "coordinator")
        router = AsyncRouter()
        address = router.bind("tcp://127.0.0.1:*", server)
        trusted = other.public_key if case == "wrong server key" else ""
        link = AsyncClientLink(Endpoint(address, trusted), client if trusted else None)
        with pytest.raises((AuthRefused, NotReady, PeerLost)):
            await link.connect(0.5)
        link.close()
        router.close()

    run(scenario())


def test_revoked_key_loses_its_role_on_a_living_connection(folder):
    """Revoking must not wait for the peer to reconnect."""

    async def scenario():
        server, client = keyed(folder)
        router = AsyncRouter()
        address = router.bind("tcp://127.0.0.1:*", server)
        link = AsyncClientLink(Endpoint(address, server.public_key), client)
        await greeted(router, link)
        revoke_keys(folder / "server", "gpu-2")
        role = "drafter"
        while role:
            link.send(Cancel("r"))
            role = (await router.recv()).role
            await asyncio.sleep(0.02)
        link.close()
        router.close()

    run(scenario())


def test_ipc_and_tcp_are_read_as_one(folder):
    """Local workers come over ipc, remote ones over tcp, to one coordinator."""

    async def scenario():
        server, client = keyed(folder)
        router = AsyncRouter()
        ipc = router.bind(f"ipc://{folder}/c.sock")
        tcp = router.bind("tcp://127.0.0.1:*", server)
        near, far = (
            AsyncClientLink(Endpoint(ipc)),
            AsyncClientLink(Endpoint(tcp, server.public_key), client),
        )
        near_id, near_role = await greeted(router, near)
        far_id, far_role = await greeted(router, far)
        assert (near_role, far_role) == ("", "drafter")
        assert near_id != far_id
        assert router.send(far_id, Bye("far"))
        assert await far.recv(LIMIT_S) == Bye("far")
        for end in (near, far, router):
            end.close()

    run(scenario())


def test_plain_client_raises_what_happened(folder):
    """A script must be able to tell silence from loss."""

    async def serve(stop):
        router = AsyncRouter()
        router.bind(f"ipc://{folder}/c.sock")
        peer, *_ = await router.recv()
        router.send(peer, Status("r", "{}"))
        await stop.wait()
        router.close()

    def client(loop, stop):
        with ClientLink(Endpoint(f"ipc://{folder}/c.sock")).connect() as link:
            link.send(StatusRequest("r"))
            assert link.recv(LIMIT_S) == Status("r", "{}")
            with pytest.raises(PeerSilent):
                link.recv(0.01)
            loop.call_soon_threadsafe(stop.set)
            with pytest.raises(PeerLost):
                link.recv(LIMIT_S)

    async def scenario():
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        await asyncio.gather(serve(stop), asyncio.to_thread(client, loop, stop))

    run(scenario())


def test_nobody_there_is_not_ready(folder):
    """`dflash-up ps` with nothing running must say so within its time."""
    with (
        ClientLink(Endpoint(f"ipc://{folder}/none.sock")) as link,
        pytest.raises(NotReady, match="is it running"),
    ):
        link.connect(0.05)


def test_links_leave_no_descriptor_behind(folder):
    """A coordinator that leaks per client ends with "too many open files"."""

    async def scenario():
        router = AsyncRouter()
        address = router.bind(f"ipc://{folder}/c.sock")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            link = AsyncClientLink(Endpoint(address))
            peer, _ = await greeted(router, link)
            link.close()
            assert (await router.recv()).id == peer
        while len(os.listdir("/proc/self/fd")) > before:  # libzmq closes in its own thread
            await asyncio.sleep(0.005)
        router.close()

    if not Path("/proc/self/fd").exists():
        pytest.skip("counts descriptors in /proc")
    run(scenario())
