"""Every knob of the system: one frozen dataclass per TOML table.

Owns names, defaults, meanings and ranges. Does not know where a value comes from (`common.config`
does) nor what a process does with it.
Invariant: a `Config` that exists holds only known keys with checked values.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeVar, get_type_hints

from common.errors import ConfigError
from common.sources import ASKED, AUTO, COPIES, DRAFTER

T = TypeVar("T", bool, int, float, str)
PAIR_DIR: Final = Path(__file__).parent / "demo" / "pair"  # the embedded pair

KINDS: Final = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_DEVICES: Final = ("auto", "cpu", "gpu")
_BUILDS: Final = ("auto", "whole", "pipelined")
_FILLS: Final = ("auto", "eager", "deferred")
_AHEAD: Final = ("auto", "on", "overlap", "off")
_KEEPS: Final = ("auto", "on", "off")
_WIDTHS: Final = ("auto", "fixed", *map(str, range(1, 17)))  # a verify has at most 16 rows


def _key(default: T, text: str, low: float = -math.inf, high: float = math.inf, *names: str) -> T:
    """Declare one key: default, meaning, and its range or the names it may take."""
    rule = {"text": text, "low": low, "high": high, "names": names}
    return field(default=default, metadata=rule)


def _name(default: str, text: str, *names: str) -> str:
    return _key(default, text, 0, 0, *names)


class _Checked:
    """Checks the types and ranges that the keys of a table declare."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Raise ConfigError for the first value out of its range."""
        kinds = get_type_hints(type(self))
        for key in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            name = f"{_TABLE_NAMES[type(self)]}.{key.name}"
            _check(name, getattr(self, key.name), kinds[key.name], key.metadata)


@dataclass(frozen=True, slots=True)
class RunConfig(_Checked):
    """Where a run lives and how it speaks to its operator."""

    name: str = _key("default", "name of the run; `ps`, `generate`, `down` find it by this")
    run_dir: str = _key("", "folder of sockets, logs and pids; empty: made from the name")
    log_level: str = _name("info", "least level logged", "debug", "info", "warning", "error")
    log_json: bool = _key(False, "log JSON lines instead of text")
    grace_s: float = _key(20.0, "how long running requests may finish on the way down", 0, 3600)


@dataclass(frozen=True, slots=True)
class ModelConfig(_Checked):
    """Which checkpoints."""

    target: str = _key("", "folder of the target's checkpoint; empty: the embedded pair")
    drafter: str = _key("", "folder of its drafter; empty: the embedded one, or none")

    @property
    def target_path(self) -> Path:
        """Folder of the target's checkpoint."""
        return Path(self.target).expanduser() if self.target else PAIR_DIR / "target"

    @property
    def drafter_path(self) -> Path | None:
        """Folder of the drafter's checkpoint; None when a named target has no drafter."""
        if self.drafter:
            return Path(self.drafter).expanduser()
        return None if self.target else PAIR_DIR / "drafter"


@dataclass(frozen=True, slots=True)
class CoordinatorConfig(_Checked):
    """Admission, liveness and deadlines."""

    max_queue: int = _key(64, "requests that may wait; more are refused as `busy`", 0, 100_000)
    heartbeat_ms: int = _key(500, "time between heartbeats of a worker", 20, 60_000)
    lost_after: int = _key(4, "missed heartbeats until a worker counts as lost", 2, 100)
    draft_deadline_ms: float = _key(50.0, "draft deadline, or 3 x p95 when longer", 1, 60_000)
    prefill_budget_ms: float = _key(120_000.0, "longest prefill time without progress", 100)
    verify_budget_ms: float = _key(30_000.0, "longest time one verify may take", 100)
    max_replays: int = _key(2, "how often a request may move to another target", 0, 10)
    resume_s: float = _key(30.0, "how long a claimed request waits for a lost client", 0, 3600)
    slow_reader_s: float = _key(60.0, "how long a request waits for a slow reader", 0.1, 86_400)


@dataclass(frozen=True, slots=True)
class PolicyConfig(_Checked):
    """How many rows a round verifies: chosen each round, the whole block, or always one."""

    mode: str = _name("adaptive", "rows of a round", "adaptive", "fixed", "off")
    source: str = _name("auto", "who drafts; auto: a drafter, else the target's own head", *ASKED)
    copies: str = _name("auto", "draft by copying earlier text; auto: if nobody drafts", *COPIES)


@dataclass(frozen=True, slots=True)
class TargetConfig(_Checked):
    """The target processes."""

    replicas: int = _key(1, "how many target processes", 0, 64)
    device: str = _name("auto", "auto: gpu where MLX has one", *_DEVICES)
    threads: int = _key(0, "BLAS threads of each process; 0: the launcher's choice", 0, 512)
    capacity: int = _key(8, "sessions at once", 1, 1024)
    max_context: int = _key(0, "most tokens of prompt and reply; 0: the model's limit", 0)
    prefill_chunk: int = _key(256, "prompt tokens per forward", 1, 65_536)
    verify_width: str = _name("auto", "pad every verify: to the block, N rows, or not", *_WIDTHS)
    build: str = _name("auto", "hand a graph over at once or by layers", *_BUILDS)
    pipeline_layers: int = _key(0, "layers per hand-over to the device; 0: by device", 0, 1024)
    ple: str = _name("auto", "gather n-gram rows before or after a graph is built", *_FILLS)
    prebuild: str = _name("auto", "build the next graph while waiting, or while one runs", *_AHEAD)
    keep_packed: str = _name("auto", "multiply packed weights as they are; auto: on a GPU", *_KEEPS)
    # Of a model with 36 recurrent layers of 48 heads of 128 x 128 a prefix is 108 MiB and 25 KB a
    # token: five of 4000 tokens, so the two or three chats that one machine's user goes on with.
    prefix_cache_mb: int = _key(1024, "MiB of earlier prompts and replies kept; 0: none", 0)
    ready_timeout_s: float = _key(300.0, "longest time from start to ready", 1)
    restarts: int = _key(3, "how often a dead process is started again", 0)
    backoff_s: float = _key(0.5, "wait before the first restart; doubles up to 30 s", 0, 30)


@dataclass(frozen=True, slots=True)
class DrafterConfig(_Checked):
    """The drafter processes."""

    replicas: int = _key(1, "how many drafter processes", 0, 64)
    device: str = _name("auto", "auto: gpu where MLX has one", *_DEVICES)
    threads: int = _key(0, "BLAS threads of each process; 0: the launcher's choice", 0, 512)
    capacity: int = _key(8, "sessions at once", 1, 1024)
    ready_timeout_s: float = _key(300.0, "longest time from start to ready", 1)
    backoff_s: float = _key(0.5, "wait before the first restart; doubles up to 30 s", 0, 30)


@dataclass(frozen=True, slots=True)
class NetConfig(_Checked):
    """Endpoints beyond this machine; the ipc sockets of the run folder need no setting."""

    control: str = _key("", "tcp://HOST:PORT of the coordinator; empty: ipc only")
    data: str = _key("", "tcp://HOST:PORT (or :*) a target binds for drafters; empty: ipc only")


@dataclass(frozen=True, slots=True)
class KeysConfig(_Checked):
    """CURVE keys, needed by every tcp endpoint."""

    dir: str = _key("", "folder of keys and allow-list; empty: ~/.config/dflash-up/keys")
    name: str = _key("", "key pair this machine's processes use; empty: named as the role")

    @property
    def folder(self) -> Path:
        """Folder of keys."""
        return Path(self.dir or "~/.config/dflash-up/keys").expanduser()


@dataclass(frozen=True, slots=True)
class HttpConfig(_Checked):
    """The HTTP gateway, an optional process."""

    listen: str = _key("", "HOST:PORT of the OpenAI-compatible gateway; empty: none is started")
    key_file: str = _key("", "file of bearer keys, one a line; needed beyond this machine")
    model: str = _key("", "name the model is served under; empty: the target's folder")


@dataclass(frozen=True, slots=True)
class Config:
    """All tables."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    net: NetConfig = field(default_factory=NetConfig)
    keys: KeysConfig = field(default_factory=KeysConfig)
    http: HttpConfig = field(default_factory=HttpConfig)

    @property
    def drafter_path(self) -> Path | None:
        """Folder of the drafter's checkpoint; None where none is there or another source drafts."""
        return self.model.drafter_path if self.policy.source in (AUTO, DRAFTER) else None


TABLES: Final[dict[str, Any]] = get_type_hints(Config)
_TABLE_NAMES: Final = {kind: name for name, kind in TABLES.items()}


def keys() -> Iterator[tuple[str, type, Any, Mapping[str, Any]]]:
    """Yield (`table.key`, type, default, metadata) of every key, in order."""
    for table, kind in TABLES.items():
        kinds = get_type_hints(kind)
        for key in fields(kind):
            yield f"{table}.{key.name}", kinds[key.name], key.default, key.metadata


def _check(name: str, value: Any, kind: type, rule: Mapping[str, Any]) -> None:
    if type(value) is not kind:
        raise ConfigError(f"{name}: {value!r} is not {KINDS[kind]}")
    if rule["names"] and value not in rule["names"]:
        raise ConfigError(f"{name}: {value!r}; choose one of {', '.join(rule['names'])}")
    if kind in (int, float) and not rule["low"] <= value <= rule["high"]:
        raise ConfigError(f"{name}: {value}; it must lie in {rule['low']:g}..{rule['high']:g}")
