"""Mutated bytes: never anything but a message or a WireError, in bounded time."""

import random
import time

import pytest
from support.messages import NAMED

from common.errors import WireError
from common.wire.codec import pack, unpack

MUTATIONS = 1500  # for each golden message


def mutate(frames, rng):
    """One to four random edits of whole frames or of bytes within one."""
    frames = [bytearray(frame) for frame in frames]
    for _ in range(rng.randint(1, 4)):
        victim = rng.randrange(len(frames))
        frame = frames[victim]
        match rng.randrange(7):
            case 0 if frame:
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            case 1 if frame:
                frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
            case 2 if frame:
                del frame[rng.randrange(len(frame)) :]
            case 3:
                at = rng.randrange(len(frame) + 1)
                frame[at:at] = rng.randbytes(rng.randint(1, 8))
            case 4:
                frames.insert(victim, bytearray(rng.randbytes(rng.randint(0, 12))))
            case 5 if len(frames) > 1:
                del frames[victim]
            case 6 if frame:
                at = rng.randrange(len(frame))
                frame[at : at + 5] = rng.choice([b"\xdd", b"\xdf", b"\xdb", b"\xc6"]) + b"\xff" * 4
    return [bytes(frame) for frame in frames]


@pytest.mark.parametrize("name", NAMED)
def test_mutated_bytes_are_a_message_or_a_wire_error(name):
    """A stray TypeError in the coordinator ends everybody's request."""
    rng, original = random.Random(name), [bytes(frame) for frame in pack(NAMED[name])]
    refused, slowest_s = 0, 0.0
    for _ in range(MUTATIONS):
        frames = mutate(original, rng)
        started = time.perf_counter()
        try:
            message = unpack(frames)
        except WireError:
            refused += 1
        else:
            assert unpack(pack(message)) == message  # what was let in is a proper message
        slowest_s = max(slowest_s, time.perf_counter() - started)
    assert refused > MUTATIONS / 2
    assert slowest_s < 1.0  # the machine may be busy; the point is "not 8 s"
