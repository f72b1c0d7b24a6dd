"""The target's own loop in one process: nothing drafted, nothing sent per token.

Owns the baseline that `dflash-up bench` calls `direct`. Does not know drafters, the wire or the
policy. One JSON line in, one JSON line out; the engine calls are the ones a plain round makes.

    {"text": str | "prompt_ids": [int], "max_tokens": int, "ignore_eos": bool}
    {"token_ids": [int], "first_token_s": float, "total_s": float, "tokens_per_s": float}
"""

import json
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

from common.errors import BadRequest, DFlashError
from common.wire.messages import Sampling
from target_svc.engine import Engine


def serve_lines(engine: Engine, requests: IO[str], replies: IO[str]) -> None:
    """Answer every request line until the input ends; a bad one gets {"error": sentence}."""
    for line in requests:
        try:
            reply = answer(engine, json.loads(line))
        except (DFlashError, ValueError, TypeError) as fault:
            reply = {"error": str(fault)}
        print(json.dumps(reply), file=replies, flush=True)


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """Generate for one request and time it.

    Raises:
        BadRequest: neither text nor prompt ids, or no max_tokens.
    """
    if ("text" in request) == ("prompt_ids" in request) or "max_tokens" not in request:
        raise BadRequest(
            f"request has keys {sorted(request)}; right are max_tokens and one of text, prompt_ids"
        )
    prompt = request["prompt_ids"] if "prompt_ids" in request else engine.encode(request["text"])
    started = time.perf_counter()
    stamps: list[float] = []
    ids: list[int] = []
    stop_ids = () if request.get("ignore_eos") else engine.card.eos_ids
    for token in generate(engine, prompt, int(request["max_tokens"]), stop_ids):
        stamps.append(time.perf_counter())
        ids.append(token)
    span = stamps[-1] - stamps[0] if len(stamps) > 1 else 0.0
    return {
        "token_ids": ids,
        "first_token_s": stamps[0] - started if stamps else 0.0,
        "total_s": time.perf_counter() - started,
        "tokens_per_s": (len(ids) - 1) / span if span > 0 else 0.0,
    }


def generate(
    engine: Engine, prompt_ids: list[int], max_tokens: int, stop_ids: Sequence[int]
) -> Iterator[int]:
    """Yield the greedy continuation, one plain round per token, up to a stop token."""
    session = engine.open(Sampling(max_tokens=max_tokens), taps=False)
    try:
        for _ in session.prefill(prompt_ids or [engine.card.eos_ids[0]]):
            pass
        for index in range(max_tokens):
            if session.anchor_id in stop_ids:
                return
            yield session.anchor_id
            if index + 1 < max_tokens:
                session.verify((), 1)
    finally:
        session.close()
