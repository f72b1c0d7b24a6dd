"""Owns the decision whether a round drafts and how many rows it verifies.

Does not know sockets, clocks, messages or tensors: times, confidences and counts are passed in.
All arithmetic is float32, because bin edges and ties fall elsewhere in float64.
May import: numpy, common.errors.
"""
