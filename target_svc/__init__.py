"""The target process: prefills, verifies, accepts and rolls back.

Owns the model, its state, the text of a request and the features its drafter gets. Does not know
the policy, clients or other targets. May import `common` except coordinator, sdk, policy and
launcher.
"""
