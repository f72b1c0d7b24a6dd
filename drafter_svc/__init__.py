"""The drafter process: proposes draft blocks from context features. Does not know requests, policy or the target's state."""
