"""Two machines, played by two run folders and two key folders over tcp on loopback."""

import shutil
import socket

import pytest
from support.running import ROOT, System, prompt_files, wait_until

from common.errors import AuthRefused, NotReady
from common.net.auth import load_keys, new_keys, server_key
from common.net.transport import Endpoint
from common.net.zeromq import ClientLink

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

LAN = ROOT / "compose" / "lan.toml"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def boxes():
    """`big-box` and `drafter-box`, not started; the keys are where lan.toml says they go."""
    port = free_port()
    made = []
    for name in ("coordinator", "drafter-box"):
        system = System()
        system.environ |= {
            "DFLASH_NET_CONTROL": f"tcp://127.0.0.1:{port}",
            "DFLASH_NET_DATA": "tcp://127.0.0.1:*",
            "DFLASH_KEYS_DIR": str(system.folder / "keys"),
        }
        if name != "coordinator":
            system.environ["DFLASH_KEYS_NAME"] = name
        made.append(system)
    big, other = made
    for name, role in (
        ("coordinator", "coordinator"),
        ("target", "target"),
        ("drafter-box", "drafter"),
    ):
        big.command("keys", "new", name, "--role", role)
    theirs = other.folder / "keys"
    (theirs / "keys.d").mkdir(parents=True, mode=0o700)
    theirs.chmod(0o700)
    shutil.move(big.folder / "keys" / "drafter-box.key", theirs)
    shutil.copy(big.folder / "keys" / "keys.d" / "coordinator.pub", theirs / "keys.d")
    yield big, other, f"tcp://127.0.0.1:{port}"
    other.stop()
    big.stop()


def is_refused(link):
    with link:
        try:
            link.connect(3.0)
        except (AuthRefused, NotReady):
            return True
    return False


def test_keyed_drafter_joins_over_tcp_and_strangers_do_not(boxes, tmp_path):
    """What lan.toml promises: one role per key, and no key, no entry."""
    big, other, address = boxes
    big.command("up", "-f", LAN, "--only", "coordinator,target", "-d", "--wait=100")
    before = big.generate("--ignore-eos", file=prompt_files()[3], max_tokens=64)
    assert before["stats"]["drafts_sent"] == 0

    joining = other.popen("up", "-f", LAN, "--only", "drafter")
    try:

        def drafted():
            reply = big.generate("--ignore-eos", file=prompt_files()[3], max_tokens=64)
            return reply if reply["stats"]["drafts_accepted"] else None

        after = wait_until(drafted, "drafts from the other machine", 60)
        assert after["token_ids"] == before["token_ids"] or after["stats"]["near_ties"]

        stranger = new_keys(tmp_path / "keys", "stranger", "client")
        known = server_key(big.folder / "keys")
        assert is_refused(ClientLink(Endpoint(address, known), stranger))

        big.command("keys", "revoke", "target")
        revoked = load_keys(big.folder / "keys", "target")
        assert is_refused(ClientLink(Endpoint(address, known), revoked))
    finally:
        joining.terminate()
        joining.communicate(timeout=30)
