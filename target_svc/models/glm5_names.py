"""glm5_next tensors as mlx-vlm's packs store them, brought to the published names.

Owns the tables of what that maker renames, lays one under the other and absorbs. Does not know
files or arithmetic of layers. Invariant: published names map to themselves.

Source: mlx-vlm `glm5_next`, the names of its modules.
"""

from collections.abc import Mapping
from typing import Final

import mlx.core as mx

from common.checkpoint.matrix import Matrix, rows_of, values_of
from common.errors import ModelMismatch

_RENAMED: Final = ((".attn_hc.", ".hc_attn_"), (".ffn_hc.", ".hc_ffn_"))
#: Published kernels are [C, 1, K], packed ones [C, K, 1].
_KERNELS: Final = "self_attn.qkv_conv.conv.weight"
#: One tensor of several, by the end of its name.
_JOINED: Final[Mapping[str, tuple[str, ...]]] = {
    "mlp.gate_up_proj.weight": ("gate_proj.weight", "up_proj.weight"),
    "shared_experts.gate_up_proj.weight": ("gate_proj.weight", "up_proj.weight"),
    "self_attn.qkv_proj.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
    _KERNELS: ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"),
    "self_attn.fbg_a_proj.weight": ("f_a_proj.weight", "b_proj.weight", "g_a_proj.weight"),
    "self_attn.qkv_a_proj.weight": ("q_a_proj.weight", "kv_a_proj_with_mqa.weight"),
}
#: A head's keys [heads, rank, key] and values [heads, value, rank] of a latent row.
_KEYS: Final = "self_attn.embed_q.weight"
_VALUES: Final = "self_attn.unembed_out.weight"


def to_published(
    tensors: Mapping[str, Matrix], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Matrix]:
    """Take apart what a maker put together.

    Args:
        tensors: by the names of `read_network`.
        shapes: of the network, by published name.

    Raises:
        ModelMismatch: a joined tensor has other rows than its parts, or half of a pair is missing.
    """
    found: dict[str, Matrix] = {}
    for name, value in tensors.items():
        joined = next((end for end in _JOINED if name.endswith(end)), None)
        if joined is not None:
            found |= _apart(name, value, joined, shapes)
        elif name.endswith(_KEYS):
            at = name.removesuffix(_KEYS)
            found[at + "self_attn.kv_b_proj.weight"] = _latent_rows(at, value, tensors)
        elif not name.endswith(_VALUES):
            found[_renamed(name)] = value
    return found


def _renamed(name: str) -> str:
    for packed, published in _RENAMED:
        name = name.replace(packed, published)
    return name


def _apart(
    name: str, value: Matrix, joined: str, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Matrix]:
    at = name.removesuffix(joined) + joined.split(".", 1)[0] + "."
    names = [at + part for part in _JOINED[joined]]
    rows = [shapes.get(part, (0,))[0] for part in names]
    if sum(rows) != value.shape[0]:
        raise ModelMismatch(
            f"{name} has {value.shape[0]} rows; by the config it holds {names} of {rows}"
        )
    if joined == _KERNELS and value.shape[1] != 1:
        value = mx.moveaxis(values_of(value), 1, 2)
    ends = [sum(rows[: index + 1]) for index in range(len(rows))]
    return {
        part: rows_of(value, slice(end - count, end))
        for part, end, count in zip(names, ends, rows, strict=True)
    }


def _latent_rows(at: str, keys: Matrix, tensors: Mapping[str, Matrix]) -> mx.array:
    """`kv_b_proj` [heads (key + value), rank], a head's keys before its values."""
    values = tensors.get(at + _VALUES)
    if values is None or values.shape[0] != keys.shape[0]:
        raise ModelMismatch(
            f"{at}{_KEYS} is {list(keys.shape)}; {at}{_VALUES} must be there for as many heads"
        )
    both = mx.concatenate([values_of(keys).swapaxes(1, 2), values_of(values)], axis=1)
    return both.reshape(-1, both.shape[-1])
