"""The drafter process: proposes draft blocks from context features.

Owns the drafter network, its context and the training pipeline (`train`). One network, two forms of
its operations: `host` (NumPy, on CPU) and `device` (MLX, on Metal and CUDA). Does not know
requests, the policy or the target's state. May import `common` except coordinator, sdk, policy and
launcher; only `train` may also import the target's models.
"""
