"""Peers that misbehave, each a small context manager on an address of a ROUTER.

What they do must leave the service as it was for everybody else.
"""

import contextlib
import random
import socket

import zmq

from common.wire.codec import MAGIC, MAX_FRAME_BYTES

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL".ljust(22, b"\0") + bytes(33)  # ZMTP 3.0


def _connect(address):
    kind, _, rest = address.partition("://")
    if kind == "ipc":
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(rest)
        return raw
    host, _, port = rest.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


@contextlib.contextmanager
def silent(address):
    """Connects and says nothing."""
    with _connect(address) as raw:
        yield raw


@contextlib.contextmanager
def browser(address):
    """Speaks HTTP."""
    with _connect(address) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        yield raw


@contextlib.contextmanager
def dying(address):
    """Leaves in the middle of a ZMTP message."""
    with _connect(address) as raw, contextlib.suppress(ConnectionError):  # CURVE cuts it off first
        raw.sendall(GREETING + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER")
        raw.sendall(b"\x01\x03DF1\x02\xff\xff")  # a long frame that never comes
    yield raw


@contextlib.contextmanager
def _dealer(address):
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    try:
        dealer.connect(address)
        yield dealer
    finally:
        context.destroy(linger=0)


@contextlib.contextmanager
def junk(address, n_messages=50, seed=0):
    """Sends random frames, some behind a right magic."""
    rng = random.Random(seed)
    with _dealer(address) as dealer:
        for _ in range(n_messages):
            frames = [rng.randbytes(rng.randint(0, 64)) for _ in range(rng.randint(1, 6))]
            if rng.random() < 0.5:
                frames[0] = MAGIC
            dealer.send_multipart(frames)
        yield dealer


@contextlib.contextmanager
def many_frames(address, n_frames=1000):
    """Sends one message of very many frames."""
    with _dealer(address) as dealer:
        dealer.send_multipart([MAGIC] * n_frames)
        yield dealer


@contextlib.contextmanager
def oversize(address):
    """Sends a frame over the cap; the connection is cut and nobody may notice more than that."""
    with _dealer(address) as dealer:
        dealer.send_multipart([MAGIC, bytes(MAX_FRAME_BYTES + 1)])
        yield dealer
