"""The flags of `dflash-up generate` that change decoding, and what they come to as SDK options.

Owns flag names. Ranges stand in `common.sampling`, which also says what is wrong with a value.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from common.errors import BadRequest, ConfigError
from common.sdk.options import Options

Command = TypeVar("Command", bound=Callable[..., Any])

_FLAGS = (
    click.option("--max-tokens", type=int, default=256, show_default=True),
    click.option("--temperature", type=float, default=0.0, show_default=True),
    click.option("--top-p", type=float, default=1.0, show_default=True),
    click.option("--top-k", type=int, default=0, show_default=True),
    click.option("--min-p", type=float, default=0.0, show_default=True),
    click.option("--repetition-penalty", type=float, default=1.0, show_default=True),
    click.option("--presence-penalty", type=float, default=0.0, show_default=True),
    click.option("--frequency-penalty", type=float, default=0.0, show_default=True),
    click.option("--logit-bias", multiple=True, metavar="ID=VALUE", help="Add to a token's score."),
    click.option("--seed", type=int, default=None, help="Default: one is drawn and reported."),
    click.option("--acceptance", default="exact", show_default=True),
    click.option("--typical-delta", type=float, default=0.2, show_default=True),
    click.option("--typical-epsilon", type=float, default=1.0, show_default=True),
    click.option("--cascade-alpha", type=float, default=0.95, show_default=True),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text."),
    click.option("--stop-id", "stop_ids", type=int, multiple=True, help="End before this token."),
    click.option("--ignore-eos", is_flag=True, help="Go on past the end-of-text token."),
    click.option("--logprobs", type=int, default=None, metavar="N", help="With the N most likely."),
    click.option("--chat", is_flag=True, help="PROMPT is a user's message, not raw text."),
    click.option("--system", default=None, metavar="TEXT", help="With --chat: the system message."),
    click.option("--tools", type=click.Path(path_type=Path), help="With --chat: a JSON list."),
    click.option("--allow-special", is_flag=True, help="Special tokens in the text are tokens."),
    click.option("--timeout", "timeout_s", type=float, default=None, help="Seconds for the reply."),
    click.option("--no-draft", "draft", flag_value=False, default=True, help="Draft nothing."),
)


def sampling_options(command: Command) -> Command:
    """Add the flags to a command; they arrive as keyword arguments for `options_of`."""
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command


def options_of(text: str, flags: dict[str, Any]) -> tuple[str | None, Options]:
    """The prompt, or None where it became a chat, and the SDK's options.

    Raises:
        BadRequest: a flag's value has the wrong form, or a flag that only a chat has.
        ConfigError: the file of tools cannot be read.
    """
    flags = dict(flags)
    chat, system, tools = flags.pop("chat"), flags.pop("system"), flags.pop("tools")
    flags["logit_bias"] = _biases(flags["logit_bias"])
    options = cast(Options, flags)  # the flags that are left are keys of Options
    if not chat:
        for name, value in (("--system", system), ("--tools", tools)):
            if value is not None:
                raise BadRequest(f"{name}: only a chat has it; give --chat too")
        return text, options
    messages = [] if system is None else [{"role": "system", "content": system}]
    options["messages"] = [*messages, {"role": "user", "content": text}]
    if tools is not None:
        options["tools"] = _tools(tools)
    return None, options


def _biases(items: Iterable[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for item in items:
        token, value = _bias(item)
        if token in biases:
            raise BadRequest(f"--logit-bias {item}: token {token} was given before; name it once")
        biases[token] = value
    return biases


def _bias(item: str) -> tuple[int, float]:
    token, _, value = item.partition("=")
    try:
        return int(token), float(value)
    except ValueError as error:
        raise BadRequest(f"--logit-bias {item}: it must be ID=VALUE, such as 7=-2.5") from error


def _tools(path: Path) -> list[dict[str, Any]]:
    try:
        tools = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--tools {path}: {error.strerror}; give a readable file") from error
    except ValueError as error:
        raise BadRequest(f"--tools {path}: {error}; it must be a JSON list") from error
    if not isinstance(tools, list):
        raise BadRequest(f"--tools {path}: {type(tools).__name__}; it must be a JSON list")
    return tools
