"""Configuration: precedence, unknown keys, and every declared range."""

import math

import pytest

from common.config import as_tables, load, load_resolved
from common.errors import ConfigError
from common.settings import Config, keys


def written(tmp_path, text):
    file = tmp_path / "run.toml"
    file.write_text(text)
    return file


def test_nothing_given_means_the_embedded_pair_and_one_process_of_each():
    """A zero-file start must work."""
    config = load(None, {}, {}).config
    assert config == Config()
    assert (config.target.replicas, config.drafter.replicas) == (1, 1)
    assert config.model.target_path.parts[-3:] == ("demo", "pair", "target")


def test_flag_beats_environment_beats_file_beats_default(tmp_path):
    """One order everywhere, and each value knows where it came from."""
    file = written(tmp_path, "[target]\nreplicas = 2\nthreads = 2\ncapacity = 2\n")
    environ = {"DFLASH_TARGET_REPLICAS": "3", "DFLASH_TARGET_THREADS": "3", "HOME": "/x"}
    resolved = load(file, {"target.replicas": "4", "target.capacity": None}, environ)
    target = resolved.config.target
    assert (target.replicas, target.threads, target.capacity) == (4, 3, 2)
    origins = resolved.origins
    assert origins["target.replicas"] == "flag"
    assert origins["target.threads"] == "env DFLASH_TARGET_THREADS"
    assert origins["target.capacity"] == f"file {file}"
    assert origins["target.device"] == "default"


@pytest.mark.parametrize(
    ("text", "flags", "environ", "nearest"),
    [
        ("[target]\nreplica = 1\n", {}, {}, "target.replicas"),
        ("[drafters]\nreplicas = 1\n", {}, {}, "drafter"),
        ("", {"policy.mod": "off"}, {}, "policy.mode"),
        ("", {}, {"DFLASH_TARGET_THREAD": "1"}, "DFLASH_TARGET_THREADS"),
    ],
)
def test_unknown_key_names_the_nearest_known_one(tmp_path, text, flags, environ, nearest):
    """A misspelt key must not be ignored: the run would use the default unnoticed."""
    with pytest.raises(ConfigError, match=nearest):
        load(written(tmp_path, text), flags, environ)


@pytest.mark.parametrize("name", [name for name, kind, _, rule in keys() if rule["names"]])
def test_every_choice_refuses_other_words(name):
    """Each key that takes a name lists the names it takes."""
    with pytest.raises(ConfigError, match=f"{name}: 'sideways'; choose one of"):
        load(None, {name: "sideways"}, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, bound)
        for name, kind, _, rule in keys()
        if kind in (int, float)
        for bound in (rule["low"] - 1, rule["high"] + 1)
        if math.isfinite(bound)
    ],
)
def test_every_range_refuses_the_number_just_outside(name, value):
    """Ranges are declared to be checked."""
    with pytest.raises(ConfigError, match=name):
        load(None, {name: str(int(value))}, {})


@pytest.mark.parametrize(("name", "kind"), [(n, k) for n, k, _, _ in keys() if k is not str])
def test_every_typed_key_refuses_text(name, kind):
    """`replicas = "many"` is a sentence for the user, not a traceback later."""
    with pytest.raises(ConfigError, match=name):
        load(None, {name: "many"}, {})


@pytest.mark.parametrize("text", ["[target]\nreplicas = true\n", "[policy]\ncopies = 1\n"])
def test_toml_types_are_not_mixed_up(tmp_path, text):
    """true is not 1: TOML has types, and a wrong one is a slip."""
    with pytest.raises(ConfigError):
        load(written(tmp_path, text), {}, {})


@pytest.mark.parametrize("width", ["auto", "fixed", 1, 16, "8"])
def test_verify_width_takes_names_and_numbers(width):
    """`verify_width = 8` in TOML is a number; on the command line it is text."""
    assert load(None, {"target.verify_width": width}, {}).config.target.verify_width == str(width)


@pytest.mark.parametrize("text", ["[target", "name = 1\n", "\xff"])
def test_broken_file_is_one_sentence(tmp_path, text):
    """A bad file names itself."""
    file = tmp_path / "bad.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        load(file, {}, {})


def test_missing_file_is_one_sentence(tmp_path):
    """A wrong path names itself."""
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load(tmp_path / "none.toml", {}, {})


def test_what_the_launcher_saves_the_processes_read(tmp_path):
    """Both sides of a run must use one configuration."""
    resolved = load(None, {"target.replicas": "2", "policy.mode": "fixed"}, {})
    resolved.save_resolved(tmp_path)
    assert load_resolved(tmp_path) == resolved.config
    assert (tmp_path / "config.json").stat().st_mode & 0o077 == 0


def test_damaged_resolved_file_is_one_sentence(tmp_path):
    """A process started by hand in the wrong folder says so."""
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_resolved(tmp_path)


def test_a_named_target_without_drafter_drafts_nothing():
    """The embedded drafter fits the embedded target only."""
    assert load(None, {"model.target": "/models/big"}, {}).config.model.drafter_path is None


def test_tables_are_the_toml_file_again():
    """`config --resolved` must print what can be read back."""
    tables = as_tables(load(None, {"run.name": "x"}, {}).config)
    flags = {
        f"{table}.{key}": value for table, rows in tables.items() for key, value in rows.items()
    }
    assert as_tables(load(None, flags, {}).config) == tables


@pytest.mark.parametrize(("text", "value"), [("true", "on"), ("false", "off"), ('"auto"', "auto")])
def test_a_switch_is_also_thrown_by_true_and_false(tmp_path, text, value):
    """`copies = true` is what everyone writes first."""
    made = load(written(tmp_path, f"[policy]\ncopies = {text}\n"), {}, {})
    assert made.config.policy.copies == value
