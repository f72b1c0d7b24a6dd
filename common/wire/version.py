"""Which peers understand each other, and which models fit each other.

Owns the protocol's version numbers, the release's name and the comparison of model cards. Does not
know messages' bytes or who is connected.
"""

from dataclasses import fields
from importlib import metadata
from typing import Final

from common.errors import VersionMismatch
from common.wire.messages import ModelCard

MAJOR: Final = 1  # rises when an old peer would misunderstand
MINOR: Final = 3  # rises when fields (with defaults, at the end) or types are added

# What may differ between a drafter and its target: what each is, and how much it can hold.
_OWN_BUSINESS: Final = frozenset({"model_type", "context_len", "window"})


def build() -> str:
    """The installed release, for people; "source" in a checkout that is not installed."""
    try:
        return metadata.version("dflash-up")
    except metadata.PackageNotFoundError:
        return "source"


def compatible(major: int) -> bool:
    """Whether a peer of this major version is understood; minors never divide."""
    return major == MAJOR


def check_version(name: str, major: int, minor: int) -> None:
    """Refuse a peer of another major version.

    Raises:
        VersionMismatch: names both sides.
    """
    if not compatible(major):
        raise VersionMismatch(
            f"{name} speaks protocol {major}.{minor}, this side speaks {MAJOR}.{MINOR}: "
            "install the same release on both"
        )


def card_mismatch(left_name: str, left: ModelCard, right_name: str, right: ModelCard) -> str | None:
    """Compare two fingerprints; a field that one side does not hold ("" or 0 or ()) fits.

    Returns:
        None when they fit, else a sentence that names both sides and the first field that differs.

    >>> card = ModelCard("a", 8, 4, 64, 4, 0, (1,), "mean", "f", "n", "e", "h", "t")
    >>> card_mismatch("target.1", card, "drafter.1", card) is None
    True
    """
    for field in fields(ModelCard):
        mine, theirs = getattr(left, field.name), getattr(right, field.name)
        if field.name not in _OWN_BUSINESS and mine and theirs and mine != theirs:
            return (
                f"{field.name} differs: {left_name} has {_short(mine)}, "
                f"{right_name} has {_short(theirs)}; both must be given the same target and drafter"
            )
    return None


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 24 else f"{shown[:20]}...'"
