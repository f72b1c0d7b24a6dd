"""What a target is given with a request: the policy of its rounds, and what may be drafted.

Owns the choice of a policy. Pure; does not know queues or which target has room.
"""

from common.coordinator.events import Placed, Request
from common.coordinator.registry import Worker
from common.policy.copies import CopyFinder
from common.policy.policy import Adaptive, Fixed, Off, RoundPolicy
from common.settings import PolicyConfig


def placed(config: PolicyConfig, request: Request, target: Worker) -> Placed:
    """The event that a target has a place for a request."""
    is_drafted = request.draft and config.mode != "off"
    has_copies = is_drafted and target.copies and request.sampling.acceptance == "exact"
    has_taps = is_drafted and (target.hello.card is None or target.block_size >= 2)
    is_plain = not has_taps and not has_copies
    policy = Off(target.costs) if is_plain else _policy_of(config, request, target)
    memory = CopyFinder() if has_copies else None
    own_block = target.block_size if target.drafts_itself else 0
    return Placed(policy, has_taps, own_block, memory)


def _policy_of(config: PolicyConfig, request: Request, target: Worker) -> RoundPolicy:
    if config.mode == "fixed" or target.costs is None:
        return Fixed()
    is_width_free = request.sampling.acceptance != "residual"
    return Adaptive(target.costs, is_width_free=is_width_free)
