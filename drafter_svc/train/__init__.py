"""The training pipeline: corpus, target, regenerated text, drafter, numbers, published files.

Owns everything that makes a target and its drafter out of text (torch, the `train` extra).
Does not know processes, messages or policy. May import `common.errors`, and `target_svc.models`
and its loading; nothing of the serving side imports this room.
"""
