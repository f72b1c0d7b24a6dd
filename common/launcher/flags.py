"""Command line flags that are configuration: declared once, turned into keys of `common.config`.

Owns the flags that several commands share. Does not know what a command does.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from common.config import Resolved, environment, load
from common.errors import ConfigError
from common.launcher.plan import ROLES

F = TypeVar("F", bound=Callable[..., Any])

SCALE_ROLES = ("target", "drafter")


def name_option(command: F) -> F:
    """`--name`, which run."""
    return click.option("--name", metavar="NAME", help="Which run (default: default).")(command)


def config_options(command: F) -> F:
    """The flags that `resolve` reads."""
    options = (
        click.option(
            "-f", "--file", type=click.Path(path_type=Path), help="Configuration file (TOML)."
        ),
        name_option,
        click.option("--target", metavar="PATH", help="Folder of the target's checkpoint."),
        click.option("--drafter", metavar="PATH", help="Folder of the drafter's checkpoint."),
        click.option(
            "--set",
            "settings",
            metavar="TABLE.KEY=VALUE",
            multiple=True,
            help="Any other key, for example policy.mode=fixed.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def resolve(
    file: Path | None = None,
    name: str | None = None,
    target: str | None = None,
    drafter: str | None = None,
    settings: tuple[str, ...] = (),
    scale: tuple[str, ...] = (),
    http: str | None = None,
) -> Resolved:
    """One configuration out of flags, environment and file.

    Raises:
        ConfigError: unknown key or bad value, from wherever it came.
    """
    flags: dict[str, Any] = dict(_pair(text, "--set TABLE.KEY=VALUE") for text in settings)
    flags |= {f"{role}.replicas": count for role, count in parse_scale(scale).items()}
    given = {"run.name": name, "model.target": target, "model.drafter": drafter}
    given |= {"http.listen": http}
    flags |= {key: value for key, value in given.items() if value is not None}
    return load(file, flags, environment())


def parse_scale(pairs: tuple[str, ...]) -> dict[str, int]:
    """`drafter=2 target=1` as numbers.

    Raises:
        ConfigError: another role, or no number.
    """
    wanted: dict[str, int] = {}
    for text in pairs:
        role, count = _pair(text, "drafter=N or target=N")
        if role not in SCALE_ROLES or not count.isdecimal():
            raise ConfigError(f"scale: {text!r}; use drafter=N or target=N")
        wanted[role] = int(count)
    return wanted


def parse_roles(text: str | None) -> tuple[str, ...]:
    """`--only target,drafter` as roles; None: all.

    Raises:
        ConfigError: an unknown role.
    """
    if text is None:
        return ROLES
    roles = tuple(part.strip() for part in text.split(","))
    for role in roles:
        if role not in ROLES:
            raise ConfigError(f"--only: {role!r}; roles are {', '.join(ROLES)}")
    return roles


def _pair(text: str, form: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign:
        raise ConfigError(f"{text!r}: it must have the form {form}")
    return key.strip(), value.strip()
