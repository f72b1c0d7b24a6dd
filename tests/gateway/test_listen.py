"""Where the gateway may listen, and its keys."""

import pytest

from common.config import load
from common.errors import ConfigError, KeyFault
from common.gateway.listen import listen_of, read_keys
from common.launcher.plan import plan
from common.settings import HttpConfig


def test_addresses_are_read():
    """Host names, both kinds of IP address."""
    assert listen_of(HttpConfig(listen="127.0.0.1:80")).port == 80
    assert listen_of(HttpConfig(listen="[::1]:8080")).host == "::1"
    assert listen_of(HttpConfig(listen="localhost:8080")).is_loopback


@pytest.mark.parametrize("listen", ["8080", ":8080", "127.0.0.1:", "127.0.0.1:0", "a:99999", "a:b"])
def test_what_is_no_address_is_refused(listen):
    """Said before anything is started."""
    with pytest.raises(ConfigError, match=r"http\.listen: "):
        listen_of(HttpConfig(listen=listen))


@pytest.mark.parametrize("listen", ["0.0.0.0:8080", "192.168.1.2:8080", "[::]:8080", "box:8080"])
def test_no_key_no_other_machine(listen, tmp_path):
    """Anybody in the network could use the machine, and read what it is asked."""
    with pytest.raises(ConfigError, match=r"http\.key_file"):
        listen_of(HttpConfig(listen=listen))
    path = tmp_path / "keys"
    assert not listen_of(HttpConfig(listen=listen, key_file=str(path))).is_loopback


def test_keys_are_read_and_short_or_open_ones_refused(tmp_path):
    """A key file that everybody reads is no secret."""
    path = tmp_path / "keys"
    config = HttpConfig(listen="127.0.0.1:1", key_file=str(path))
    with pytest.raises(KeyFault, match="readable"):
        read_keys(config)
    path.write_text("0123456789abcdef\n\n  fedcba9876543210 \n")
    path.chmod(0o644)
    with pytest.raises(KeyFault, match="chmod 600"):
        read_keys(config)
    path.chmod(0o600)
    assert read_keys(config) == ("0123456789abcdef", "fedcba9876543210")
    path.write_text("short\n")
    with pytest.raises(KeyFault, match="16 characters"):
        read_keys(config)
    assert read_keys(HttpConfig()) == ()


def test_it_is_planned_last_and_only_where_it_listens(tmp_path):
    """An optional process; a bad address ends the start before it began."""
    config = load(None, {"http.listen": "127.0.0.1:8080"}, {}).config
    assert plan(config, tmp_path)[-1].argv[3:4] == ("common.gateway",)
    assert plan(config, tmp_path)[-1].name == "gateway"
    assert all(spec.role != "gateway" for spec in plan(load(None, {}, {}).config, tmp_path))
    with pytest.raises(ConfigError, match=r"http\.listen"):
        plan(load(None, {"http.listen": "nowhere"}, {}).config, tmp_path)
