"""One loaded target, which makes sessions.

Owns what all sessions share: the network, how verifies are run, the measured ladder. Does not know
messages, threads, text rules or policy.
"""

import math
from collections.abc import Iterable

from tokenizers import Tokenizer

from common.errors import BadRequest
from common.wire import messages
from target_svc.card import EngineCard
from target_svc.chat import ChatTemplates
from target_svc.distribution import Sampling
from target_svc.models.family import Model
from target_svc.mtp import HeadTaps
from target_svc.prefix_cache import PrefixCache
from target_svc.prompts import Prompts
from target_svc.session import Session
from target_svc.taps import Taps
from target_svc.text import encode
from target_svc.verify import VerifyPlan
from target_svc.warm_up import measure_ladder


class Engine:
    """One target, loaded; makes sessions. Built by `target_svc.load.load_engine`.

    Args:
        model: the network.
        tokenizer: of the target's folder.
        card: what the target says of itself.
        taps: None where no drafter is configured.
        plan: how verifies are run.
        prefill_chunk: prompt tokens per forward.
        max_rows: most rows of one verify.
        templates: chat templates of the target's folder.
        prefix_bytes: held at most for prompts that begin like an earlier one; 0 is off.

    Attributes:
        prompts: reads what clients send.
        prefixes: what earlier sessions left for those that continue them.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        card: EngineCard,
        taps: Taps | HeadTaps | None,
        plan: VerifyPlan,
        *,
        prefill_chunk: int,
        max_rows: int,
        templates: ChatTemplates,
        prefix_bytes: int = 0,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.card = card
        self.taps = taps
        self.plan = plan
        self.prefill_chunk = prefill_chunk
        self.max_rows = max_rows
        self.prompts = Prompts(tokenizer, templates, card.vocab_size, card.eos_ids[0])
        self.prefixes = PrefixCache(prefix_bytes)
        self._ladder: dict[int, float] = {}

    @property
    def most_rows(self) -> int:
        """Rows of the widest verify."""
        return self.plan.width or self.max_rows

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens are not recognised in it."""
        return encode(self.tokenizer, text)

    def open(self, sampling: Sampling, *, taps: bool, owner: str | None = None) -> Session:
        """Start a session.

        Args:
            sampling: already validated.
            taps: whether features are made; needs a drafter.
            owner: whose prefixes may be gone on from and added to; None leaves them alone.

        Raises:
            BadRequest: taps without a drafter.
        """
        if taps and self.taps is None:
            raise BadRequest("taps are asked for but no drafter is configured; name one at start")
        return Session(self, sampling, self.taps if taps else None, owner)

    def warm_up(self, widths: Iterable[int] | None = None) -> dict[int, float]:
        """Run every width a few times and measure it.

        Args:
            widths: rows, 1..max_rows each; None is all of them.

        Returns:
            Milliseconds of a verify by rows: the cost ladder of this machine.
        """
        session, rows = self.open(messages.Sampling(), taps=self.taps is not None), self.max_rows
        self._ladder = measure_ladder(session, list(widths or range(1, rows + 1)), self.card)
        session.close()
        return self._ladder

    def fits(self, built: int, rows: int) -> bool:
        """Whether a graph of `built` rows serves a verify of `rows`: it costs no more by itself."""
        if built <= rows:
            return built == rows
        return self._ladder.get(built, math.inf) <= self._ladder.get(rows, 0.0)
