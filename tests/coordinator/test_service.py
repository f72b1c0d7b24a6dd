"""The process around the hub: real sockets, keys, signals."""

import asyncio
import json
import os
import signal
import socket

import pytest

from common.coordinator.service import Service
from common.errors import PeerLost
from common.net.auth import load_keys, new_keys, server_key
from common.net.startup import CONTROL_SOCKET
from common.net.transport import Endpoint
from common.net.zeromq import AsyncClientLink
from common.settings import Config, CoordinatorConfig, KeysConfig, NetConfig, RunConfig
from common.wire.messages import (
    Accepted,
    Bye,
    Failed,
    Hello,
    Reject,
    Sampling,
    Status,
    StatusRequest,
    Submit,
    Welcome,
)
from common.wire.tensors import from_text
from common.wire.version import MAJOR, MINOR

WAIT_S = 10.0


def hello(role):
    return Hello(role, "tester", MAJOR, MINOR, "test", 1)


async def connected(endpoint, keys=None):
    link = AsyncClientLink(endpoint, keys)
    await link.connect(WAIT_S)
    return link


async def until_bound(path):
    """Wait for the socket file of a service that starts in this loop."""
    for _ in range(1000):
        if path.exists():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{path} did not appear")


def free_port():
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serving(tmp_path, config, talk):
    """Run a service and `talk(endpoint)` in one loop, then stop it by a signal."""

    async def main():
        service = asyncio.ensure_future(Service(config, tmp_path).run())
        await until_bound(tmp_path / CONTROL_SOCKET)
        try:
            await talk(Endpoint(f"ipc://{tmp_path / CONTROL_SOCKET}"))
        finally:
            if not service.done():
                os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(service, WAIT_S)

    asyncio.run(main())


def quick(**tables):
    return Config(run=RunConfig(grace_s=0.0), coordinator=CoordinatorConfig(), **tables)


def test_peer_is_welcomed_and_told_the_status(tmp_path):
    """The first thing every process of a run does."""

    async def talk(endpoint):
        link = await connected(endpoint)
        link.send(hello("admin"))
        assert isinstance(await link.recv(WAIT_S), Welcome)
        link.send(StatusRequest("s"))
        answer = await link.recv(WAIT_S)
        assert isinstance(answer, Status)
        assert '"state": "starting"' in answer.body
        link.close()

    serving(tmp_path, quick(), talk)


def test_signal_ends_what_runs_with_an_error_and_says_goodbye(tmp_path):
    """Clients must not find out by silence."""

    async def talk(endpoint):
        link = await connected(endpoint)
        link.send(hello("client"))
        link.send(Submit("r", from_text("x"), Sampling(4)))
        got = [await link.recv(WAIT_S) for _ in range(2)]
        assert [type(message) for message in got] == [Welcome, Accepted]
        os.kill(os.getpid(), signal.SIGTERM)
        last = [await link.recv(WAIT_S) for _ in range(2)]
        assert [type(message) for message in last] == [Failed, Bye]
        with pytest.raises(PeerLost):
            await link.recv(WAIT_S)
        link.close()

    serving(tmp_path, quick(), talk)


def test_role_of_a_key_decides_over_tcp(tmp_path):
    """A client's key must not open an administrator's door."""
    keys = tmp_path / "keys"
    for name, role in (("coordinator", "coordinator"), ("eve", "client")):
        new_keys(keys, name, role)
    net = NetConfig(control=f"tcp://127.0.0.1:{free_port()}")

    async def talk(_):
        endpoint = Endpoint(net.control, server_key(keys))
        link = await connected(endpoint, load_keys(keys, "eve"))
        link.send(hello("admin"))
        answer = await link.recv(WAIT_S)
        assert isinstance(answer, Reject)
        assert answer.code == "auth_refused"
        link.send(hello("client"))
        assert isinstance(await link.recv(WAIT_S), Welcome)
        link.close()

    serving(tmp_path, quick(net=net, keys=KeysConfig(dir=str(keys))), talk)


def test_claim_over_tcp_belongs_to_the_key_that_showed_it(tmp_path):
    """The same key on another connection comes back; another key begins something of its own."""
    keys = tmp_path / "keys"
    for name, role in (("coordinator", "coordinator"), ("eve", "client"), ("ann", "client")):
        new_keys(keys, name, role)
    net = NetConfig(control=f"tcp://127.0.0.1:{free_port()}")

    async def ask(name, **asked):
        """One connection and its answer; how many requests wait then."""
        link = await connected(Endpoint(net.control, server_key(keys)), load_keys(keys, name))
        link.send(hello("client"))
        assert isinstance(await link.recv(WAIT_S), Welcome)
        link.send(Submit("r", from_text("x"), Sampling(4), claim="secret", **asked))
        answer = await link.recv(WAIT_S)
        link.send(StatusRequest("s"))
        n_queued = json.loads((await link.recv(WAIT_S)).body)["requests"]["queued"]
        link.close()
        return answer, n_queued

    async def talk(_):
        assert await ask("ann") == (Accepted("r", 0, 0), 1)
        assert await ask("ann") == (Accepted("r", 0, 1), 1)
        assert await ask("eve") == (Accepted("r", 0, 1), 2)
        refused, n_queued = await ask("eve", from_index=3)
        assert (refused.code, n_queued) == ("bad_request", 2)

    serving(tmp_path, quick(net=net, keys=KeysConfig(dir=str(keys))), talk)
