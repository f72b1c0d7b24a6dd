"""The networks a target can run, one file per `model_type`, and the state of one sequence.

Owns forwards and what they keep between calls. Does not know sessions, messages, sampling or
drafters. May import: mlx, numpy, `common.checkpoint`, `common.errors`.
"""
