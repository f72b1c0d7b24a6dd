"""The README's table of configuration keys, made from `common/settings.py`.

`python tests/support/key_table.py` writes it into the README.
"""

import re
from pathlib import Path

from common import settings

README = Path(__file__).resolve().parents[2] / "README.md"
TABLE = re.compile(r"\| key \| default \| meaning \|\n(?:\|.*\n)+|^CONFIG_TABLE\n", re.MULTILINE)


def markdown_table():
    """One row per key, in the order of the code."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, kind, default, metadata in settings.keys():  # noqa: SIM118  # a function, not a dict
        shown = str(default).lower() if kind is bool else default
        text = metadata["text"]
        if metadata["names"] and len(metadata["names"]) < 8:
            text += " (" + ", ".join(metadata["names"]) + ")"
        rows.append(f"| `{name}` | `{shown}` | {text} |".replace("| `` |", "| |"))
    return "\n".join(rows) + "\n"


def main():
    text, n_changed = TABLE.subn(lambda _: markdown_table(), README.read_text(encoding="utf-8"))
    if n_changed != 1:
        raise SystemExit(f"README.md holds {n_changed} tables of keys; one is right")
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
