"""The target process: prefills, verifies, accepts and rolls back. Does not know the policy, clients or other targets."""
