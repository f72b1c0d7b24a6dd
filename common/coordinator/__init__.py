"""Owns requests: who serves them, what happens next, and what the client hears.

Does not know sockets' bytes, tensors or models; it holds token ids and decides. Everything but
`service` is driven with messages and times passed in, so that it runs under a virtual clock.
May import: `common.policy`, `common.net`, `common.wire` and what is left of them.
"""
