"""Keys, the allow-list, and the two clocks."""

import pytest

from common.errors import KeyFault
from common.net.auth import (
    RELOAD_S,
    AllowList,
    Keys,
    list_keys,
    load_keys,
    new_keys,
    revoke_keys,
    server_key,
)
from common.net.liveness import ALIVE, SILENT, STUCK, Liveness


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "keys"


def test_new_pair_is_private_and_comes_back(folder):
    """A key that others can read is no key."""
    keys = new_keys(folder, "gpu-2", "drafter")
    assert load_keys(folder, "gpu-2") == keys
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "keys.d")] == [0o700] * 2
    for path in (folder / "gpu-2.key", folder / "keys.d" / "gpu-2.pub"):
        assert path.stat().st_mode & 0o777 == 0o600


def test_secret_is_in_no_repr_and_no_public_file(folder):
    """Logs and the file that is copied to another machine must not hold it."""
    keys = new_keys(folder, "gpu-2", "drafter")
    assert keys.secret_key not in repr(keys)
    assert keys.secret_key not in (folder / "keys.d" / "gpu-2.pub").read_text()
    assert keys.secret_key in (folder / "gpu-2.key").read_text()


def test_list_and_revoke(folder):
    """`keys list` and `keys revoke` are the operator's only view."""
    new_keys(folder, "a", "target")
    new_keys(folder, "b", "client")
    assert [(entry.name, entry.role) for entry in list_keys(folder)] == [
        ("a", "target"),
        ("b", "client"),
    ]
    revoke_keys(folder, "a")
    assert [entry.name for entry in list_keys(folder)] == ["b"]
    with pytest.raises(KeyFault, match="'a'"):
        revoke_keys(folder, "a")


@pytest.mark.parametrize(
    ("name", "role"),
    [("../x", "client"), ("", "client"), ("a/b", "client"), ("a", "root"), ("a", "")],
)
def test_bad_name_or_role_is_refused(folder, name, role):
    """A name becomes a path."""
    with pytest.raises(KeyFault):
        new_keys(folder, name, role)


def test_pair_is_never_overwritten(folder):
    """A second `keys new` must not cut off machines that trust the first."""
    new_keys(folder, "a", "client")
    with pytest.raises(KeyFault, match="exists"):
        new_keys(folder, "a", "client")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.unlink(),
        lambda path: path.chmod(0o644),
        lambda path: path.write_text("no toml ["),
        lambda path: path.write_text('role = "client"\npublic_key = "short"\nsecret_key = "x"\n'),
        lambda path: path.write_text(path.read_text().replace("client", "root")),
    ],
)
def test_spoilt_key_file_is_refused_by_name(folder, spoil):
    """The person must learn which file to look at."""
    new_keys(folder, "a", "client")
    spoil(folder / "a.key")
    with pytest.raises(KeyFault, match="a"):
        load_keys(folder, "a")


def test_server_key_is_what_a_client_needs(folder):
    """`coordinator.pub` copied to another machine is enough to trust it."""
    keys = new_keys(folder, "coordinator", "coordinator")
    assert server_key(folder) == keys.public_key
    with pytest.raises(KeyFault):
        server_key(folder, "nobody")


def test_allow_list_follows_its_folder(folder):
    """Adding and revoking must need no restart."""
    now = [0.0]
    first = new_keys(folder, "a", "drafter")
    allowed = AllowList(folder, lambda: now[0])
    assert allowed.find(first.public_key).role == "drafter"
    second: Keys = new_keys(folder, "b", "client")
    assert allowed.find(second.public_key).user_id == "client/b"
    revoke_keys(folder, "a")
    assert allowed.find(first.public_key) is None
    assert allowed.role_of("drafter/a") == ""
    assert allowed.role_of("client/b") == "client"
    assert allowed.role_of("admin/b") == ""


def test_messages_do_not_read_the_folder_each(folder):
    """A stat per message would cost more than the message."""
    now = [0.0]
    new_keys(folder, "a", "drafter")
    allowed = AllowList(folder, lambda: now[0])
    assert allowed.role_of("drafter/a") == "drafter"
    revoke_keys(folder, "a")
    assert allowed.role_of("drafter/a") == "drafter"
    now[0] += RELOAD_S
    assert allowed.role_of("drafter/a") == ""


def test_spoilt_entry_leaves_the_others_in_force(folder, caplog):
    """One bad file must not lock everybody out."""
    good = new_keys(folder, "good", "client")
    new_keys(folder, "bad", "client")
    (folder / "keys.d" / "bad.pub").write_text("nonsense")
    assert AllowList(folder).find(good.public_key)
    assert "bad.pub" in caplog.text


@pytest.mark.parametrize(
    ("now", "budget_s", "verdict"),
    [(1.9, 10.0, ALIVE), (2.1, 10.0, SILENT), (1.5, 1.0, STUCK), (2.1, 1.0, SILENT)],
)
def test_two_clocks(now, budget_s, verdict):
    """Silent and stuck need different answers: reconnect, or kill."""
    peer = Liveness(heard_at=0.0, silence_s=2.0)
    peer.heartbeat(0.0, progress_age_s=0.2)
    assert peer.verdict(now, budget_s) == verdict


def test_deadline_is_the_earlier_clock():
    """A timer set by the later clock sleeps through the earlier one."""
    peer = Liveness(heard_at=0.0, silence_s=2.0)
    assert peer.next_deadline(0.5) == 2.0
    peer.heartbeat(1.0, progress_age_s=0.2)
    assert peer.next_deadline(0.5) == pytest.approx(1.3)


def test_peer_that_never_spoke_of_progress_is_not_stuck():
    """Clients send no heartbeats."""
    assert Liveness(heard_at=0.0, silence_s=2.0).verdict(1.0, 0.1) == ALIVE
