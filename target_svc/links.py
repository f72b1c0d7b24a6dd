"""The feature streams from this target to its drafters.

Owns which link belongs to which seat, what each link has been sent, and what happens when one is
lost. Does not know rounds, prefill or the coordinator's reasons. A lost link costs drafts, never
output, so nothing here raises.

Invariant: a link is sent feature rows in order and without gaps; `sent_pos` is the next row.
"""

from collections import Counter

import mlx.core as mx

from common.net.transport import CONTROL_PEER, Peer, Send
from common.wire.messages import Features, Link, LinkLost, LinkRefused, Renew, Resync
from target_svc.frames import rows_tensor
from target_svc.seat import Seat


class FeatureLinks:
    """Feeds every seat's drafter.

    Args:
        send: hands a message to the I/O thread; False when the peer is gone.
        counters: where drops and losses are counted.
    """

    def __init__(self, send: Send, counters: Counter[str]) -> None:
        self._send = send
        self._counters = counters

    def link(self, peer: Peer, hello: Link, seat: Seat | None) -> None:
        """Take `peer` as the seat's drafter and send it the stored rows it lacks."""
        if seat is None or not seat.ticket or seat.ticket != hello.ticket:
            self._send(peer, LinkRefused(hello.session, hello.ticket, "unknown session or ticket"))
            return
        seat.link = peer
        seat.sent_pos = hello.have_pos
        self._catch_up(seat)

    def renew(self, order: Renew, seat: Seat | None) -> None:
        """Expect another drafter: the old link is no longer fed or heard."""
        if seat is not None:
            seat.ticket = order.ticket
            seat.link = None

    def resync(self, peer: Peer, request: Resync, seat: Seat | None) -> None:
        """Send rows again from the position the drafter asks for."""
        if seat is None or seat.link != peer or request.epoch != seat.epoch:
            self._counters["stale_resync"] += 1
            return
        self._counters["resyncs"] += 1
        seat.sent_pos = request.from_pos
        self._catch_up(seat)

    def push(self, seat: Seat, first_pos: int, rows: mx.array | None) -> None:
        """Send new rows [S, H]; where the link lacks earlier ones, those as well."""
        if seat.link is None or rows is None:
            return
        if first_pos == seat.sent_pos:
            self._send_rows(seat, first_pos, rows)
        else:
            self._catch_up(seat)

    def lose(self, seat: Seat, reason: str) -> None:
        """Drop the seat's link and tell the coordinator."""
        if seat.link is None:
            return
        seat.link = None
        self._counters["links_lost"] += 1
        self._send(CONTROL_PEER, LinkLost(seat.name, seat.ticket, reason))

    def _catch_up(self, seat: Seat) -> None:
        stored = seat.session.feature_rows(seat.sent_pos)
        if stored is not None:
            self._send_rows(seat, *stored)

    def _send_rows(self, seat: Seat, first_pos: int, rows: mx.array) -> None:
        if seat.link is None:
            return
        if self._send(seat.link, Features(seat.name, seat.epoch, first_pos, rows_tensor(rows))):
            seat.sent_pos = first_pos + rows.shape[0]
        else:
            self.lose(seat, "features could not be sent")
