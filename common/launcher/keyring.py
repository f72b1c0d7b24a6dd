"""`dflash-up keys`: make, list and revoke CURVE keys.

Owns the verbs. Does not know how keys are stored or checked (`common.net.auth`).
"""

from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from common.launcher.flags import resolve
from common.launcher.view import show
from common.net.auth import list_keys, new_keys, revoke_keys
from common.wire.roles import ROLES

FILE = click.option(
    "-f", "--file", type=click.Path(path_type=Path), help="Configuration file (TOML)."
)


@click.group("keys")
def group() -> None:
    """CURVE keys for tcp: who may connect, and as what."""


@group.command()
@click.argument("name")
@click.option("--role", required=True, type=click.Choice(ROLES))
@FILE
def new(name: str, role: str, file: Path | None) -> None:
    """Make a key pair and allow it here."""
    folder = resolve(file=file).config.keys.folder
    keys = new_keys(folder, name, role)
    click.echo(f"{folder / f'{name}.key'}  (secret: copy it to the machine that uses it)")
    click.echo(f"{folder / 'keys.d' / f'{name}.pub'}  (public: {keys.public_key}, role {role})")


@group.command("list")
@FILE
def list_(file: Path | None) -> None:
    """Show who may connect."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("NAME", "ROLE", "PUBLIC KEY"):
        table.add_column(column, no_wrap=True)
    for entry in list_keys(resolve(file=file).config.keys.folder):
        table.add_row(entry.name, entry.role, entry.public_key)
    show(table)


@group.command()
@click.argument("name")
@FILE
def revoke(name: str, file: Path | None) -> None:
    """Take a key off the allow-list; a running system closes its door within a second."""
    revoke_keys(resolve(file=file).config.keys.folder, name)
