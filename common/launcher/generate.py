"""`dflash-up generate`: one completion, from the running system or from one of its own.

Owns where the prompt comes from and how the reply is printed. Does not know how it is made.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, TextIO

import click

from common.config import Resolved, environment
from common.errors import BadRequest, ConfigError
from common.launcher.launch import OnRows, ignore_rows, private, with_systems
from common.launcher.view import StartupView, summary, wants_colour, write_tokens
from common.net.sockets import is_listening
from common.net.transport import CONTROL_SOCKET
from common.sdk import Client, Completion, EndEvent, TokenEvent
from common.sdk.locate import run_dir_of
from common.sdk.options import Options
from common.sdk.request import make_request

INTERRUPTED: int = 130


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt as text, from the argument, a file, or standard input (`-`).

    Raises:
        BadRequest: none or both given, or the file is not UTF-8.
        ConfigError: the file cannot be read.
    """
    if (prompt is None) == (file is None):
        raise BadRequest("prompt: give PROMPT or --prompt-file FILE, one of them")
    if file is None:
        return prompt or ""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"--prompt-file {file}: {reason}; give a readable file") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(
            f"--prompt-file {file}: byte {error.start} is {data[error.start]:#04x}, which is no "
            "UTF-8; a prompt must be UTF-8 text"
        ) from error


def run_generate(
    resolved: Resolved,
    file: Path | None,
    prompt: str | None,
    options: Options,
    *,
    as_json: bool,
    colour: str,
) -> int:
    """Generate and print; returns the exit code."""
    make_request(prompt, None, **options)  # a bad parameter must not cost a start-up
    is_coloured = not as_json and wants_colour(colour, sys.stdout)
    run_dir = run_dir_of(resolved.config, environment())
    if is_listening(run_dir / CONTROL_SOCKET) or resolved.config.net.control:
        with Client(resolved.config.run.name, file=file) as client:
            _print_reply(client, prompt, options, as_json=as_json, colour=is_coloured)
        return 0

    def work(folders: list[Path]) -> bool:
        with Client(run_dir=folders[0]) as client:
            _print_reply(client, prompt, options, as_json=as_json, colour=is_coloured)
        return True

    done = asyncio.run(with_systems([private(resolved, "one")], work, start_up_view))
    return 0 if done else INTERRUPTED


def start_up_view() -> OnRows:
    """Start-up lines where somebody looks; scripts get replies and errors only."""
    return StartupView() if sys.stderr.isatty() else ignore_rows


def stream_reply(
    client: Client, prompt: str | None, options: Options, out: TextIO, *, colour: bool
) -> Completion:
    """Write a reply as it comes; returns the whole of it."""
    with client.stream(prompt, **options) as stream:
        for event in stream:
            if isinstance(event, TokenEvent | EndEvent):
                write_tokens(event, out, colour=colour)
        return stream.completion


def _print_reply(
    client: Client, prompt: str | None, options: Options, *, as_json: bool, colour: bool
) -> None:
    if as_json:
        body: dict[str, Any] = client.generate(prompt, **options).as_json()
        click.echo(json.dumps(body))
        return
    done = stream_reply(client, prompt, options, sys.stdout, colour=colour)
    click.echo()
    if sys.stderr.isatty():
        click.echo(summary(done.stats, done.n_tokens), err=True)
