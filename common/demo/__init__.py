"""The embedded pair, its model card and the held-out prompts. Owns data, no code."""
