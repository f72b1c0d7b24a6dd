"""Run the completions of one HTTP request side by side.

Owns the tasks and what they have produced. Does not know HTTP. However the iteration ends, every
completion that still runs is cancelled within one round.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from common.gateway.asked import Asked, Prompt
from common.gateway.replies import Choice
from common.sdk import AsyncClient, EndEvent, ProgressEvent, TokenEvent
from common.sdk.options import Options, options_of_each


@dataclass(frozen=True, slots=True)
class Written:
    """Text of a choice, as it comes; with `choice`, the last of it."""

    index: int
    text: str
    event: TokenEvent | None = None
    choice: Choice | None = None


class Choices:
    """All completions of one request.

    Args:
        client: of the running system.
        asked: what to complete.

    Raises:
        BadRequest, Unsupported: an option out of its range, before anything is sent.
    """

    def __init__(self, client: AsyncClient, asked: Asked) -> None:
        self.done: list[Choice] = []
        self._client = client
        self._each = options_of_each(asked.n, asked.options)
        self._prompts = asked.prompts
        self._queue: asyncio.Queue[Written | BaseException] = asyncio.Queue()

    async def written(self) -> AsyncGenerator[Written]:
        """Everything the choices write, each in its own order; the first error ends all."""
        jobs = [(prompt, one) for prompt in self._prompts for one in self._each]
        tasks = [
            asyncio.create_task(self._write(index, prompt, one))
            for index, (prompt, one) in enumerate(jobs)
        ]
        try:
            while len(self.done) < len(jobs):
                came = await self._queue.get()
                if isinstance(came, BaseException):
                    raise came
                if came.choice is not None:
                    self.done.append(came.choice)
                yield came
            self.done.sort(key=lambda choice: choice.index)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, index: int, prompt: Prompt, options: Options) -> None:
        try:
            await self._follow(index, prompt, options)
        except Exception as error:  # noqa: BLE001  # whatever it is, the reader raises it
            self._queue.put_nowait(error)

    async def _follow(self, index: int, prompt: Prompt, options: Options) -> None:
        n_prompt, pieces = 0, list[str]()
        stream = self._client.stream(prompt.text, prompt_ids=prompt.ids, **options)
        async with stream:
            async for event in stream:
                match event:
                    case ProgressEvent(phase="prefill"):
                        n_prompt = event.total
                    case TokenEvent():
                        pieces += event.pieces
                        self._queue.put_nowait(Written(index, event.text, event))
                    case EndEvent():
                        choice = Choice(index, stream.completion, tuple(pieces), n_prompt)
                        self._queue.put_nowait(Written(index, event.text, None, choice))
