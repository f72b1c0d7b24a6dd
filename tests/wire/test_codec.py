"""Messages survive the wire; nothing else does."""

import dataclasses

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from support import messages as any_message
from support.messages import GOLDEN, KEY, NAMED

from common.errors import BadTensor, TooLarge, WireError
from common.wire import codec
from common.wire.codec import MAGIC, MAX_HEADER_BYTES, pack, unpack
from common.wire.messages import (
    TYPE_NUMBERS,
    Block,
    Bye,
    Cancel,
    Draft,
    Features,
    Heartbeat,
    Progress,
    Sampling,
    Submit,
    Tokens,
    Verified,
    Verify,
)
from common.wire.tensors import Tensor, from_ids
from common.wire.version import MINOR

VERIFY = TYPE_NUMBERS[Verify]
WIRE_KEY = ("s-1", 1, 5, 1000, 77, 9)


def header(*fields):
    return msgpack.packb(fields)


def refused(*frames, match=None):
    with pytest.raises(WireError, match=match) as caught:
        unpack(frames)
    return caught.value


def verify_with(*fields):
    return [MAGIC, header(VERIFY, MINOR, *fields)]


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(any_message.ANY)
def test_every_message_survives_the_wire(message):
    """A field that changes on the way changes a round somewhere else."""
    frames = [bytes(frame) for frame in pack(message)]
    assert unpack(frames) == message


@pytest.mark.parametrize("kind", TYPE_NUMBERS, ids=lambda kind: kind.__name__)
@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=any_message.st.data())
def test_every_class_survives_the_wire(kind, data):
    """A random choice may leave a class out for weeks."""
    message = data.draw(any_message.of_class(kind))
    assert unpack([memoryview(bytes(frame)) for frame in pack(message)]) == message


@pytest.mark.parametrize("name", NAMED)
def test_golden_frames_have_not_changed(name):
    """Bytes that change under the same version number break every running peer."""
    stored = msgpack.unpackb((GOLDEN / f"{name}.bin").read_bytes())
    assert [bytes(frame) for frame in pack(NAMED[name])] == stored
    assert unpack(stored) == NAMED[name]


def test_error_names_path_and_both_types():
    """ "bad message" alone sends a person to a debugger."""
    fault = refused(*verify_with(WIRE_KEY, "x", 50.0, ()))
    assert str(fault) == "Verify.rows: expected int 1..16, got str 'x'"


def test_error_below_a_part_names_the_whole_path():
    """The fault may lie two levels down."""
    fault = refused(*verify_with(("s-1", 1, 5, -1, 77, 9), 8, 50.0, ()))
    assert str(fault).startswith("Verify.key.base: expected int 0..")


def test_error_in_an_array_names_the_index():
    """Sixteen ids and no hint which one is wrong."""
    fault = refused(*verify_with(WIRE_KEY, 8, 50.0, (1, 2, None)))
    assert str(fault).startswith("Verify.copy_ids[2]: expected int")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows", 0),
        ("rows", 17),
        ("rows", True),
        ("rows", 1.0),
        ("block_deadline_ms", float("nan")),
        ("block_deadline_ms", float("inf")),
        ("block_deadline_ms", -1.0),
        ("copy_ids", (-1,)),
        ("copy_ids", (2**31,)),
        ("copy_ids", (0,) * 16),
        ("copy_ids", b"\1"),
        ("key", None),
        ("key", WIRE_KEY[:5]),
        ("key", (*WIRE_KEY, 0)),
        ("key", ("s" * 65, 1, 5, 1000, 77, 9)),
        ("key", (b"s", 1, 5, 1000, 77, 9)),
    ],
)
def test_value_outside_its_range_is_refused(field, value):
    """An id past the vocabulary or a row count of 17 must not reach a tensor."""
    fields = {"key": WIRE_KEY, "rows": 8, "block_deadline_ms": 50.0, "copy_ids": ()}
    assert f"Verify.{field}" in str(refused(*verify_with(*(fields | {field: value}).values())))


@pytest.mark.parametrize(
    "message",
    [
        Verify(KEY, 0, 50.0),
        Verify(KEY, 4, float("nan")),
        Draft(KEY, 16, 1.0),
        Progress("load", 1.5),
        Block(KEY, (1, 2), (0.5,)),
        Tokens("r", 0, (1, 2), ("a",), 0),
        Tokens("r", 0, (1,), ("a",), 2),
        Verified(KEY, 2, 2, (1, 2, 3), ("", "", ""), "", "", 0, 1.0, 0.0),
        Verified(KEY, 4, 1, (1, 2, 3), ("", "", ""), "", "", 0, 1.0, 0.0),
        Bye("\ud800"),
        Bye(7),
        Heartbeat("ready", 0, 0.0, 0, {"x": [1]}),
        Heartbeat("ready", 0, 0.0, 0, {1: 1}),
        Heartbeat("ready", 0, 0.0, 0, {"x": 2**70}),
        Submit("r", Tensor("float32", (1,), bytes(4)), Sampling()),
        Submit("r", Tensor("int32", (1, 1), bytes(4)), Sampling()),
        "no message",
    ],
    ids=repr,
)
def test_sender_finds_its_own_slip(message):
    """A fault found by the receiver is a strike against an honest peer."""
    with pytest.raises(WireError):
        pack(message)


def test_header_over_the_cap_is_refused_by_the_sender():
    """The peer would cut the connection without saying why."""
    with pytest.raises(TooLarge):
        pack(Tokens("r", 0, (1,) * 1000, ("x" * 100,) * 1000, 0))


def test_header_over_the_cap_is_refused_before_parsing(monkeypatch):
    """A 16 MB nest of small arrays passes msgpack's limits and takes 8 s and 1 GB."""
    monkeypatch.setattr(codec.msgpack, "unpackb", lambda *_, **__: pytest.fail("was parsed"))
    with pytest.raises(TooLarge):
        unpack([MAGIC, b"\x91" * (MAX_HEADER_BYTES + 1)])


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [MAGIC],
        [b"", b""],
        [b"DF2", header(7, 0, "x")],
        [MAGIC, b""],
        [MAGIC, b"\xc1"],
        [MAGIC, header(7, 0, "x") + b"\0"],
        [MAGIC, header(7, 0, "x")[:-1]],
        [MAGIC, msgpack.packb({"type": 7})],
        [MAGIC, msgpack.packb(7)],
        [MAGIC, header()],
        [MAGIC, header(7)],
        [MAGIC, header("7", 0, "x")],
        [MAGIC, header(7, -1, "x")],
        [MAGIC, header(7, True, "x")],
        [MAGIC, header(99, 0, "x")],
        [MAGIC, header(7, 0)],
        [MAGIC, header(7, 0, "x", "y")],
        [MAGIC, header(7, 0, "x"), b"tensor"],
        [MAGIC, header(7, 0, "x"), b"", b"", b""],
        [MAGIC, header(7, 0, "x")] * 500,
        [MAGIC, header(7, 0, msgpack.ExtType(1, b"x"))],
        [MAGIC, header(7, 0, msgpack.Timestamp(1))],
        [MAGIC, header(7, 1, "x", msgpack.ExtType(1, b"x"))],
        [MAGIC, header(7, 0, b"x")],
        [MAGIC, b"\x93\x07\x00\xa1\xff"],
        [MAGIC, b"\xdd\xff\xff\xff\xff"],
        [MAGIC, b"\x91" * 60_000],
    ],
    ids=range(28),
)
def test_what_is_no_message_is_refused(frames):
    """One way in: exactly one message of this protocol."""
    refused(*frames)


def test_map_with_a_key_twice_is_refused():
    """Two readers may disagree on which of the two counts."""
    twice = b"\x82\xa1a\x01\xa1a\x02"
    fields = header(TYPE_NUMBERS[Heartbeat], 0, "ready", 0, 0.0, 0)
    refused(MAGIC, b"\x97" + fields[1:] + twice, match="twice")


def test_fields_of_a_newer_minor_are_ignored():
    """An old worker must survive a newer coordinator."""
    newer = header(TYPE_NUMBERS[Cancel], MINOR + 1, "r", {"why": "new"})
    assert unpack([MAGIC, newer]) == Cancel("r")


def test_missing_field_is_an_error_even_if_it_has_a_default():
    """A default is for callers; on the wire a missing field is a truncated message."""
    refused(MAGIC, header(VERIFY, MINOR, WIRE_KEY, 8, 50.0), match="expected 4 fields, got 3")


def test_older_minor_gets_the_defaults_of_added_fields(monkeypatch):
    """A new coordinator must understand an old worker."""
    monkeypatch.setattr(codec, "MINOR", 1)
    old = header(VERIFY, 0, WIRE_KEY, 8, 50.0)
    assert unpack([MAGIC, old]) == Verify(KEY, 8, 50.0)


def test_int_is_taken_where_a_float_belongs():
    """JavaScript writes 50.0 as 50."""
    message = unpack(verify_with(WIRE_KEY, 8, 50, ()))
    assert type(message.block_deadline_ms) is float


@pytest.mark.parametrize(
    ("described", "data", "kind"),
    [
        (("float32", (2, 2)), bytes(15), BadTensor),
        (("float32", (2, 2)), bytes(17), BadTensor),
        (("float64", (2, 2)), bytes(32), BadTensor),
        (("float32", (2, -2)), bytes(16), BadTensor),
        (("float32", (2, 2, 1, 1)), bytes(16), BadTensor),
        (("float32", (2, 2.0)), bytes(16), BadTensor),
        (("float32", (2**40, 2**40)), b"", TooLarge),
        (("float32", (4,)), bytes(16), WireError),
        (("int32", (2, 2)), bytes(16), WireError),
        (("float32",), bytes(16), WireError),
        (None, bytes(16), WireError),
        ("float32", bytes(16), WireError),
        ((None, None), bytes(16), BadTensor),
    ],
)
def test_tensor_that_does_not_fit_its_frame_is_refused(described, data, kind):
    """A wrong shape read as memory is the oldest hole of all."""
    frame = header(TYPE_NUMBERS[Features], MINOR, "s", 1, 0, described)
    with pytest.raises(kind, match=r"Features\.rows"):
        unpack([MAGIC, frame, data])


def test_tensor_frame_must_be_there():
    """A missing frame must not become an index error."""
    frames = pack(Features("s", 1, 0, Tensor("float32", (1, 1), bytes(4))))
    refused(*frames[:2], match="expected 1 tensor frames, got 0")


def test_token_ids_travel_as_int32():
    """A prompt of 100k ids does not fit a header."""
    message = Submit("r", from_ids(range(100_000)), Sampling())
    assert unpack(pack(message)) == message


def test_every_field_of_every_message_is_checked():
    """A field added without a rule must not slip through unchecked."""
    for kind, (_, record) in codec._RECORDS.items():
        names = tuple(field.name for field in dataclasses.fields(kind))
        assert record.names == names
        with pytest.raises(WireError):
            unpack([MAGIC, header(TYPE_NUMBERS[kind], MINOR, *[None] * (len(names) + 1))])
