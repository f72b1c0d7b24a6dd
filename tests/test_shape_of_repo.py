"""The repository keeps its shape: file sizes, signs on doors, no vague names."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("common", "drafter_svc", "target_svc")
SOURCES = sorted(
    path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if "prompts" not in path.parts
)
LIMIT, MODEL_LIMIT = 300, 700  # lines; a model file may be long because it is one thing
MESSAGE_LIST = "common/wire/messages.py"  # one dataclass per message: a table, not a program
FLAT_IN_COMMON = {
    "__init__",
    "errors",
    "config",
    "log",
    "metrics",
    "sampling",
    "settings",
    "sources",
}
VAGUE = {"utils", "util", "helpers", "misc", "base", "core", "manager", "common"}
TOP_LEVEL = {
    "pyproject.toml",
    "drafter_svc",
    "target_svc",
    "common",
    "tests",
    "compose",
    "README.md",
    "Makefile",
    "LICENSE",
    "NOTICE",
    "SECURITY.md",
    ".gitignore",
    ".ci",
}


def name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_file_can_be_read_in_one_sitting(path):
    """Files of two thousand lines are where the bugs of comparable projects sit."""
    is_model = path.parent.name == "models" or path.name == "model.py"
    limit = MODEL_LIMIT if is_model or name(path) == MESSAGE_LIST else LIMIT
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_module_says_what_it_owns(path):
    """A module without a sentence about its job collects other jobs."""
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_common_is_rooms_and_seven_flat_modules():
    """`common` must not become a drawer."""
    assert {path.stem for path in (ROOT / "common").glob("*.py")} <= FLAT_IN_COMMON


def test_no_module_has_a_vague_name():
    """`utils.py` has no owner."""
    assert [name(path) for path in SOURCES if path.stem in VAGUE] == []


def test_nothing_else_lies_at_the_top():
    """The top level is fixed; hidden caches and build leftovers do not count."""
    leftovers = {"build", "dist", "__pycache__"}
    found = {
        entry.name
        for entry in ROOT.iterdir()
        if not entry.name.startswith(".") and not entry.name.endswith(".egg-info")
    }
    assert found - leftovers <= TOP_LEVEL
