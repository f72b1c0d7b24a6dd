"""The names under which checkpoints of different makers store the same tensor.

Owns the tables from a maker's spelling to the published one (Hugging Face's), which networks here
are written against. Pure text; does not know shapes or values. Invariant: a published name maps to
itself, so mapping twice changes nothing.

Source: the published checkpoints; the packs of mlx-lm, mlx-vlm and mtplx.
"""

from typing import Final

#: Maker's prefix -> published prefix; the first that fits is taken.
_PREFIXES: Final = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.mtp.", "mtp."),
    ("vision_tower.", "model.visual."),
)
#: What stands before the names of a text part, with and without a vision part beside it.
TEXT_PREFIXES: Final = ("model.language_model.", "model.")
#: What stands behind the name of an FP8 tensor in the name of its scales.
FP8_SCALES: Final = ("_scale_inv", "_scale")
#: Parts inside a name.
_PARTS: Final = (
    (".ple.conv_weight", ".ple.conv1d.weight"),
    (".mlp.switch_mlp.gate_up_proj.weight", ".mlp.experts.gate_up_proj"),
    (".mlp.switch_mlp.down_proj.weight", ".mlp.experts.down_proj"),
    (".predecessor_codebook.weight", ".predecessor_codebook"),
    (".successor_codebook.weight", ".successor_codebook"),
)
#: What may stand before the layers in a name or in a quantization table.
_TRUNKS: Final = ("model.language_model.", "language_model.model.", "language_model.", "model.")


def published(name: str) -> str:
    """The published name of a stored tensor.

    >>> published("language_model.model.layers.0.ple.conv_weight")
    'model.language_model.layers.0.ple.conv1d.weight'
    """
    for prefix, other in _PREFIXES:
        if name.startswith(prefix):
            name = other + name[len(prefix) :]
            break
    for part, other in _PARTS:
        name = name.replace(part, other)
    return name


def is_pack(names: list[str]) -> bool:
    """Whether the names are a pack maker's and not the published ones."""
    return any(name.startswith("language_model.") for name in names)


def module_path(name: str) -> str:
    """Where a module stands below the trunk, whatever spelling names it.

    >>> module_path("language_model.model.layers.3.mlp.gate")
    'layers.3.mlp.gate'
    """
    for trunk in _TRUNKS:
        if name.startswith(trunk):
            return name[len(trunk) :]
    return name
