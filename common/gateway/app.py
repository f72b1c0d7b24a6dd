"""The routes.

Owns which path does what, who may call, and the life of one request: it ends when its reply is
written or its caller has gone. Does not know what bodies mean (`asked`, `replies`) or how
completions run (`running`).
"""

import asyncio
import hashlib
import hmac
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive

from common.errors import BadRequest, DFlashError
from common.gateway.asked import Asked, chat_of, text_of
from common.gateway.faults import HttpFault, body_of, fault_of, response_of
from common.gateway.meters import Meters
from common.gateway.replies import ReplyShape
from common.gateway.running import Choices, Written
from common.sdk import AsyncClient

logger = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 40 * 1024 * 1024  # a prompt of the SDK's most, and JSON's escapes
UP: Final = ("ready", "busy")
GONE: Final = 499  # the caller went away; nobody reads this status but our metrics

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
Reader = Callable[[dict[str, Any]], Asked]


class Gateway:
    """The application's state.

    Args:
        client: of the running system.
        model: the name it serves under.
        keys: one of them is asked of every caller of `/v1`; empty: nobody is asked.
    """

    def __init__(self, client: AsyncClient, model: str, keys: Sequence[str] = ()) -> None:
        self._client = client
        self._model = model
        self._keys = tuple(key.encode() for key in keys)
        self._meters = Meters()
        self._started = int(time.time())

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/ready", self._ready, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            self._route("/v1/models", self._models, "GET"),
            self._route("/v1/models/{model:path}", self._model_card, "GET"),
            self._route("/v1/completions", self._completer(text_of), "POST"),
            self._route("/v1/chat/completions", self._completer(chat_of), "POST"),
        ]
        handlers: Any = {404: _no_route, 405: _no_route}
        return Starlette(routes=routes, exception_handlers=handlers)

    # ------------------------------------------------------------------ every /v1 route

    def _route(self, path: str, handler: Handler, method: str) -> Route:
        async def guarded(request: Request) -> Response:
            started = time.monotonic()
            try:
                self._check_key(request)
                response = await handler(request)
            except (DFlashError, HttpFault) as error:
                response = response_of(error)
            except ClientDisconnect:
                response = Response(status_code=GONE)
            except Exception:
                logger.exception("%s %s", method, path)
                response = response_of(RuntimeError())
            self._meters.requests.labels(route=path, status=str(response.status_code)).inc()
            self._meters.seconds.labels(route=path).observe(time.monotonic() - started)
            return response

        return Route(path, guarded, methods=[method])

    def _check_key(self, request: Request) -> None:
        if not self._keys:
            return
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        is_known = [hmac.compare_digest(key.strip().encode(), known) for known in self._keys]
        if kind.lower() != "bearer" or not any(is_known):
            raise HttpFault(
                401, "no valid key; send Authorization: Bearer KEY", code="invalid_api_key"
            )

    def _scope_of(self, request: Request) -> str:
        """Who may go on from what this caller's prompts leave behind: who has the same key."""
        if not self._keys:
            return ""
        key = request.headers["authorization"].partition(" ")[2].strip()
        return hashlib.sha256(key.encode()).hexdigest()[:32]

    # ------------------------------------------------------------------ looking

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        try:
            status = await self._client.status()
        except DFlashError as error:
            return response_of(error)
        workers = status.get("workers", [])
        ready = [w["name"] for w in workers if w.get("role") == "target" and w.get("state") in UP]
        if not ready:
            return response_of(
                HttpFault(503, "no target is ready yet", "server_error", code="not_ready")
            )
        return JSONResponse({"status": "ready", "targets": ready})

    async def _metrics(self, request: Request) -> Response:
        try:
            status = await self._client.status()
        except DFlashError:
            status = {}
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self._meters.text(status), headers={"Content-Type": kind})

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model_card(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "dflash-up",
        }

    def _check_model(self, name: str) -> None:
        if name != self._model:
            sentence = f"model: {name!r} is not served here; this is {self._model!r}"
            raise HttpFault(404, sentence, param="model", code="model_not_found")

    # ------------------------------------------------------------------ completing

    def _completer(self, read: Reader) -> Handler:
        async def complete(request: Request) -> Response:
            asked = read(await _json_of(request))
            asked.options["share_scope"] = self._scope_of(request)
            if asked.model:
                self._check_model(asked.model)
            choices = Choices(self._client, asked)
            shape = ReplyShape(self._model, is_chat=asked.is_chat)
            if asked.streams:
                return await self._streamed(request.receive, choices, asked, shape)
            with self._meters.running.track_inprogress():
                await _unless_gone(request.receive, _drained(choices))
            for choice in choices.done:
                self._meters.count(choice)
            return JSONResponse(shape.whole(choices.done, len(asked.prompts)))

        return complete

    async def _streamed(
        self, receive: Receive, choices: Choices, asked: Asked, shape: ReplyShape
    ) -> Response:
        """Begin to answer with the first text, so that an error before it has its status."""
        written = choices.written()
        try:
            first = await _unless_gone(receive, anext(written))  # queued or prefilling till then
        except BaseException:
            await written.aclose()
            raise
        events = self._events(first, written, choices, asked, shape)
        return StreamingResponse(events, headers={"Content-Type": "text/event-stream"})

    async def _events(
        self,
        first: Written,
        written: AsyncGenerator[Written],
        choices: Choices,
        asked: Asked,
        shape: ReplyShape,
    ) -> AsyncIterator[bytes]:
        """Server-sent events; when the caller goes, this is closed, and all is cancelled."""
        opened: set[int] = set()
        with self._meters.running.track_inprogress():
            async with aclosing(written):
                try:
                    for chunk in self._chunks(first, opened, shape):
                        yield _event(chunk)
                    async for one in written:
                        for chunk in self._chunks(one, opened, shape):
                            yield _event(chunk)
                except (DFlashError, HttpFault) as error:
                    yield _event(body_of(fault_of(error)))
                    return
        if asked.has_usage:
            yield _event(shape.usage(choices.done, len(asked.prompts)))
        yield b"data: [DONE]\n\n"

    def _chunks(self, one: Written, opened: set[int], shape: ReplyShape) -> list[dict[str, Any]]:
        chunks = []
        if one.index not in opened:
            opened.add(one.index)
            opening = shape.opening(one.index)
            chunks += [opening] if opening else []
        if one.event is not None and (one.text or one.event.logprobs):
            pieces, logprobs = one.event.pieces, one.event.logprobs
            chunks.append(shape.piece(one.index, one.text, pieces, logprobs))
        elif one.text:
            chunks.append(shape.piece(one.index, one.text))
        if one.choice is not None:
            self._meters.count(one.choice)
            chunks.append(shape.closing(one.choice))
        return chunks


async def _drained(choices: Choices) -> None:
    async with aclosing(choices.written()) as written:
        async for _ in written:
            pass


async def _unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Do the work, unless the caller goes away meanwhile: then it is cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _json_of(request: Request) -> dict[str, Any]:
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise HttpFault(413, f"body: over {MAX_BODY_BYTES} bytes", code="too_large")
    try:
        body = json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"body: {error}; it must be a JSON object") from error
    if not isinstance(body, dict):
        raise BadRequest(f"body: {type(body).__name__}; it must be a JSON object")
    return body


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    sentence = f"{request.method} {request.url.path}: there is no such route"
    return response_of(HttpFault(status, sentence, code="unknown_url"))
