"""A target's actor with nobody around it: messages in by hand, messages out in a list."""

from dataclasses import dataclass, field

import numpy as np

from common.net.transport import CONTROL_PEER, Peer
from common.wire.messages import (
    Block,
    Failed,
    Features,
    Link,
    Open,
    Opened,
    Prefilled,
    RoundKey,
    Sampling,
    Verified,
    Verify,
)
from common.wire.tensors import from_ids, to_numpy
from target_svc.service import TargetService

DRAFTER = Peer("drafter")
SESSION, EPOCH, TICKET = "s", 1, "t"


@dataclass
class Actor:
    """One session at one target; `sent` holds everything the target says."""

    coordinator = CONTROL_PEER
    last_order = None

    engine: object
    sent: list = field(default_factory=list)

    def __post_init__(self):
        self.service = TargetService(self.engine, self._send, 4)
        self.ids = []

    def _send(self, peer, message):
        self.sent.append((peer, message))
        return True

    def of(self, kind):
        """Messages of one class, oldest first."""
        return [message for _, message in self.sent if isinstance(message, kind)]

    def open(self, prompt_ids, *, max_tokens=200, taps=True):
        """Open the session, link its drafter, and run the prompt."""
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        order = Open(SESSION, EPOCH, TICKET, from_ids(prompt_ids), 0, sampling, taps)
        self.service.on_message(CONTROL_PEER, order, 0.0)
        assert self.of(Opened)
        self.service.on_message(DRAFTER, Link(SESSION, EPOCH, TICKET, 0), 0.0)
        self.work()
        answer = self.of(Prefilled)[-1]
        self.ids = [answer.anchor_id]
        self._base = answer.base

    def work(self, steps=100):
        """What the shell calls while no message comes."""
        for _ in range(steps):
            if not self.service.work(0.0):
                return

    def round(self, drafts):
        """One round with these drafts as its block; the verdict, or the failure."""
        n_answers = len(self.of(Verified)) + len(self.of(Failed))
        index = len(self.of(Verified))
        key = RoundKey(SESSION, EPOCH, index, self._base, self.ids[-1], 9 if drafts else 0)
        if drafts:
            block = Block(key, tuple(drafts), (0.5,) * len(drafts))
            self.service.on_message(DRAFTER, block, 0.0)
        self.last_order = order = Verify(key, len(drafts) + 1, 50.0)
        self.service.on_message(CONTROL_PEER, order, 0.0)
        self.work()
        assert len(self.of(Verified)) + len(self.of(Failed)) == n_answers + 1
        if self.of(Failed):
            return self.of(Failed)[-1]
        verdict = self.of(Verified)[-1]
        self._base += len(verdict.ids)
        self.ids.extend(verdict.ids)
        return verdict

    def features(self):
        """All feature rows that the drafter was sent, which must have come without gaps."""
        rows, end = [], 0
        for message in self.of(Features):
            assert message.first_pos == end
            rows.append(to_numpy(message.rows))
            end += len(rows[-1])
        return np.concatenate(rows)
