"""The command line: verbs, flags, exit codes, and errors of one line.

Owns what is typed. Does not know how any of it is done. Exit codes: 0 clean, 1 failed, 2 usage or
configuration, 3 not ready in time, 4 address in use, 5 model mismatch, 6 keys, 130/143 forced.
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from common.config import as_tables, environment
from common.errors import DFlashError
from common.launcher import bench, demo, doctor, keyring
from common.launcher.flags import (
    config_options,
    name_option,
    parse_roles,
    parse_scale,
    resolve,
)
from common.launcher.generate import read_prompt, run_generate
from common.launcher.logs import read_logs
from common.launcher.orders import ask
from common.launcher.sampling_flags import options_of, sampling_options
from common.launcher.up import run_foreground, start_background, stop
from common.launcher.view import ps_table, show
from common.sdk.locate import run_dir_of

FORCED_INT: Final = 130
WAIT_S: Final = 300.0  # `--wait` without a number
CHANGE_S: Final = 120.0  # an order that drains may take this long


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dflash-up")
@click.pass_context
def cli(context: click.Context) -> int:
    """Serve a language model with DFlash speculative decoding.

    Without a command: start everything in the foreground on the embedded pair; Ctrl-C stops it.
    """
    if context.invoked_subcommand is None:
        return asyncio.run(run_foreground(resolve(), parse_roles(None)))
    return 0


@cli.command()
@config_options
@click.option("-d", "--detach", is_flag=True, help="Go to the background once it runs.")
@click.option(
    "--wait",
    "wait_s",
    type=float,
    is_flag=False,
    flag_value=WAIT_S,
    default=None,
    metavar="[SECONDS]",
    help="Go to the background when every process is ready.",
)
@click.option("--scale", multiple=True, metavar="ROLE=N", help="drafter=2 or target=2.")
@click.option("--http", metavar="HOST:PORT", help="Serve the OpenAI API too, 127.0.0.1:8080.")
@click.option("--only", metavar="ROLES", help="Start only these roles, for example drafter.")
def up(detach: bool, wait_s: float | None, only: str | None, **flags: Any) -> int:
    """Start a system."""
    resolved, roles = resolve(**flags), parse_roles(only)
    if detach or wait_s is not None:
        start_background(resolved, roles, wait_s)
        return 0
    return asyncio.run(run_foreground(resolved, roles))


@cli.command()
@click.argument("prompt", required=False)
@click.option("-f", "--file", type=click.Path(path_type=Path), help="Configuration file (TOML).")
@name_option
@click.option("--prompt-file", metavar="FILE", help="Read the prompt from a file; - is stdin.")
@sampling_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--color", type=click.Choice(["auto", "always", "never"]), default="auto")
def generate(
    prompt: str | None,
    file: Path | None,
    name: str | None,
    prompt_file: str | None,
    as_json: bool,
    color: str,
    **options: Any,
) -> int:
    """Continue PROMPT; starts a system of its own when none runs."""
    text, wanted = options_of(read_prompt(prompt, prompt_file), options)
    resolved = resolve(file=file, name=name)
    return run_generate(resolved, file, text, wanted, as_json=as_json, colour=color)


@cli.command()
@name_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def ps(name: str | None, as_json: bool) -> None:
    """Show the processes of a running system."""
    snapshot = ask(_run_dir(name), "ps")
    if as_json:
        click.echo(json.dumps(snapshot))
    else:
        click.echo(f"{snapshot['name']}: {snapshot['state']}  ({snapshot['run_dir']})")
        show(ps_table(snapshot))


@cli.command()
@click.argument("process", metavar="[NAME]", required=False)
@name_option
@click.option("-f", "--follow", is_flag=True, help="Go on until the system ends.")
def logs(process: str | None, name: str | None, follow: bool) -> None:
    """Show what the processes logged."""
    for line in read_logs(_run_dir(name), process, follow=follow):
        click.echo(line)


@cli.command()
@click.argument("formation", nargs=-1, required=True, metavar="ROLE=N...")
@name_option
def scale(formation: tuple[str, ...], name: str | None) -> None:
    """Change how many drafters or targets run; the ones that go are drained."""
    changed = ask(_run_dir(name), "scale", CHANGE_S, **parse_scale(formation))["changed"]
    click.echo(", ".join(changed) or "nothing to change")


@cli.command()
@click.argument("process", metavar="NAME")
@name_option
def restart(process: str, name: str | None) -> None:
    """Drain one worker and start it again."""
    ask(_run_dir(name), "restart", CHANGE_S, name=process)


@cli.command()
@click.argument("process", metavar="NAME")
@name_option
def drain(process: str, name: str | None) -> None:
    """Drain one worker and end it for good."""
    ask(_run_dir(name), "drain", CHANGE_S, name=process)


@cli.command()
@name_option
def down(name: str | None) -> None:
    """Stop a system and remove its run folder."""
    resolved = resolve(name=name)
    run_dir = run_dir_of(resolved.config, environment())
    if not stop(run_dir, resolved.config.run.grace_s):
        click.echo(f"nothing runs in {run_dir}", err=True)


@cli.command()
@config_options
@click.option("--resolved", is_flag=True, help="Every value and where it comes from.")
@click.option("--write", is_flag=True, help="Also into the run folder, for services run by hand.")
def config(resolved: bool, write: bool, **flags: Any) -> None:
    """Check a configuration and print it."""
    made = resolve(**flags)
    if write:
        run_dir = run_dir_of(made.config, environment())
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        made.save_resolved(run_dir)
    for table, keys in as_tables(made.config).items():
        click.echo(f"[{table}]")
        for key, value in keys.items():
            origin = made.origins[f"{table}.{key}"]
            if resolved or origin != "default":
                click.echo(f"{key} = {json.dumps(value)}  # {origin}")


cli.add_command(bench.command)
cli.add_command(demo.command)
cli.add_command(doctor.command)
cli.add_command(keyring.group)


def _run_dir(name: str | None) -> Path:
    return run_dir_of(resolve(name=name).config, environment())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Every error is one line on standard error."""
    try:
        code = cli.main(args=arguments, prog_name="dflash-up", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.UsageError as error:
        return _say(error.format_message() + "; see --help", error.exit_code)
    except click.ClickException as error:
        return _say(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return FORCED_INT
    except DFlashError as error:
        return _say(str(error), error.exit_code)
    except BrokenPipeError:  # `dflash-up logs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _say(sentence: str, code: int) -> int:
    click.echo(f"dflash-up: {' '.join(sentence.split())}", err=True)
    return code
