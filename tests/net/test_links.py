"""Descriptors are given again: whose end is whose."""

import pytest
import zmq

from common.net.links import Lost, RouterLink
from common.wire.codec import pack
from common.wire.messages import Bye

OTHER_FD = 99


class FakeFrame:
    """The parts of a frame that a router looks at."""

    more = False

    def __init__(self, data, fd):
        self.bytes, self.buffer, self._fd = data, memoryview(data), fd

    def get(self, _option):
        return self._fd


class FakeGate:
    def __init__(self):
        self.waiting = []

    def recv(self):
        return self.waiting.pop(0) if self.waiting else None


class FakeMonitor:
    def __init__(self):
        self.waiting = []

    def events(self):
        told, self.waiting = self.waiting, []
        return told


@pytest.fixture
def link():
    """A router without sockets: messages and events are put into its hands."""
    made = RouterLink.__new__(RouterLink)
    made.gate, made.monitor = FakeGate(), FakeMonitor()
    made.is_keyed, made._allowed, made._id_by_fd = False, None, {}
    return made


def says(link, peer, fd):
    link.gate.waiting.append([FakeFrame(part, fd) for part in (peer, *pack(Bye("x")))])


def lost(found):
    return [one.id for one in found if isinstance(one.body, Lost)]


def test_end_of_an_older_connection_is_not_the_end_of_the_next(link):
    """A probe that connected and closed must not take a living client with it."""
    says(link, b"client", 7)
    link.monitor.waiting = [
        (zmq.EVENT_ACCEPTED, 7),
        (zmq.EVENT_DISCONNECTED, 7),  # the probe
        (zmq.EVENT_ACCEPTED, 7),  # the client
    ]

    assert lost(link.read()) == []


def test_peer_that_spoke_and_left_between_two_looks_is_lost(link):
    """Otherwise its sessions would stay for ever."""
    says(link, b"client", 7)
    link.monitor.waiting = [(zmq.EVENT_ACCEPTED, 7), (zmq.EVENT_DISCONNECTED, 7)]

    assert lost(link.read()) == [b"client"]


def test_known_peer_is_lost_at_its_end_and_once(link):
    """The ordinary case."""
    says(link, b"client", 7)
    link.monitor.waiting = [(zmq.EVENT_ACCEPTED, 7)]
    link.read()
    link.monitor.waiting = [(zmq.EVENT_DISCONNECTED, OTHER_FD), (zmq.EVENT_DISCONNECTED, 7)]

    assert lost(link.read()) == [b"client"]
    assert lost(link.read()) == []


def test_former_owner_of_a_descriptor_is_lost_when_another_speaks(link):
    """Its end may still be on the way; the new one stays."""
    says(link, b"former", 7)
    link.monitor.waiting = [(zmq.EVENT_ACCEPTED, 7)]
    link.read()
    says(link, b"next", 7)
    link.monitor.waiting = [(zmq.EVENT_DISCONNECTED, 7), (zmq.EVENT_ACCEPTED, 7)]

    assert lost(link.read()) == [b"former"]
