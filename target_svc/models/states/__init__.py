"""The pieces of state: rows by position, windows, recurrent states, index keys, token ids.

Owns what each piece captures and how it is rolled back. Does not know layers' arithmetic.
May import: mlx, `target_svc.models.state`, `common.errors`.
"""
