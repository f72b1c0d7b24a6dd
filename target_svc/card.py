"""What a target says of itself, to peers and to its own service.

Owns the shortcuts into the model card. Does not know sessions or how the card is made.
"""

from dataclasses import dataclass

from common.sources import NOBODY, Armed
from common.wire import messages


@dataclass(frozen=True, slots=True)
class EngineCard:
    """What a target says of itself."""

    wire: messages.ModelCard
    eos_ids: tuple[int, ...]
    armed: Armed = NOBODY  # who drafts
    refusal: str = ""  # why nobody may: the state that cannot be rolled back

    @property
    def vocab_size(self) -> int:
        """Valid ids are 0..vocab_size-1."""
        return self.wire.vocab_size

    @property
    def context_len(self) -> int:
        """Most tokens of prompt and reply."""
        return self.wire.context_len

    @property
    def block_size(self) -> int:
        """B of the drafter; 0 without one."""
        return self.wire.block_size
