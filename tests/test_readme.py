"""The README tells the truth: its commands parse, its snippets run, its tables match the code."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.key_table import markdown_table
from support.running import running

from common.launcher.cli import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [(match.group(1), match.group(2)) for match in FENCE.finditer(README)]
SNIPPETS = [body for language, body in BLOCKS if language == "python"]
COMMANDS = sorted(
    {
        line.split("#")[0].strip()
        for language, body in BLOCKS
        if language == "sh"
        for line in body.splitlines()
        if line.startswith(("dflash-up", "make", "pip", "bash"))
    }
)
VERBS = re.findall(r"`dflash-up ([a-z]+)", README)


def test_no_placeholder_is_left():
    """A table that says NUMBERS was forgotten."""
    assert not re.search(r"^[A-Z_]{6,}$", README, re.MULTILINE)


def test_every_verb_it_names_exists():
    """A verb that was renamed must be renamed here too."""
    assert VERBS
    assert set(VERBS) <= set(cli.commands)


def test_every_verb_that_exists_is_named():
    """A verb nobody can find is not there."""
    documented = set(re.findall(r"`([a-z]+)[ `\[]", README)) | set(VERBS)
    assert set(cli.commands) <= documented


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("dflash-up ")])
def test_every_command_it_shows_parses(line):
    """`--help` behind a command line parses everything before it."""
    words = shlex.split(line)[1:]
    name = next((word for word in words if word in cli.commands), None)
    assert name is not None
    options = {option for word in cli.commands[name].params for option in word.opts}
    assert {word.split("=")[0] for word in words if word.startswith("--")} <= options
    assert CliRunner().invoke(cli, [name, "--help"]).exit_code == 0


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:`|^)make ([a-z-]+)", README, re.M))))
def test_every_make_target_it_names_exists(target):
    """`make` without such a target is a newcomer's first impression."""
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_configuration_table_is_the_one_the_code_has():
    """Every key, its default and its meaning, generated from `common/settings.py`."""
    assert markdown_table() in README


def test_every_path_on_the_map_exists():
    """The map names files; a moved one must move here."""
    body = next(body for _, body in BLOCKS if body.startswith("common/errors.py"))
    paths = [line.split()[0] for line in body.splitlines() if line.strip()]
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.timeout(180)
def test_every_python_snippet_passes_the_type_checker(tmp_path):
    """An example with a wrong keyword is copied a hundred times."""
    for index, body in enumerate(SNIPPETS):
        (tmp_path / f"snippet_{index}.py").write_text(body, encoding="utf-8")
    flags = ["--strict", "--follow-imports=silent", "--ignore-missing-imports"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *flags, *map(str, sorted(tmp_path.glob("*.py")))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.system
@pytest.mark.timeout(180)
def test_every_python_snippet_runs():
    """The first thing a user copies."""
    assert len(SNIPPETS) >= 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with running("--http", f"127.0.0.1:{port}") as system:
        for body in SNIPPETS:
            done = subprocess.run(
                [sys.executable, "-W", "error", "-c", body.replace(":8080/", f":{port}/")],
                env={**os.environ, **system.environ},
                cwd=system.folder,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip()
