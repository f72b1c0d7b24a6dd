"""Whose key asked goes with the order to open a session: prefixes are shared by it."""

from types import SimpleNamespace

import pytest

from common.coordinator.intake import request_of
from common.coordinator.outgoing import open_message
from common.wire.messages import Sampling, Submit
from common.wire.tensors import from_ids


@pytest.mark.parametrize("prompt_ids", [None, [3, 4]])
@pytest.mark.parametrize("key", ["", "client/ann", "client/ben"])
def test_a_target_is_told_whose_prefixes_may_be_used(key, prompt_ids):
    """A replay must not lose it: it would leave one owner's state where all find it."""
    request = request_of(Submit("r", from_ids([3, 4]), Sampling(max_tokens=4)), 1, "p", 0.0, key)
    tie = SimpleNamespace(ticket="t", has_taps=True)
    assert open_message(request, "1.0", 0, tie, prompt_ids, [9]).share_scope == key


@pytest.mark.parametrize("key", ["", "client/ann"])
def test_a_client_that_acts_for_several_keeps_them_apart(key):
    """A gateway has one connection and many callers; no scope is another's, nor a bare key."""
    owners = []
    for scope in ("", "bob", "eve"):
        submit = Submit("r", from_ids([3, 4]), Sampling(max_tokens=4), share_scope=scope)
        owners.append(request_of(submit, 1, "p", 0.0, key).owner)
    assert owners[0] == key
    assert len(set(owners)) == 3
