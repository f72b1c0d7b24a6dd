"""A service keeps serving its good clients, whoever else connects."""

import asyncio
import contextlib
import tempfile
from pathlib import Path

import pytest
from support import bad_peers

from common.errors import WireError
from common.net.auth import new_keys
from common.net.links import Lost
from common.net.transport import Endpoint
from common.net.zeromq import AsyncClientLink, AsyncRouter
from common.wire.messages import Status, StatusRequest

LIMIT_S = 10.0


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="df-", dir="/tmp") as path:
        yield Path(path)


async def serve(router, seen):
    """Answer every StatusRequest, and write down everything."""
    while True:
        received = await router.recv()
        seen.append(received)
        if isinstance(received.body, StatusRequest):
            assert router.send(received.id, Status(received.body.request, "{}"))


def beside(folder, bad_peer, talk, *, is_keyed=False):
    """Run a bad peer beside a good client; returns what the router saw."""

    async def main():
        router, seen = AsyncRouter(), []
        keys = new_keys(folder / "keys", "coordinator", "coordinator") if is_keyed else None
        address = router.bind("tcp://127.0.0.1:*" if is_keyed else f"ipc://{folder}/c.sock", keys)
        key = keys.public_key if keys else ""
        good = AsyncClientLink(Endpoint(address, key), keys)
        serving = asyncio.create_task(serve(router, seen))
        await good.connect()
        with contextlib.ExitStack() as stack:
            await asyncio.to_thread(stack.enter_context, bad_peer(address))
            await talk(good, seen)
        serving.cancel()
        good.close()
        router.close()
        return seen

    return asyncio.run(asyncio.wait_for(main(), LIMIT_S))


async def ask(good, n_times=20):
    for index in range(n_times):
        good.send(StatusRequest(str(index)))
        assert await good.recv(LIMIT_S) == Status(str(index), "{}")


@pytest.mark.parametrize("is_keyed", [False, True], ids=["ipc", "tcp+curve"])
@pytest.mark.parametrize("name", ["silent", "browser", "dying", "oversize"])
def test_stranger_on_the_port_changes_nothing(folder, name, is_keyed):
    """A port scan must not be an outage."""

    async def talk(good, seen):
        await ask(good)

    seen = beside(folder, getattr(bad_peers, name), talk, is_keyed=is_keyed)
    assert {type(received.body) for received in seen} <= {StatusRequest, Lost}


@pytest.mark.parametrize("name", ["junk", "many_frames"])
def test_junk_is_counted_and_the_rest_is_served(folder, name):
    """Every bad message must be seen, so that its sender can be given a strike."""
    expected = {"junk": 50, "many_frames": 1}[name]

    async def talk(good, seen):
        await ask(good)
        while sum(isinstance(received.body, WireError) for received in seen) < expected:
            await asyncio.sleep(0.005)
        await ask(good)

    beside(folder, getattr(bad_peers, name), talk)


def test_junk_without_a_key_is_not_even_heard(folder):
    """Behind CURVE a stranger's bytes must not reach the codec."""

    async def talk(good, seen):
        await ask(good)
        await asyncio.sleep(0.1)  # time for junk to come through, if it could

    seen = beside(folder, bad_peers.junk, talk, is_keyed=True)
    assert not any(isinstance(received.body, WireError) for received in seen)
