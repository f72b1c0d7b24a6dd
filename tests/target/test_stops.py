"""Stop strings, whatever way the text is cut into pieces."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from target_svc.stops import StopStrings


def shown(stops, pieces):
    """All the text that comes out, and whether it was stopped."""
    follower, out = StopStrings(stops), []
    for piece in pieces:
        now = follower.push(piece)
        out.append(now.text)
        if now.is_stopped:
            return "".join(out), True
    return "".join(out) + follower.finish(), False


def cut(text, stops):
    """The same, looking at the whole text: the stop string that ends first, the longest of them."""
    found = [
        (at + len(stop), at)
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at)
    ]
    return (text[: min(found)[1]], True) if found else (text, False)


@given(
    st.text("ab\n", max_size=24),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_every_split_shows_the_text_before_the_first_stop(text, stops, data):
    """A stop string that straddles two tokens was seen too late, or text came out twice."""
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    edges = [0, *places, len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert shown(stops, pieces) == cut(text, stops)


def test_text_is_held_only_while_it_may_become_a_stop():
    """A reader sees text as soon as it is certain."""
    follower = StopStrings(["\n\n"])
    assert [follower.push(piece).text for piece in ["a\n", "b", "\n", "c"]] == [
        "a",
        "\nb",
        "",
        "\nc",
    ]


@pytest.mark.parametrize("after", ["more", "\n\nagain"])
def test_nothing_comes_out_after_a_stop(after):
    """The reply is over."""
    follower = StopStrings(["END"])
    assert follower.push("xEND").is_stopped
    assert follower.push(after).text == ""
