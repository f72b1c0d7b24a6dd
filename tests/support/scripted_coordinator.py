"""A coordinator that answers from a script, on a real ipc socket, in a thread of its own.

`answers` maps a Submit to what happens next: a list of messages, or functions of the Submit that
make one. A `threading.Event` in the list is waited for, so that a test decides the timing.
"""

import asyncio
import contextlib
import json
import threading

from common.net.links import Lost
from common.net.zeromq import AsyncRouter
from common.wire.messages import (
    Accepted,
    Cancel,
    Done,
    Failed,
    Hello,
    Read,
    Status,
    StatusRequest,
    Submit,
    Tokens,
    Welcome,
)


def reply(submit, *groups, tail="", stats="{}"):
    """Accepted, one Tokens per group of ids, Done."""
    messages = [Accepted(request=submit.request, seed=submit.sampling.seed, queued_behind=0)]
    index = 0
    for ids in groups:
        pieces = tuple(f"<{token}>" for token in ids)
        messages.append(Tokens(submit.request, index, tuple(ids), pieces, len(ids) - 1))
        index += len(ids)
    return [*messages, Done(submit.request, "length", tail, stats, index)]


class ScriptedCoordinator:
    def __init__(self, address, answer, status=None, welcome=None, keys=None):
        self.address = address  # of tcp: with its real port once it is entered
        self.keys = keys
        self.answer = answer
        self.status = status or {"workers": [], "requests": {"running": 0, "queued": 0}}
        self.welcome = welcome or Welcome(nonce="n1", heartbeat_ms=500)
        self.submits = []
        self.hellos = []
        self.cancelled = []
        self.reads = []
        self.lost = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._stop = None

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(5)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(5)

    async def _serve(self):
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        router = AsyncRouter()
        self.address = router.bind(self.address, self.keys)
        self._ready.set()
        reader = asyncio.create_task(self._read(router))
        await self._stop.wait()
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reader
        router.close()

    async def _read(self, router):
        tasks = set()
        while True:
            peer, body, *_ = await router.recv()
            match body:
                case Hello():
                    self.hellos.append(body)
                    router.send(peer, self.welcome)
                case Submit():
                    self.submits.append(body)
                    task = asyncio.create_task(self._play(router, peer, self.answer(body)))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                case Cancel():
                    self.cancelled.append(body.request)
                    router.send(peer, Failed(body.request, "cancelled", "cancelled by the client"))
                case Read():
                    self.reads.append(body.index)
                case StatusRequest():
                    router.send(peer, Status(body.request, json.dumps(self.status)))
                case Lost():
                    self.lost += 1

    async def _play(self, router, peer, messages):
        for message in messages:
            if isinstance(message, threading.Event):
                while not message.is_set():
                    await asyncio.sleep(0.005)
            else:
                router.send(peer, message)
