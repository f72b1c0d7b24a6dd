"""How values reach the knobs of `common.settings`: flag, `DFLASH_*`, file, default.

Owns precedence, the spelling of values as text, and the file a run's processes read. Does not know
what any key means. The environment is read in `environment` and nowhere else.
"""

import difflib
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from common.errors import ConfigError
from common.settings import KINDS, TABLES, Config, keys

RESOLVED_FILE: Final = "config.json"
ENV_PREFIX: Final = "DFLASH_"

_SWITCHED: Final = {"true": "on", "false": "off"}  # for keys that are on, off or auto
_WORDS: Final = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration and where each value came from: flag, env, file or default."""

    config: Config
    origins: Mapping[str, str]

    def save_resolved(self, run_dir: Path) -> None:
        """Write what the processes of a run read, readable by this user only."""
        body = {"config": as_tables(self.config), "origins": dict(self.origins)}
        path = run_dir / RESOLVED_FILE
        path.touch(mode=0o600)
        path.write_text(json.dumps(body, indent=2), encoding="utf-8")


def as_tables(config: Config) -> dict[str, dict[str, Any]]:
    """Plain nested dicts, as in the TOML file."""
    return {
        table: {key.name: getattr(getattr(config, table), key.name) for key in fields(kind)}
        for table, kind in TABLES.items()
    }


def environment() -> dict[str, str]:
    """Read the environment: the only place that does."""
    return dict(os.environ)


def load(file: Path | None, flags: Mapping[str, Any], environ: Mapping[str, str]) -> Resolved:
    """Merge flags, environment, file and defaults, in that order of precedence.

    Args:
        file: a TOML file, or None.
        flags: `table.key` to value; None: not given. Text is read by the key's type.
        environ: `DFLASH_TABLE_KEY` variables are taken, all others are left alone.

    Raises:
        ConfigError: unknown key (names the nearest known one), bad value, bad file.
    """
    kinds = {name: kind for name, kind, _, _ in keys()}
    switches = {name for name, _, _, rule in keys() if "on" in rule["names"]}
    layers: list[tuple[str, dict[str, Any]]] = [
        ("flag", {name: value for name, value in flags.items() if value is not None}),
        ("env", _from_environ(environ, kinds)),
        (f"file {file}", _from_file(file)),
    ]
    values: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
    origins = dict.fromkeys(kinds, "default")
    for origin, layer in reversed(layers):
        for name, value in layer.items():
            if name in switches:
                value = _SWITCHED.get(str(value).lower(), value)
            if name not in kinds:
                raise ConfigError(f"{origin}: unknown key {name!r}{_nearest(name, kinds)}")
            table, key = name.split(".")
            values[table][key] = _read(name, value, kinds[name])
            origins[name] = f"env {_env_name(name)}" if origin == "env" else origin
    tables = {table: kind(**values[table]) for table, kind in TABLES.items()}
    return Resolved(Config(**tables), origins)


def load_resolved(run_dir: Path) -> Config:
    """Read the configuration that the launcher wrote into a run folder."""
    path = run_dir / RESOLVED_FILE
    try:
        tables = json.loads(path.read_text(encoding="utf-8"))["config"]
        return Config(**{table: kind(**tables[table]) for table, kind in TABLES.items()})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: {error}; `dflash-up up` writes this file") from error


def _env_name(name: str) -> str:
    return ENV_PREFIX + name.replace(".", "_").upper()


def _from_environ(environ: Mapping[str, str], kinds: Mapping[str, type]) -> dict[str, str]:
    known = {_env_name(name): name for name in kinds}
    given = {name: text for name, text in environ.items() if name.startswith(ENV_PREFIX)}
    for name in given.keys() - known:
        raise ConfigError(f"env: unknown variable {name!r}{_nearest(name, known)}")
    return {known[name]: text for name, text in given.items()}


def _from_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as TOML ({error})") from error
    found: dict[str, Any] = {}
    for table, entries in tables.items():
        if table not in TABLES or not isinstance(entries, dict):
            raise ConfigError(f"file {file}: no table [{table}]{_nearest(table, TABLES)}")
        found.update({f"{table}.{key}": value for key, value in entries.items()})
    return found


def _nearest(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"; the nearest known one is {close[0]!r}" if close else ""


def _read(name: str, value: Any, kind: type) -> Any:
    """Turn text from a flag or variable into the key's type; the check sees the rest."""
    if kind in (float, str) and type(value) is int:
        return kind(value)
    if not isinstance(value, str) or kind is str:
        return value
    try:
        return _WORDS[value.lower()] if kind is bool else kind(value)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{name}: {value!r} is not {KINDS[kind]}") from error
