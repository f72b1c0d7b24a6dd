"""Where a checkpoint keeps its n-gram table, and in which format.

Knows the published names, FP8 and affine parts, and the file of its own that some packs keep the
table in. Does not know configs beyond what it is handed.
Invariant: a table that opens has the rows and the width that were asked for.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np

from common.checkpoint.index import TensorSpan, index_file
from common.checkpoint.weights import working_dtype
from common.errors import ModelMismatch
from target_svc.models.blocks.mapped_rows import MappedRows, map_files
from target_svc.models.blocks.ngram_table import NgramTable
from target_svc.models.blocks.row_formats import (
    BFLOAT16_BITS,
    FLOAT16,
    FLOAT32,
    STORED,
    AffineRows,
    Fp8Rows,
    PlainRows,
    RowFormat,
    to_float32,
)

EXTERNAL_FILE: Final = "ngram-table.safetensors"
EXTERNAL_NAMES: Final = ("ngram.weight", "ngram.scales", "ngram.biases")
_IN_PACK: Final = re.compile(
    r"(?:^|\.)layers\.(?P<layer>\d+)\.ple\.ple_embedding\.ngram_embedding\."
    r"(?:(?:shard_|shards\.)(?P<part>\d+)\.)?(?P<kind>weight|scales|biases|weight_scale)$"
)
_VALUES: Final[dict[mx.Dtype, np.dtype[Any]]] = {
    mx.float32: FLOAT32,
    mx.float16: FLOAT16,
    mx.bfloat16: BFLOAT16_BITS,
}
_FLOAT_OF: Final[dict[str, mx.Dtype]] = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
}


@dataclass(frozen=True, slots=True)
class TableFacts:
    """What a config says of its table."""

    layer: int
    n_rows: int  # padding included
    n_used: int  # without
    width: int
    n_parts: int


def is_table_name(name: str) -> bool:
    """Whether a tensor is part of the table, which never goes to the device."""
    return name in EXTERNAL_NAMES or _IN_PACK.search(name) is not None


def open_table(
    spans: Mapping[str, TensorSpan],
    facts: TableFacts,
    *,
    external: Path | None = None,
    cache_bytes: int | None = None,
) -> NgramTable:
    """Open the table of a checkpoint for scattered reads.

    Args:
        spans: all tensors of the checkpoint.
        facts: what its config says.
        external: the file that holds the table, where the pack keeps it apart.
        cache_bytes: see `NgramTable`.

    Raises:
        ConfigError: the external file is missing.
        ModelMismatch: parts are missing, or shape or format do not fit; the message says which.
    """
    if external is not None:
        pieces, scale = _external_pieces(external, facts), None
        allowed = (facts.n_rows, facts.n_used)
    else:
        pieces, scale = _in_pack_pieces(spans, facts)
        allowed = (facts.n_rows, facts.n_rows)
    files = map_files([span for parts in pieces.values() for span in parts])
    mapped = {kind: MappedRows(parts, files) for kind, parts in pieces.items()}
    table = NgramTable(_format(mapped, scale, facts.width), cache_bytes=cache_bytes)
    if table.n_rows not in allowed or table.width != facts.width:
        raise ModelMismatch(
            f"n-gram table is {[table.n_rows, table.width]}; this config needs "
            f"{[facts.n_rows, facts.width]}"
        )
    return table


def _format(mapped: Mapping[str, MappedRows], scale: TensorSpan | None, width: int) -> RowFormat:
    """The format of what was found; its values are in the dtype that this device works in."""
    rows = mapped["weight"]
    values = _values_like(rows.dtype)
    if scale is not None or rows.dtype == "F8_E4M3":
        if scale is None or rows.dtype != "F8_E4M3":
            raise ModelMismatch(
                f"n-gram table is {rows.dtype} with weight_scale "
                f"{'missing' if scale is None else 'present'}; F8_E4M3 rows have one, others none"
            )
        return Fp8Rows(rows, _read_scalar(scale), values)
    if set(mapped) == {"weight"}:
        return PlainRows(rows, values)
    if set(mapped) != {"weight", "scales", "biases"}:
        raise ModelMismatch(f"n-gram table has {sorted(mapped)}; codes need scales and biases")
    scales = mapped["scales"]
    return AffineRows(rows, scales, mapped["biases"], width, _values_like(scales.dtype))


def _values_like(stored: str) -> np.dtype[Any]:
    """NumPy dtype of the working dtype of stored floats; of FP8 it is bfloat16's."""
    return _VALUES[working_dtype(_FLOAT_OF.get(stored, mx.bfloat16))]


def _read_scalar(span: TensorSpan) -> np.float32:
    if span.dtype not in STORED or np.prod(span.shape, dtype=int) != 1:
        raise ModelMismatch(
            f"weight_scale of the n-gram table is {span.dtype} {list(span.shape)}; right is one "
            f"number of {sorted(STORED)}"
        )
    stored = np.fromfile(span.path, STORED[span.dtype], count=1, offset=span.offset)
    return np.float32(to_float32(stored)[0])


def _in_pack_pieces(
    spans: Mapping[str, TensorSpan], facts: TableFacts
) -> tuple[dict[str, list[TensorSpan]], TensorSpan | None]:
    """Parts in row order by kind, and the one scale of FP8 rows."""
    found, scale = _find_parts(spans, facts.layer)
    for kind, parts in (found or {"weight": {}}).items():
        if sorted(parts) != list(range(facts.n_parts)):
            raise ModelMismatch(
                f"n-gram table has {len(parts)} parts of {kind}, {sorted(parts)[:3]}..; right are "
                f"{facts.n_parts} from ngram_embedding.shard_0 on"
            )
    parts_of = {kind: [parts[part] for part in sorted(parts)] for kind, parts in found.items()}
    return parts_of, scale


def _find_parts(
    spans: Mapping[str, TensorSpan], layer: int
) -> tuple[dict[str, dict[int, TensorSpan]], TensorSpan | None]:
    found: dict[str, dict[int, TensorSpan]] = {}
    scale = None
    for name, span in spans.items():
        match = _IN_PACK.search(name)
        if match is None:
            continue
        if int(match["layer"]) != layer:
            raise ModelMismatch(f"n-gram table {name!r}; the config names layer {layer}")
        if match["kind"] == "weight_scale" and match["part"] is None:
            scale = span
            continue
        parts, part = found.setdefault(match["kind"], {}), int(match["part"] or 0)
        if part in parts:
            raise ModelMismatch(f"part {part} of the n-gram table is there twice, also as {name!r}")
        parts[part] = span
    return found, scale


def _external_pieces(path: Path, facts: TableFacts) -> dict[str, list[TensorSpan]]:
    spans, metadata = index_file(path)
    found = {name: spans[name] for name in EXTERNAL_NAMES if name in spans}
    if EXTERNAL_NAMES[0] not in found:
        raise ModelMismatch(
            f"{path.name!r} holds {sorted(spans)[:3]}; an n-gram table there is {EXTERNAL_NAMES[0]}"
        )
    weight = found[EXTERNAL_NAMES[0]]
    groups = found[EXTERNAL_NAMES[1]].shape[-1] if EXTERNAL_NAMES[1] in found else 1
    made = {
        "rows": weight.shape[0],
        "dim": facts.width,
        "ngram_bits": 8 * weight.n_bytes // (weight.shape[0] * facts.width),
        "ngram_group_size": facts.width // groups,
    }
    for key, value in made.items():
        said = metadata.get(key)
        if said is not None and said != str(value) and (len(found) > 1 or key in ("rows", "dim")):
            raise ModelMismatch(
                f"{path.name!r} says {key} {said}, its tensors and the config make {value}; copy "
                "the file that belongs to this pack"
            )
    return {name.rpartition(".")[2]: [span] for name, span in found.items()}
