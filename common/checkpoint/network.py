"""Read a network's tensors from any published form, by published names.

Owns the order: put quantized modules together, rename, stack experts, turn kernels. Packed matrices
stay packed until somebody asks for their values. Does not know any network: a family says which
names it wants and which of its norms are stored around zero. Invariant: the names, shapes and
values that a family gets do not depend on who packed the checkpoint.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx

from common.checkpoint.index import TensorSpan, index_tensors, read_config
from common.checkpoint.matrix import Matrix, Packed, join, stack, values_of
from common.checkpoint.names import FP8_SCALES, TEXT_PREFIXES, is_pack, published
from common.checkpoint.packed import PackFormats, block_shape, check_packed, from_fp8
from common.checkpoint.weights import working_dtype
from common.errors import ModelMismatch

_PARTS: Final = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")  # of one expert
_BAKED: Final = 0.5  # a mean above it: 1 was added to the weights


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint's tensors, by published names.

    Attributes:
        matrices: as they are stored; their values are float32 on CPU, elsewhere of the stored
            dtype, or of 16 bits where packed.
        is_pack: stored by a pack maker, who may have added 1 to norms.
    """

    matrices: dict[str, Matrix]
    is_pack: bool

    @property
    def tensors(self) -> dict[str, mx.array]:
        """Plain values."""
        return {name: values_of(value) for name, value in self.matrices.items()}


def read_network(folder: Path, *, keep: Callable[[str], bool] = lambda name: True) -> Stored:
    """Read the tensors that `keep` names.

    Args:
        folder: a checkpoint: published in 32, 16 or 8 bits, or an MLX pack.
        keep: which published names to read; others are not touched on disk. Scales and biases go
            with the tensor they belong to.

    Raises:
        ConfigError: the folder, its config or its weights are missing.
        ModelMismatch: a file is damaged, or a quantized tensor contradicts the config.
    """
    config = read_config(folder)
    spans = index_tensors(folder)
    raw = _read(spans, keep)
    plain = _without_fp8(raw, block_shape(config))
    found = _put_together(plain, PackFormats(config))
    tensors = stack_experts({published(name): value for name, value in found.items()})
    return Stored(_turn_convolutions(tensors), is_pack(list(spans)))


def index_published(folder: Path) -> dict[str, TensorSpan]:
    """Spans by published names, for fingerprints; packed tensors are there by their weights."""
    return {published(name): span for name, span in index_tensors(folder).items()}


def text_prefix(folder: Path) -> str:
    """What stands before the published names of the text part, one of `TEXT_PREFIXES`."""
    names = index_published(folder)
    found = (at for at in TEXT_PREFIXES if f"{at}embed_tokens.weight" in names)
    return next(found, TEXT_PREFIXES[0])


def centre_norms(
    stored: Stored, suffixes: Sequence[str], *, is_baked: bool, what: str
) -> dict[str, Matrix]:
    """Bring norm weights that a network uses as `1 + w` to that form.

    Args:
        stored: of `read_network`.
        suffixes: how the names of such norms end.
        is_baked: the maker's mark says that 1 was added already.
        what: how to call the network in the message.

    Returns:
        All tensors; the named norms stored around zero.

    Raises:
        ModelMismatch: the values say something else than the mark.
    """
    found = stored.matrices
    norms = {n: values_of(v) for n, v in found.items() if n.endswith(tuple(suffixes))}
    if not norms:
        return found
    mean = float(mx.mean(mx.concatenate([value.reshape(-1) for value in norms.values()])))
    if (mean > _BAKED) != is_baked:
        raise ModelMismatch(
            f"norms of {what}, such as {next(iter(norms))}, have mean {mean:.3f}; this kind of "
            f"checkpoint stores them around {int(is_baked)}; convert the published one again"
        )
    if not is_baked:
        return found
    return found | {name: value - 1.0 for name, value in norms.items()}


def stack_experts(tensors: Mapping[str, Matrix]) -> dict[str, Matrix]:
    """Bring experts to the published form: `experts.gate_up_proj` and `experts.down_proj`.

    Taken are one tensor per expert, and one per projection of all experts (`switch_mlp`).

    Raises:
        ModelMismatch: an expert or one of its projections is missing.
    """
    fused: dict[str, Matrix] = {}
    single: dict[str, dict[int, dict[str, Matrix]]] = {}
    joint: dict[str, dict[str, Matrix]] = {}
    for name, value in tensors.items():
        at, found, rest = name.partition(".experts.")
        number, _, part = rest.partition(".")
        if found and number.isdigit():
            single.setdefault(at, {}).setdefault(int(number), {})[part] = value
        elif ".switch_mlp." in name:
            at, _, part = name.partition(".switch_mlp.")
            joint.setdefault(at, {})[part] = value
        else:
            fused[name] = value
    for at, experts in single.items():
        fused |= _stacked(at + ".experts.", experts)
    for at, parts in joint.items():
        _require_parts(at + ".switch_mlp.", parts, _PARTS[:2])
        fused[at + ".experts.gate_up_proj"] = join([parts[_PARTS[0]], parts[_PARTS[1]]])
    return fused


def _stacked(at: str, experts: Mapping[int, Mapping[str, Matrix]]) -> dict[str, Matrix]:
    for number in range(len(experts)):
        _require_parts(f"{at}{number}.", experts.get(number, {}), _PARTS)
    rows = [experts[number] for number in range(len(experts))]
    return {
        at + "gate_up_proj": stack([join([row[_PARTS[0]], row[_PARTS[1]]]) for row in rows]),
        at + "down_proj": stack([row[_PARTS[2]] for row in rows]),
    }


def _require_parts(at: str, found: Iterable[str], wanted: Sequence[str]) -> None:
    if set(found) != set(wanted):
        raise ModelMismatch(f"{at} has {sorted(found)}; an expert has {list(wanted)}")


def _read(spans: Mapping[str, TensorSpan], keep: Callable[[str], bool]) -> dict[str, mx.array]:
    wanted = {name: span for name, span in spans.items() if keep(published(_owner(name, spans)))}
    tensors: dict[str, mx.array] = {}
    for path in sorted({span.path for span in wanted.values()}):
        loaded = cast("dict[str, mx.array]", mx.load(str(path)))
        tensors |= {name: loaded[name] for name, span in wanted.items() if span.path == path}
    return tensors


def _owner(name: str, names: Mapping[str, Any]) -> str:
    """The tensor that scales or biases belong to; any other name itself."""
    for suffix in (".scales", ".biases"):
        if name.endswith(suffix):
            owner = name.removesuffix(suffix) + ".weight"
            return owner if owner in names else name.removesuffix(suffix)
    for suffix in FP8_SCALES:
        if name.endswith(suffix) and name.removesuffix(suffix) in names:
            return name.removesuffix(suffix)
    return name


def _plain(value: mx.array) -> mx.array:
    return value.astype(working_dtype(value.dtype))


def _without_fp8(raw: Mapping[str, mx.array], block: tuple[int, int]) -> dict[str, mx.array]:
    plain: dict[str, mx.array] = {}
    for name, value in raw.items():
        if _owner(name, raw) != name and not name.endswith((".scales", ".biases")):
            continue  # scales of an FP8 tensor, taken with it
        scale = next((raw[name + s] for s in FP8_SCALES if name + s in raw), None)
        if scale is None:
            plain[name] = value
        elif value.dtype == mx.uint8:
            dtype = working_dtype(mx.bfloat16)
            plain[name] = from_fp8(name, value, scale, block, dtype)
        else:
            raise ModelMismatch(
                f"{name} has FP8 scales but dtype {value.dtype}; it must be stored as F8_E4M3"
            )
    return plain


def _put_together(raw: Mapping[str, mx.array], formats: PackFormats) -> dict[str, Matrix]:
    """Weights with their scales and biases as one; the rest in the dtype that is worked with."""
    found: dict[str, Matrix] = {}
    for name, value in raw.items():
        if name.endswith((".scales", ".biases")):
            if _owner(name, raw) not in raw:
                raise ModelMismatch(f"{name} belongs to no weight; copy the checkpoint again")
            continue
        module = name.removesuffix(".weight")
        scales = raw.get(module + ".scales")
        if scales is None:
            found[name] = _plain(value)
        else:
            biases = raw.get(module + ".biases")
            found[name] = _packed(module, value, scales, biases, formats)
    return found


def _packed(
    module: str,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    formats: PackFormats,
) -> Packed:
    form = formats.of(module)
    check_packed(module, weight, scales, biases, form)
    if biases is None:
        return Packed(weight, scales, None, form, working_dtype(mx.bfloat16))
    dtype = working_dtype(scales.dtype)  # before the sum, which is then rounded once, to `dtype`
    return Packed(weight, scales.astype(dtype), biases.astype(dtype), form, dtype)


def _turn_convolutions(tensors: Mapping[str, Matrix]) -> dict[str, Matrix]:
    """Bring depthwise kernels to the published [C, 1, K]."""
    return {
        name: mx.moveaxis(values_of(value), 1, 2)
        if name.endswith("conv1d.weight") and len(value.shape) == 3 and value.shape[1] != 1
        else value
        for name, value in tensors.items()
    }
