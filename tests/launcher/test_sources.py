"""Who drafts: a test per row of the table."""

import pytest

from common.errors import ConfigError
from common.sources import Armed, Present, arm

CANNOT = "the recurrent state of layer 3 cannot be rolled back"
ROWS = [
    # source, copies, drafter, mtp, refusal -> armed, copies
    ("auto", "auto", True, True, "", "drafter", False),  # a sidecar outranks the head
    ("auto", "auto", True, False, "", "drafter", False),  # a sidecar needs no head
    ("auto", "auto", False, True, "", "mtp", False),
    ("auto", "auto", False, False, "", "none", True),  # copies where nothing else drafts
    ("auto", "auto", True, True, CANNOT, "none", False),  # roll-back alone arms, nothing else does
    ("auto", "auto", False, False, CANNOT, "none", False),
    ("drafter", "auto", True, True, "", "drafter", False),
    ("mtp", "auto", True, True, "", "mtp", False),  # asked for by name, the head comes first
    ("mtp", "auto", False, True, "", "mtp", False),
    ("none", "auto", True, True, "", "none", False),
    ("auto", "on", True, True, "", "drafter", True),
    ("none", "on", True, True, "", "none", True),
    ("auto", "off", False, False, "", "none", False),
]


@pytest.mark.parametrize(("source", "copies", "drafter", "mtp", "refusal", "armed", "copied"), ROWS)
def test_row(source, copies, drafter, mtp, refusal, armed, copied):
    """A sidecar loaded and never armed: three separate times in the field."""
    assert arm(source, copies, Present(drafter, mtp, refusal)) == Armed(armed, copied)


@pytest.mark.parametrize(
    ("source", "copies", "present", "words"),
    [
        ("drafter", "auto", Present(False, True), "policy.source: 'drafter', but no drafter is"),
        ("mtp", "auto", Present(True, False), "policy.source: 'mtp', but the target's checkpoint"),
        ("drafter", "auto", Present(True, True, CANNOT), f"'drafter', but {CANNOT}"),
        ("mtp", "auto", Present(True, True, CANNOT), f"'mtp', but {CANNOT}"),
        ("auto", "on", Present(True, True, CANNOT), f"policy.copies: 'on', but {CANNOT}"),
    ],
)
def test_what_was_asked_for_and_cannot_be_armed_is_an_error(source, copies, present, words):
    """Silence here is the failure nobody notices: everything runs, plain."""
    with pytest.raises(ConfigError, match=words):
        arm(source, copies, present)


def test_never_two_sources():
    """The table gives one source, whatever there is."""
    for drafter in (False, True):
        for mtp in (False, True):
            source = arm("auto", "auto", Present(drafter, mtp)).source
            assert source in ("drafter", "mtp", "none")
