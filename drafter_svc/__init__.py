"""The drafter process: proposes draft blocks from context features.

Owns the drafter network, its context and the training pipeline (`train`). Does not know requests,
the policy or the target's state. May import `common` except coordinator, sdk, policy and launcher;
only `train` may also import the target's models.
"""
