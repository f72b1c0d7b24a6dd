"""What a drafter's config says of its own confidences.

Owns the field and its check. Does not know how the policy uses it (`common.policy.calibration`);
the drafter only passes it on when it is ready.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drafter_svc.fields import read_number, refuse


@dataclass(frozen=True, slots=True)
class PriorConfig:
    """Before anything was observed, P(kept) = 1 / (1 + exp(-(intercept + slope * spread)))."""

    intercept: float
    slope: float


def read_prior(fields: Mapping[str, Any]) -> PriorConfig | None:
    """Read `calibration_prior`; None where the config has none.

    Raises:
        ModelMismatch: it is no object of two numbers.
    """
    told = fields.get("calibration_prior")
    if told is None:
        return None
    if not isinstance(told, Mapping) or {*told} != {"intercept", "slope"}:
        raise refuse("calibration_prior", told, "an object of intercept and slope")
    return PriorConfig(read_number(told, "intercept", 0.0), read_number(told, "slope", 0.0))
