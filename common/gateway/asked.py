"""From the body of an OpenAI request to what the SDK is asked.

Owns the parameters: every one is honoured, harmless (it changes no reply, and is named here), or
refused by name. Does not know HTTP or how a reply is made. `null` counts as not given.

Source: OpenAI API reference, "Chat" and "Completions"; beyond it: top_k, min_p,
repetition_penalty, ignore_eos, stop_ids, acceptance and its numbers, draft, timeout_s,
allow_special, chat_template_kwargs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from common.errors import BadRequest, Unsupported
from common.sdk.options import Options

MAX_CHOICES: Final = 128
#: Same name and meaning here and there.
_ALIKE: Final = (
    "top_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "stop_ids",
    "acceptance",
    "typical_delta",
    "typical_epsilon",
    "cascade_alpha",
    "draft",
    "timeout_s",
    "allow_special",
)
_OWN: Final = ("model", "n", "stream", "stream_options", "temperature", "stop", "logit_bias")
#: They say who asks, or where the reply is kept at OpenAI; no reply depends on them.
_HARMLESS: Final = ("user", "metadata", "safety_identifier", "prompt_cache_key")
#: Parameter -> the one value that changes nothing; any other is refused.
_ONLY: Final[dict[str, Any]] = {
    "echo": False,
    "suffix": "",
    "store": False,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "service_tier": "auto",
    "modalities": ["text"],
}
_CHAT: Final = ("messages", "tools", "logprobs", "top_logprobs", "chat_template_kwargs")
_CHAT_LENGTHS: Final = ("max_completion_tokens", "max_tokens")
_TEXT: Final = ("prompt", "logprobs", "max_tokens", "best_of")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One thing to continue: a text, ids, or neither where the options hold messages."""

    text: str | None = None
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, read.

    Attributes:
        prompts: what to continue; a chat is one prompt.
        n: completions of each.
        options: for the SDK.
        streams: events are wanted as they come.
        has_usage: a stream ends with the usage.
        is_chat: which of the two shapes the reply has.
    """

    model: str
    prompts: tuple[Prompt, ...]
    n: int
    options: Options
    streams: bool
    has_usage: bool
    is_chat: bool


def chat_of(body: Mapping[str, Any]) -> Asked:
    """Read the body of `/v1/chat/completions`.

    Raises:
        BadRequest, Unsupported: names the parameter.
    """
    given = _given(body, (*_CHAT, *_CHAT_LENGTHS))
    if "messages" not in given:
        raise BadRequest("messages: missing; a chat needs them")
    options = _options(given)
    options["messages"] = _listed("messages", given["messages"])
    if "tools" in given:
        options["tools"] = _listed("tools", given["tools"])
    if "chat_template_kwargs" in given:
        options["template_kwargs"] = given["chat_template_kwargs"]
    if given.get("logprobs"):
        options["logprobs"] = given.get("top_logprobs", 0)
    elif "top_logprobs" in given:
        raise BadRequest("top_logprobs: it needs logprobs to be true")
    for name in _CHAT_LENGTHS:
        if name in given:
            options["max_tokens"] = given[name]
            break
    return _asked(given, (Prompt(),), options, is_chat=True)


def text_of(body: Mapping[str, Any]) -> Asked:
    """Read the body of `/v1/completions`.

    Raises:
        BadRequest, Unsupported: names the parameter.
    """
    given = _given(body, _TEXT)
    if "prompt" not in given:
        raise BadRequest("prompt: missing; give a text, token ids, or a list of them")
    options = _options(given)
    options["max_tokens"] = given.get("max_tokens", 16)
    if "logprobs" in given:
        options["logprobs"] = given["logprobs"]
    if given.get("best_of", given.get("n", 1)) != given.get("n", 1):
        raise Unsupported(f"best_of: {given['best_of']!r}; only the value of n is honoured")
    return _asked(given, _prompts(given["prompt"]), options, is_chat=False)


def _given(body: Mapping[str, Any], own: Sequence[str]) -> dict[str, Any]:
    given = {name: value for name, value in body.items() if value is not None}
    for name, only in _ONLY.items():
        if given.pop(name, only) != only:
            raise Unsupported(f"{name}: {body[name]!r:.80} is not supported; supported: {only!r}")
    known = {*_ALIKE, *_OWN, *_HARMLESS, *own}
    for name in given:
        if name not in known:
            raise Unsupported(f"{name}: there is no such parameter here")
    return given


def _options(given: Mapping[str, Any]) -> Options:
    options: Options = {"temperature": given.get("temperature", 1.0)}
    for name in _ALIKE:
        if name in given:
            options[name] = given[name]
    if "stop" in given:
        stop = given["stop"]
        options["stop"] = stop if isinstance(stop, str) else _listed("stop", stop)
    if "stop_ids" in given:
        options["stop_ids"] = _listed("stop_ids", given["stop_ids"])
    if "logit_bias" in given:
        options["logit_bias"] = _bias(given["logit_bias"])
    return options


def _asked(
    given: Mapping[str, Any], prompts: tuple[Prompt, ...], options: Options, *, is_chat: bool
) -> Asked:
    n = given.get("n", 1)
    if type(n) is not int or not 1 <= n * len(prompts) <= MAX_CHOICES:
        raise BadRequest(f"n: {n!r}; 1 to {MAX_CHOICES} choices over all prompts")
    stream, extra = given.get("stream", False), given.get("stream_options", {})
    if type(stream) is not bool:
        raise BadRequest(f"stream: {stream!r}; it must be true or false")
    if not isinstance(extra, dict) or set(extra) - {"include_usage", "include_obfuscation"}:
        raise BadRequest(f"stream_options: {extra!r:.80}; an object with include_usage is known")
    if extra and not stream:
        raise BadRequest("stream_options: it needs stream to be true")
    if not isinstance(given.get("model", ""), str):
        raise BadRequest(f"model: {given['model']!r:.80}; it must be a name")
    has_usage = bool(extra.get("include_usage"))
    return Asked(given.get("model", ""), prompts, n, options, stream, has_usage, is_chat)


def _prompts(prompt: Any) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (Prompt(text=prompt),)
    if isinstance(prompt, list) and prompt:
        if all(type(one) is int for one in prompt):
            return (Prompt(ids=tuple(prompt)),)
        if all(isinstance(one, str) for one in prompt):
            return tuple(Prompt(text=one) for one in prompt)
        if all(isinstance(one, list) and all(type(i) is int for i in one) for one in prompt):
            return tuple(Prompt(ids=tuple(one)) for one in prompt)
    raise BadRequest(f"prompt: {prompt!r:.80}; give a text, token ids, or a list of them")


def _listed(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise BadRequest(f"{name}: {value!r:.80}; a list is needed")
    return value


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise BadRequest(f"logit_bias: {value!r:.80}; an object of token ids and numbers is needed")
    try:
        return {int(token): float(number) for token, number in value.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise BadRequest(f"logit_bias: {error}; token ids and numbers are needed") from error
