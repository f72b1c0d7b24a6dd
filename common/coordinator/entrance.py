"""Who may say Hello, and as what.

Owns the checks of a Hello before anything is registered. Does not know who is here already.
"""

from typing import Final

from common.errors import AuthRefused, BadRequest
from common.wire.messages import Hello
from common.wire.roles import ADMIN, CLIENT, DRAFTER, TARGET
from common.wire.version import check_version

WORKER_ROLES: Final = (TARGET, DRAFTER)
ROLES: Final = (*WORKER_ROLES, CLIENT, ADMIN)


def check_hello(hello: Hello, key_role: str | None) -> None:
    """Refuse a peer of another version, or one whose key is for something else.

    Args:
        hello: as it came.
        key_role: role of the sender's key; None where links have no keys.

    Raises:
        VersionMismatch: another major version; names both sides.
        BadRequest: no role of a peer.
        AuthRefused: the key has another role.
    """
    check_version(hello.name, hello.major, hello.minor)
    if hello.role not in ROLES:
        raise BadRequest(f"role {hello.role!r}; it must be one of {', '.join(ROLES)}")
    if key_role is not None and key_role != hello.role:
        raise AuthRefused(
            f"{hello.name} says Hello as {hello.role!r}, its key has the role {key_role!r}"
        )
