"""Drafters that answer from a script, and the plain loop they are compared with."""

from collections import Counter

from common.wire.messages import Sampling

GREEDY = Sampling()


def prefill(engine, prompt_ids, *, taps=False, sampling=GREEDY):
    """A session that has run its prompt, and the steps it took."""
    session = engine.open(sampling, taps=taps)
    return session, list(session.prefill(prompt_ids))


def plain_decode(engine, prompt_ids, count, sampling=GREEDY):
    """The target's own output, one row a round."""
    session, _ = prefill(engine, prompt_ids, sampling=sampling)
    ids = [session.anchor_id]
    while len(ids) < count:
        ids.extend(session.verify((), 1).ids)
    return ids[:count]


def drafted_decode(engine, prompt_ids, count, propose, *, rows=8, sampling=GREEDY):
    """Output with drafts.

    Args:
        propose: (round, ids so far, rows - 1) -> draft ids.

    Returns:
        The ids, and a Counter of accepted drafts per round.
    """
    session, _ = prefill(engine, prompt_ids, sampling=sampling)
    ids, accepted = [session.anchor_id], Counter()
    while len(ids) < count:
        verdict = session.verify(propose(sum(accepted.values()), ids, rows - 1), rows)
        accepted[verdict.n_accepted] += 1
        ids.extend(verdict.ids)
    return ids[:count], accepted
