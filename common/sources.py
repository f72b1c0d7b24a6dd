"""Who drafts: one table, from what was asked for and what there is.

Owns the order of draft sources and what is a start-up error. Pure; does not know checkpoints,
configuration files or rounds. Copies of earlier text are no row of the table: they take the place
of the armed source for one round, so there are never two sources in a round.

Source: ddalcu/mlx-serve, `specInitWiring` (a bound sidecar outranks the checkpoint's own head).
"""

from dataclasses import dataclass
from typing import Final

from common.errors import ConfigError

DRAFTER: Final = "drafter"  # a DFlash drafter beside the target
MTP: Final = "mtp"  # the target checkpoint's own head
NONE: Final = "none"
AUTO: Final = "auto"
ASKED: Final = (AUTO, DRAFTER, MTP, NONE)
COPIES: Final = (AUTO, "on", "off")


@dataclass(frozen=True, slots=True)
class Present:
    """What there is.

    Attributes:
        drafter: a drafter's checkpoint is bound to the target.
        mtp: the target's checkpoint has a head of its own that can be run.
        refusal: why rejected rows could not be rolled back; "" where they can.
    """

    drafter: bool
    mtp: bool
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Armed:
    """What drafts: `source` is DRAFTER, MTP or NONE, and `copies` may stand in for a round."""

    source: str
    copies: bool


NOBODY: Final = Armed(NONE, copies=False)


def arm(source: str, copies: str, present: Present) -> Armed:
    """Decide who drafts.

    Args:
        source: one of ASKED.
        copies: one of COPIES; "auto" copies where nothing else drafts.
        present: see `Present`.

    Raises:
        ConfigError: what was asked for by name cannot be armed; says why.

    Examples:
        >>> arm("auto", "auto", Present(drafter=True, mtp=True))
        Armed(source='drafter', copies=False)
        >>> arm("auto", "auto", Present(drafter=False, mtp=False))
        Armed(source='none', copies=True)
    """
    lacks = {
        DRAFTER: "" if present.drafter else "no drafter is configured; name one in model.drafter",
        MTP: "" if present.mtp else "the target's checkpoint has no MTP head that can be run",
    }
    if source in lacks:
        _require(f"policy.source: {source!r}", lacks[source] or present.refusal)
        chosen = source
    elif source == AUTO and not present.refusal:
        chosen = DRAFTER if present.drafter else MTP if present.mtp else NONE
    else:
        chosen = NONE
    if copies == "on":
        _require("policy.copies: 'on'", present.refusal)
    wants_copies = copies == "on" or (copies == AUTO and chosen == NONE and source != NONE)
    return Armed(chosen, wants_copies and not present.refusal)


def _require(what: str, fault: str) -> None:
    if fault:
        raise ConfigError(f"{what}, but {fault}")
