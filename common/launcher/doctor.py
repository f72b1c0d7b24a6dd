"""doctor."""

import click


@click.command("doctor")
def command() -> None:
    """Doctor."""
