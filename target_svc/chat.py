"""A checkpoint's chat template: from messages to the text that the model was trained on.

Owns the sandbox that templates run in and where they are found in a folder. Does not know token
ids, requests or sampling. The template comes with the checkpoint and is trusted to end; what it
reads comes from a client, so it can change nothing, and what it writes is bounded.

Source: transformers, `apply_chat_template` (names and filters that published templates use).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import BadRequest, ConfigError, Unsupported

MAX_RENDERED_CHARS: Final = 32 * 1024 * 1024  # as much as a raw prompt may hold
DEFAULT: Final = "default"
TOOL_USE: Final = "tool_use"  # the name of a list's template for requests with tools


class ChatTemplates:
    """The templates of one checkpoint.

    Args:
        sources: template text by name; empty: the checkpoint has none.
        special: `bos_token`, `eos_token` and the like, which templates write out.
    """

    def __init__(self, sources: Mapping[str, str], special: Mapping[str, str]) -> None:
        self._special = dict(special)
        environment = _environment()
        try:
            self._templates = {
                name: environment.from_string(source) for name, source in sources.items()
            }
        except TemplateError as error:
            raise ConfigError(
                f"chat template: {error}; the checkpoint's template is wrong"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, up to where the reply begins.

        Args:
            messages: `role` and `content` each, and whatever else the template reads.
            tools: passed through to the template.
            arguments: more names for the template, such as `enable_thinking`.

        Raises:
            Unsupported: the checkpoint has no chat template.
            BadRequest: the template refuses the messages; its own sentence is in the error.
        """
        if not self._templates:
            raise Unsupported("messages: this model has no chat template; send a raw prompt")
        wanted = TOOL_USE if tools and TOOL_USE in self._templates else DEFAULT
        template = self._templates.get(wanted) or next(iter(self._templates.values()))
        names = {"add_generation_prompt": True, **(arguments or {}), **self._special}
        parts, n_chars = [], 0
        try:
            for part in template.generate(messages=messages, tools=tools or None, **names):
                parts.append(part)
                n_chars += len(part)
                if n_chars > MAX_RENDERED_CHARS:
                    raise BadRequest(f"messages: over {MAX_RENDERED_CHARS} characters rendered")
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise BadRequest(f"messages: the chat template says: {error}") from error
        return "".join(parts)


def load_chat_templates(folder: Path) -> ChatTemplates:
    """Read `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`.

    Raises:
        ConfigError: a file is damaged or the template cannot be compiled.
    """
    config: dict[str, Any] = {}
    path = folder / "tokenizer_config.json"
    if path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path}: {error}; it must be a JSON object") from error
    told = config.get("chat_template") or {}
    sources: dict[str, str]
    if isinstance(told, list):
        sources = {str(one["name"]): str(one["template"]) for one in told}
    else:
        sources = {DEFAULT: str(told)} if told else {}
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        sources = {**sources, DEFAULT: own_file.read_text(encoding="utf-8")}
    special = {
        name: text
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (text := _token_text(config.get(name))) is not None
    }
    return ChatTemplates(sources, special)


def _token_text(value: Any) -> str | None:
    """A token is spelled as a string, or as an object with its `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: the HTML escapes of jinja2's own filter would reach the model."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


class _Generation(Extension):
    """`{% generation %}`: marks the reply's text for training; here its body is only text."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own declaration is a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Read up to the end tag and stand aside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
