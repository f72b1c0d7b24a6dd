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

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import BadRequest, ConfigError, DFlashError, Unsupported

MAX_RENDERED_CHARS: Final = 32 * 1024 * 1024  # as much as a raw prompt may hold
DEFAULT: Final = "default"
TOOL_USE: Final = "tool_use"  # the name of a list's template for requests with tools
GENERATION_PROMPT: Final = "add_generation_prompt"


class ChatTemplates:
    """The templates of one checkpoint.

    Args:
        sources: template text by name; empty: the checkpoint has none.
        special: `bos_token`, `eos_token` and the like, which templates write out.
    """

    def __init__(self, sources: Mapping[str, str], special: Mapping[str, str]) -> None:
        self._special = dict(special)
        environment = _environment()
        self._globals = frozenset(environment.globals)
        try:
            self._templates = {
                name: environment.from_string(source) for name, source in sources.items()
            }
            self._reads = {
                name: meta.find_undeclared_variables(environment.parse(source))
                for name, source in sources.items()
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
            Unsupported: the checkpoint has no chat template, or it reads no tools.
            BadRequest: the template refuses the messages, in which case its own sentence is in the
                error; or it does not read an argument, or the argument is not a client's to set.
        """
        if not self._templates:
            raise Unsupported("messages: this model has no chat template; send a raw prompt")
        chosen = self._choose(bool(tools))
        own = {**self._special, "messages": messages, "tools": tools or None}
        self._check_arguments(chosen, arguments or {}, own)
        parts, n_chars = [], 0
        try:
            names = {GENERATION_PROMPT: True, **(arguments or {}), **own}
            for part in self._templates[chosen].generate(names):
                parts.append(part)
                n_chars += len(part)
                if n_chars > MAX_RENDERED_CHARS:
                    raise BadRequest(f"messages: over {MAX_RENDERED_CHARS} characters rendered")
        except DFlashError:
            raise
        except Exception as error:  # whatever a template does to a client's values is no fault here
            raise BadRequest(f"messages: the chat template says: {error}") from error
        return "".join(parts)

    def _choose(self, has_tools: bool) -> str:
        """The name of the template for a request."""
        if has_tools and TOOL_USE in self._templates:
            return TOOL_USE
        chosen = DEFAULT if DEFAULT in self._templates else next(iter(self._templates))
        if has_tools and "tools" not in self._reads[chosen]:
            raise Unsupported("tools: this model's chat template reads none; leave them out")
        return chosen

    def _check_arguments(
        self, chosen: str, arguments: Mapping[str, Any], own: Mapping[str, Any]
    ) -> None:
        """Refuse what the template would ignore: a misspelt switch looks like one that is set."""
        for name in arguments:
            if name in own or name in self._globals:
                raise BadRequest(f"template_kwargs: {name!r} is not a client's to set")
            if name not in self._reads[chosen] and name != GENERATION_PROMPT:
                readable = sorted(self._reads[chosen] - set(own) - self._globals)
                raise BadRequest(
                    f"template_kwargs: the chat template reads no {name!r:.40}; it reads "
                    f"{', '.join(readable) or 'none'}"
                )


def load_chat_templates(folder: Path) -> ChatTemplates:
    """Read `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`.

    Raises:
        ConfigError: a file is damaged or the template cannot be compiled.
    """
    path = folder / "tokenizer_config.json"
    config = _config_of(path)
    sources = _sources_of(path, config.get("chat_template"))
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        sources = {**sources, DEFAULT: _text_of(own_file)}
    special = {
        name: text
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (text := _token_text(config.get(name))) is not None
    }
    return ChatTemplates(sources, special)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {error}; it must be UTF-8 text") from error


def _config_of(path: Path) -> dict[str, Any]:
    """The object in `tokenizer_config.json`; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        config = json.loads(_text_of(path))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; it must be a JSON object") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: {config!r:.40}; it must be a JSON object")
    return config


def _sources_of(path: Path, told: Any) -> dict[str, str]:
    """Template text by name: of one text, or of a list of names and texts."""
    if not told:
        return {}
    named = told if isinstance(told, list) else [{"name": DEFAULT, "template": told}]
    sources: dict[str, str] = {}
    for one in named:
        pair = (one.get("name"), one.get("template")) if isinstance(one, dict) else (None, None)
        if not (isinstance(pair[0], str) and isinstance(pair[1], str)):
            raise ConfigError(
                f"{path}: chat_template: {one!r:.40}; a text is needed, or a list of objects with "
                "name and template"
            )
        sources[pair[0]] = pair[1]
    return sources


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
