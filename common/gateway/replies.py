"""Bodies of replies: whole ones and the chunks of a stream.

Owns their shapes. Does not know HTTP or where the tokens come from. Speculation statistics and the
seed in force stand in an object of our own, `dflash_up`, one entry per choice.

Source: OpenAI API reference, "The chat completion object", "The completion object" and chunks.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.sdk import Completion
from common.sdk.stream import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished completion."""

    index: int
    completion: Completion
    pieces: tuple[str, ...]  # one per id
    n_prompt: int  # prompt tokens


class ReplyShape:
    """Makes the bodies of one request.

    Args:
        model: its name.
        is_chat: chat or text shape.
    """

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self.is_chat = is_chat
        self._id = ("chatcmpl-" if is_chat else "cmpl-") + secrets.token_hex(12)
        self._model = model
        self._created = int(time.time())

    def whole(self, choices: Sequence[Choice], n_prompts: int) -> dict[str, Any]:
        """The body of a reply that is not streamed."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._body(kind, [self._choice(choice) for choice in choices]) | {
            "usage": usage_of(choices, n_prompts),
            "dflash_up": [stats_of(choice) for choice in choices],
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk of a chat's choice, which says the role."""
        if not self.is_chat:
            return None
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def piece(
        self,
        index: int,
        text: str,
        pieces: Sequence[str] = (),
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> dict[str, Any]:
        """A chunk with text."""
        shares = self._logprobs(pieces, logprobs) if logprobs else None
        return self._chunk(index, {"content": text} if self.is_chat else text, None, shares)

    def closing(self, choice: Choice) -> dict[str, Any]:
        """A choice's last chunk: why it ended, and our own numbers."""
        reason = choice.completion.finish_reason
        body = self._chunk(choice.index, {} if self.is_chat else "", reason, None)
        return body | {"dflash_up": [stats_of(choice)]}

    def usage(self, choices: Sequence[Choice], n_prompts: int) -> dict[str, Any]:
        """The chunk after all choices, where usage is asked for."""
        return self._body(self._chunk_kind, []) | {"usage": usage_of(choices, n_prompts)}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _choice(self, choice: Choice) -> dict[str, Any]:
        done = choice.completion
        shares = self._logprobs(choice.pieces, done.logprobs) if done.logprobs else None
        body = {"index": choice.index, "finish_reason": done.finish_reason, "logprobs": shares}
        if self.is_chat:
            message = {"role": "assistant", "content": done.text, "refusal": None}
            return body | {"message": message}
        return body | {"text": done.text}

    def _chunk(
        self, index: int, content: Any, reason: str | None, shares: dict[str, Any] | None
    ) -> dict[str, Any]:
        name = "delta" if self.is_chat else "text"
        choice = {"index": index, name: content, "finish_reason": reason, "logprobs": shares}
        return self._body(self._chunk_kind, [choice])

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _logprobs(self, pieces: Sequence[str], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Log probabilities; other tokens than the chosen one are named by id: id:123."""
        if self.is_chat:
            return {"content": [_entry(*pair) for pair in zip(pieces, logprobs, strict=True)]}
        return {
            "tokens": list(pieces),
            "token_logprobs": [one.chosen for one in logprobs],
            "top_logprobs": [{f"id:{i}": value for i, value in one.top} for one in logprobs],
            "text_offset": _offsets(pieces),
        }


def usage_of(choices: Sequence[Choice], n_prompts: int) -> dict[str, int]:
    """Tokens of all choices; each prompt counts once."""
    per_prompt = max(1, len(choices) // n_prompts)
    prompt = sum(choice.n_prompt for choice in choices[::per_prompt])
    written = sum(choice.completion.n_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
    }


def stats_of(choice: Choice) -> dict[str, Any]:
    """Our own numbers of one choice."""
    done = choice.completion
    return {
        "index": choice.index,
        "seed": done.seed,
        "token_ids": list(done.token_ids),
        **done.stats,
    }


def _entry(piece: str, one: TokenLogprobs) -> dict[str, Any]:
    top = [{"token": f"id:{i}", "logprob": value, "bytes": None} for i, value in one.top]
    return {
        "token": piece,
        "logprob": one.chosen,
        "bytes": list(piece.encode()),
        "top_logprobs": top,
    }


def _offsets(pieces: Sequence[str]) -> list[int]:
    offsets, at = [], 0
    for piece in pieces:
        offsets.append(at)
        at += len(piece)
    return offsets
