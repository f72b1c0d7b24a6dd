"""Page, roles and versions agree with the messages."""

import re
from importlib.resources import files

import pytest
from support.messages import CARD

from common.errors import AuthRefused, VersionMismatch
from common.wire import roles, version
from common.wire.codec import _RECORDS
from common.wire.fields import PARTS
from common.wire.messages import (
    TYPE_NUMBERS,
    Block,
    Bye,
    Drain,
    Features,
    ModelCard,
    Submit,
    Verified,
    Verify,
)

PAGE = (files("common.wire") / "PROTOCOL.md").read_text()


def fields_on_page(heading):
    section = re.split(r"^##", PAGE.split(f"\n### {heading}\n", 1)[1], maxsplit=1, flags=re.M)[0]
    return tuple(re.findall(r"^\| `(\w+)` \|", section, flags=re.M))


@pytest.mark.parametrize("kind", TYPE_NUMBERS, ids=lambda kind: kind.__name__)
def test_page_has_every_message_with_number_and_fields(kind):
    """The page is the authority for other languages; a stale one is worse than none."""
    number, record = _RECORDS[kind]
    assert fields_on_page(f"{number} {kind.__name__}") == record.names


@pytest.mark.parametrize("kind", PARTS, ids=lambda kind: kind.__name__)
def test_page_has_every_part_with_its_fields(kind):
    """A part is an array, so the order is the meaning."""
    assert fields_on_page(kind.__name__) == PARTS[kind].names


def test_page_names_no_message_that_does_not_exist():
    """A removed message must leave the page too."""
    named = set(re.findall(r"^### (\d+) (\w+)$", PAGE, flags=re.M))
    assert named == {(str(number), kind.__name__) for kind, number in TYPE_NUMBERS.items()}


def test_page_names_the_version():
    """The page is versioned with the code."""
    assert PAGE.startswith(f"# The protocol, version {version.MAJOR}.{version.MINOR}\n")


def test_numbers_are_unique():
    """Two classes with one number: one of them can never be received."""
    assert len(set(TYPE_NUMBERS.values())) == len(TYPE_NUMBERS)


def test_every_message_has_a_sender():
    """A message that nobody may send is refused everywhere."""
    sent = set().union(*roles.MAY_SEND.values())
    assert sent == set(TYPE_NUMBERS)


@pytest.mark.parametrize(
    ("plane", "role", "kind", "is_allowed"),
    [
        (roles.CONTROL, roles.CLIENT, Submit, True),
        (roles.CONTROL, roles.CLIENT, Drain, False),
        (roles.CONTROL, roles.DRAFTER, Verified, False),
        (roles.CONTROL, roles.TARGET, Verify, False),
        (roles.CONTROL, roles.ADMIN, Drain, True),
        (roles.DATA, roles.DRAFTER, Block, True),
        (roles.DATA, roles.DRAFTER, Features, False),
        (roles.DATA, roles.CLIENT, Block, False),
        (roles.DATA, "", Block, False),
        ("no plane", roles.ADMIN, Bye, False),
    ],
)
def test_role_decides_what_may_be_sent(plane, role, kind, is_allowed):
    """A drafter's key must not drain workers or send verdicts."""
    assert roles.may_send(plane, role, kind) is is_allowed


def test_refused_sender_is_named():
    """An audit line needs message, role and plane."""
    with pytest.raises(AuthRefused, match=r"Drain from role 'drafter' on the control plane"):
        roles.check_sender(roles.CONTROL, roles.DRAFTER, Drain("target.1"))


def test_other_major_is_refused_and_names_both_sides():
    """Half-understood peers fail later and elsewhere."""
    with pytest.raises(VersionMismatch, match=r"drafter\.1 speaks protocol 2\.3, this side .*1\.3"):
        version.check_version("drafter.1", 2, 3)
    version.check_version("drafter.1", 1, 99)


@pytest.mark.parametrize("field", ["fc_hash", "vocab_size", "tap_layer_ids", "tokenizer_hash"])
def test_cards_that_differ_name_both_sides_and_the_field(field):
    """A drafter for another target drafts nonsense at full cost."""
    other = {name: getattr(CARD, name) for name in CARD.__dataclass_fields__}
    other[field] = (9,) if field == "tap_layer_ids" else type(other[field])("7")
    sentence = version.card_mismatch("target.1", CARD, "drafter.1", ModelCard(**other))
    assert sentence is not None
    for part in (field, "target.1", "drafter.1"):
        assert part in sentence


def test_what_one_side_does_not_hold_is_not_compared():
    """A target without a drafter's folder has no fc to hash."""
    other = {name: getattr(CARD, name) for name in CARD.__dataclass_fields__}
    other |= {"fc_hash": "", "block_size": 0, "tap_layer_ids": (), "context_len": 99, "window": 0}
    assert version.card_mismatch("target.1", ModelCard(**other), "drafter.1", CARD) is None
