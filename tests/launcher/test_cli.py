"""The command line: exit codes, one-line errors, and the verbs that need no processes."""

import json
import subprocess
import sys

import pytest

from common.launcher.cli import run


@pytest.fixture(autouse=True)
def own_run_folder(tmp_path, monkeypatch):
    """No test may see a system that somebody runs on this machine."""
    monkeypatch.setenv("DFLASH_RUN_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("DFLASH_KEYS_DIR", str(tmp_path / "keys"))


def typed(capsys, *arguments):
    """Type a command; returns (exit code, standard output, standard error)."""
    code = run([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("bogus",), 2, "bogus"),
        (("up", "--no-such-flag"), 2, "--no-such-flag"),
        (("up", "--scale", "coordinator=2"), 2, "drafter=N or target=N"),
        (("up", "--scale", "drafter=many"), 2, "drafter=many"),
        (("up", "--scale", "drafter=65"), 2, "drafter.replicas"),
        (("up", "--only", "everything"), 2, "everything"),
        (("up", "--set", "policy.mode"), 2, "TABLE.KEY=VALUE"),
        (("up", "--set", "policy.mood=fixed"), 2, "policy.mode"),
        (("up", "-f", "/nowhere/x.toml"), 2, "/nowhere/x.toml"),
        (("up", "--target", "/nowhere"), 2, "model.target: /nowhere"),
        (("up", "-d", "--target", "/nowhere"), 2, "model.target: /nowhere"),
        (("generate",), 2, "PROMPT"),
        (("generate", "x", "--prompt-file", "y"), 2, "one of them"),
        (("generate", "--prompt-file", "/nowhere.py"), 2, "/nowhere.py"),
        (("generate", "x", "--acceptance", "lucky"), 2, "acceptance: 'lucky'"),
        (("generate", "x", "--logit-bias", "7"), 2, "--logit-bias 7"),
        (("generate", "x", "--logit-bias", "7=1", "--logit-bias", "7=2"), 2, "given before"),
        (("generate", "x", "--system", "y"), 2, "--system: only a chat"),
        (("generate", "x", "--chat", "--tools", "/nowhere"), 2, "--tools /nowhere"),
        (("generate", "x", "--logprobs", "99"), 2, "logprobs: 99"),
        (("generate", "x", "--max-tokens", "0"), 2, "max_tokens: 0"),
        (("generate", "x", "--max-tokens", "many"), 2, "--max-tokens"),
        (("generate", "x", "--seed", "-1"), 2, "seed: -1"),
        (("ps",), 1, "dflash-up up"),
        (("scale", "drafter=2"), 1, "dflash-up up"),
        (("restart", "drafter.1"), 1, "dflash-up up"),
        (("logs",), 2, "there are none"),
        (("keys", "new", "x", "--role", "boss"), 2, "boss"),
        (("keys", "revoke", "nobody"), 6, "nobody"),
        (("bench", "--arms", "direct,magic"), 2, "magic"),
        (("bench", "--prompts", "/nowhere"), 2, "--prompts /nowhere: no prompt files"),
    ],
)
def test_every_mistake_is_one_line_that_names_it(capsys, arguments, code, named):
    """A traceback is no answer, and the exit code is what scripts look at."""
    got, out, err = typed(capsys, *arguments)
    assert (got, out) == (code, "")
    assert named in err
    assert len(err.strip().splitlines()) == 1


def test_prompt_file_that_is_not_utf8_names_the_byte(capsys, tmp_path):
    """The user must find the place in the file."""
    file = tmp_path / "latin.py"
    file.write_bytes("# caf\xe9".encode("latin-1"))
    code, _, err = typed(capsys, "generate", "--prompt-file", file)
    assert code == 2
    assert "byte 5 is 0xe9" in err


def test_down_with_nothing_running_is_clean(capsys):
    """Scripts call it to be sure."""
    code, _, err = typed(capsys, "down")
    assert code == 0
    assert "nothing runs" in err


def test_config_prints_what_can_be_read_back_and_whence(capsys, tmp_path):
    """`config --resolved` is the answer to "why does it do that?"."""
    file = tmp_path / "a.toml"
    file.write_text("[drafter]\nreplicas = 2\n")
    code, out, _ = typed(capsys, "config", "-f", file, "--set", "policy.mode=off", "--resolved")
    assert code == 0
    assert f"replicas = 2  # file {file}" in out
    assert 'mode = "off"  # flag' in out
    again = tmp_path / "b.toml"
    again.write_text(out)
    assert typed(capsys, "config", "-f", again)[0] == 0


def test_config_write_prepares_a_folder_for_services_run_by_hand(capsys, tmp_path):
    """compose.yaml starts each role in a container of its own."""
    assert typed(capsys, "config", "--write")[0] == 0
    assert "config" in json.loads((tmp_path / "run" / "config.json").read_text())


def test_keys_are_made_listed_and_revoked(capsys):
    """The whole life of a key, as an operator types it."""
    code, out, _ = typed(capsys, "keys", "new", "drafter-box", "--role", "drafter")
    assert code == 0
    assert "secret: copy it" in out
    listed = typed(capsys, "keys", "list")[1]
    assert "drafter-box" in listed
    assert typed(capsys, "keys", "new", "drafter-box", "--role", "drafter")[0] == 6
    assert typed(capsys, "keys", "revoke", "drafter-box")[0] == 0
    assert "drafter-box" not in typed(capsys, "keys", "list")[1]


def test_help_of_every_verb_is_shown(capsys):
    """Design and command line list the same verbs."""
    _, out, _ = typed(capsys, "--help")
    verbs = "up generate ps logs scale restart drain down bench demo doctor config keys"
    for verb in verbs.split():
        assert f"  {verb} " in out
        assert typed(capsys, verb, "--help")[0] == 0


def test_importing_the_command_line_loads_no_tensor_library():
    """`dflash-up ps` must work, and be quick, where MLX is broken."""
    program = (
        "import sys, common.launcher.cli; "
        "sys.exit(any(name.split('.')[0] in ('mlx', 'torch') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
