"""The application with a scripted client behind it, called as a server would call it."""

import asyncio
import json

import pytest

from common.gateway.app import Gateway


class QueuedForever:
    """A client whose requests never get a token; says when one began and when it was left."""

    def __init__(self):
        self.began, self.left = asyncio.Event(), asyncio.Event()

    def stream(self, *_, **__):
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.left.set()

    def __aiter__(self):
        return self

    async def __anext__(self):
        self.began.set()
        await asyncio.Event().wait()


def scope(path):
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }


@pytest.mark.parametrize("stream", [True, False])
def test_a_caller_who_goes_away_before_the_first_token_is_cancelled(stream):
    """A stream that was still queued or prefilling was run to its first token for nobody."""

    async def scenario():
        client = QueuedForever()
        body = json.dumps({"prompt": "x", "stream": stream}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        sent = []

        async def receive():
            if messages:
                return messages.pop()
            await client.began.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        app = Gateway(client, "m").app()
        async with asyncio.timeout(5.0):
            await app(scope("/v1/completions"), receive, send)
        assert client.left.is_set()
        return sent

    assert asyncio.run(scenario())[0]["status"] == 499
