"""`dflash-up demo`: three processes start, a real file is continued, drafted meets plain.

Owns the order of the show. Does not know how figures are made (`tally`) or processes kept.
"""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from common.errors import ConfigError
from common.launcher.bench import PROMPTS, describe_settings, run_of
from common.launcher.flags import config_options, resolve
from common.launcher.generate import INTERRUPTED, read_prompt, stream_reply
from common.launcher.launch import private, with_systems
from common.launcher.tally import Run, speed_table, summarize, verdict
from common.launcher.view import ACCEPTED_COLOUR, StartupView, show, wants_colour
from common.sdk import Client

SHOWN_LINES: Final = 12  # of the prompt
SHOWN_FILE: Final = "tenacity_init.py.txt"  # neither the easiest to draft nor the hardest
COMPARED_TOKENS: Final = 128
ARMS: Final = ("plain", "drafted")


@click.command("demo")
@config_options
@click.option("--prompt-file", metavar="FILE", help="Default: one of the held-out files.")
@click.option("--max-tokens", type=click.IntRange(2), default=192, show_default=True)
@click.option("--color", type=click.Choice(["auto", "always", "never"]), default="auto")
def command(prompt_file: str | None, max_tokens: int, color: str, **flags: Any) -> int:
    """Show it: start, continue a file in colour, compare drafted with plain decode."""
    resolved = resolve(**flags)
    files = [Path(prompt_file)] if prompt_file else sorted(PROMPTS.glob("*.py.txt"))
    if not files:
        raise ConfigError(f"demo: no prompt files in {PROMPTS}; name one with --prompt-file")
    texts = {file.name: read_prompt(None, str(file)) for file in files}
    shown = SHOWN_FILE if SHOWN_FILE in texts else files[0].name
    colour = wants_colour(color, sys.stdout)
    click.echo(describe_settings(resolved.config))

    def work(folders: list[Path]) -> bool:
        with Client(run_dir=folders[0]) as client:
            _show(client, shown, texts[shown], max_tokens, colour=colour)
            _compare(client, texts, min(max_tokens, COMPARED_TOKENS))
        return True

    plans = [private(resolved, "demo")]
    done = asyncio.run(with_systems(plans, work, lambda: StartupView(sys.stdout)))
    return 0 if done else INTERRUPTED


def _show(client: Client, name: str, text: str, max_tokens: int, *, colour: bool) -> None:
    click.echo()
    accepted = click.style("accepted drafts", fg=ACCEPTED_COLOUR) if colour else "accepted drafts"
    click.echo(
        f"{name}, a file the models have never seen; {accepted} and the target's own tokens:"
    )
    click.echo()
    head = "\n".join(text.splitlines()[-SHOWN_LINES:])
    click.echo(click.style(head, dim=True) if colour else head, nl=not text.endswith("\n"))
    if text.endswith("\n"):
        click.echo()
    done = stream_reply(client, text, {"max_tokens": max_tokens}, sys.stdout, colour=colour)
    click.echo()
    click.echo()
    click.echo(
        f"{done.n_tokens} tokens in {done.stats['rounds']} rounds: "
        f"{done.stats['drafts_accepted']} accepted drafts"
    )


def _compare(client: Client, texts: dict[str, str], max_tokens: int) -> None:
    """Both arms on every file, the other one first on every second file."""
    click.echo(f"\ncomparing drafted with plain decode on {len(texts)} files ...")
    runs: list[Run] = []
    for index, (name, text) in enumerate(texts.items()):
        for arm in reversed(ARMS) if index % 2 else ARMS:
            is_drafted = arm == "drafted"
            done = client.generate(text, max_tokens=max_tokens, draft=is_drafted, ignore_eos=True)
            runs.append(replace(run_of(arm, done), file=name))
    click.echo()
    summaries = summarize(runs, reference="plain")
    show(speed_table(summaries, len(texts), "drafted against plain"))
    click.echo(verdict(summaries, "drafted"))
