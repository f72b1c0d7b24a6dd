"""Sub-layers shared by the networks, each with the shapes it takes written down.

Owns arithmetic. Does not know checkpoints' prefixes or sequences' lengths beyond the rows given.
Weights are rearranged once, when a block is made: few, large products are what the CPU is fast in.
"""
