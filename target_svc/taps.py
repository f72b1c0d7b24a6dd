"""From the target's layers to the rows that a drafter is fed.

Owns which layers are tapped, how streams are contracted, and the drafter's `fc` and `hidden_norm`,
which the target applies so that one row of the drafter's width crosses the wire per token; the
drafter's own network starts after them. Does not know sockets or sessions' rounds.
A tap is the output of layer L. `hidden_norm` has a plain weight: no 1 is added.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import mlx.core as mx

from common.checkpoint.fingerprint import fingerprint_module
from common.checkpoint.index import read_config
from common.checkpoint.network import index_published, read_network
from common.errors import ModelMismatch
from target_svc.models.blocks.norms import RmsNorm
from target_svc.models.family import CONTRACTIONS, Model, arrays_in
from target_svc.models.state import Own

FC: Final = "fc.weight"
NORM: Final = "hidden_norm.weight"
DEFAULT_CONTRACTION: Final = "stream_mean"


@dataclass(frozen=True, slots=True)
class TapPlan:
    """What a drafter's config says of its features."""

    layer_ids: tuple[int, ...]
    contraction: str
    block_size: int
    window: int  # W where every drafter layer slides, else 0
    eps: float

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> "TapPlan":
        """Read a drafter's config.json; DFlash fields stand at its root or in `dflash_config`.

        Raises:
            ModelMismatch: no taps are named, or the contraction is unknown.
        """
        fields = {**raw, **(raw.get("dflash_config") or {})}
        layer_ids = tuple(fields.get("target_layer_ids") or ())
        contraction = fields.get("tap_contraction") or DEFAULT_CONTRACTION
        if not layer_ids or any(type(layer) is not int for layer in layer_ids):
            raise ModelMismatch(
                f"drafter's target_layer_ids: {list(layer_ids)!r}; it must list target layers"
            )
        if contraction not in CONTRACTIONS:
            raise ModelMismatch(
                f"drafter's tap_contraction: {contraction!r}; right are {list(CONTRACTIONS)}"
            )
        kinds = fields.get("layer_types") or ()
        slides = bool(kinds) and all(kind == "sliding_attention" for kind in kinds)
        window = int(fields.get("sliding_window") or 0) if slides else 0
        eps = float(fields.get("rms_norm_eps", 1e-6))
        return cls(layer_ids, contraction, int(fields.get("block_size", 16)), window, eps)


@dataclass(frozen=True, slots=True)
class TapHashes:
    """Fingerprints of the two tensors, compared with the drafter's."""

    fc: str
    norm: str


class Collector(Protocol):
    """Takes what a forward's layers leave, and makes rows of it for whoever drafts."""

    def __call__(self, layer: int, streams: mx.array) -> None:
        """Take the residual rows after `layer`."""

    def features(self) -> mx.array:
        """Rows [R, ..] of the forward; lazy."""


class Collects(Protocol):
    """What a forward is given where something may be drafted."""

    def collector(self) -> Collector:
        """A tap for one forward."""


class Taps:
    """Makes features of tapped layers.

    Args:
        plan: from the drafter's config.
        model: the target; gives the contraction.
        fc: [Hd, T * H].
        norm: [Hd].
    """

    def __init__(self, plan: TapPlan, model: Model, fc: mx.array, norm: mx.array) -> None:
        self.plan = plan
        self.width = fc.shape[0]
        self._model = model
        self._fc = mx.contiguous(fc.T)
        self._norm = RmsNorm(norm, plan.eps)
        mx.eval(self._fc, arrays_in(self._norm))

    def collector(self) -> "TapCollector":
        """A tap for one forward."""
        return TapCollector(self)

    def contract(self, layer: int, streams: mx.array) -> mx.array:
        """One tap [R, H] of streams [R, S, H]."""
        return self._model.contract(self.plan.contraction, layer, streams)

    def fuse(self, taps: list[mx.array]) -> mx.array:
        """Features [R, Hd] of taps [R, H] in config order."""
        joined = mx.concatenate(taps, axis=-1).astype(self._fc.dtype)
        return self._norm(joined @ self._fc)


class TapCollector:
    """Called after every layer of one forward; keeps the tapped ones."""

    def __init__(self, taps: Taps) -> None:
        self._taps = taps
        self._seen: dict[int, mx.array] = {}

    def __call__(self, layer: int, streams: mx.array) -> None:
        """Take streams [R, S, H] after `layer`."""
        if layer in self._taps.plan.layer_ids:
            self._seen[layer] = self._taps.contract(layer, streams)

    def features(self) -> mx.array:
        """Features [R, Hd] of the forward's rows; lazy."""
        return self._taps.fuse([self._seen[layer] for layer in self._taps.plan.layer_ids])


def load_taps(folder: Path, model: Model) -> tuple[Taps, TapHashes]:
    """Read a drafter's config and the two tensors that belong to the target's side.

    Raises:
        ConfigError: the folder or a file is missing.
        ModelMismatch: a tensor is missing, or taps and target do not fit.
    """
    plan = TapPlan.from_config(read_config(folder))
    spans = index_published(folder)
    missing = [name for name in (FC, NORM) if name not in spans]
    if missing:
        raise ModelMismatch(f"drafter {str(folder)!r} lacks {missing}; give a complete drafter")
    tensors = read_network(folder, keep=lambda name: name in (FC, NORM)).tensors
    fc, norm = tensors[FC], tensors[NORM]
    needed = len(plan.layer_ids) * model.facts.hidden
    if fc.ndim != 2 or fc.shape[1] != needed or norm.shape != (fc.shape[0],):
        raise ModelMismatch(
            f"drafter's fc is {list(fc.shape)} and hidden_norm {list(norm.shape)}; "
            f"{len(plan.layer_ids)} taps of this target need [D, {needed}] and [D]"
        )
    last = model.facts.n_layers - 1
    if max(plan.layer_ids) > last or min(plan.layer_ids) < 0:
        raise ModelMismatch(
            f"drafter's target_layer_ids are {list(plan.layer_ids)}; layers are 0..{last}"
        )
    if plan.contraction not in model.facts.contractions:
        raise ModelMismatch(
            f"drafter's tap_contraction: {plan.contraction!r}; this target makes "
            f"{list(model.facts.contractions)}"
        )
    if plan.contraction == "next_attention_read":
        unread = set(model.facts.unreadable_taps) & set(plan.layer_ids)
        if unread:
            raise ModelMismatch(
                f"taps {sorted(unread)} have no next layer that reads them as they are; "
                f"tap other layers of 0..{last - 1}"
            )
    hashes = TapHashes(fingerprint_module(spans, FC), fingerprint_module(spans, NORM))
    return Taps(plan, model, fc, norm), hashes


class FeatureStore:
    """Feature rows that a drafter may need again, by absolute position.

    Args:
        window: rows that a late drafter can use are the last W - 1; 0 keeps all.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._pieces: list[mx.array] = []
        self._first = 0
        self._end = 0

    def add(self, rows: mx.array) -> None:
        """Append evaluated rows [S, Hd] at the present end."""
        self._pieces.append(rows)
        self._end += rows.shape[0]
        if not self._window:
            return
        while self._end - (self._first + self._pieces[0].shape[0]) >= self._window - 1:
            self._first += self._pieces.pop(0).shape[0]
            if not self._pieces:
                break

    def twin(self, own: Own) -> "FeatureStore":
        """Another store of the rows a drafter may still need; neither changes the other.

        Args:
            own: gives the array that the twin holds for the rows of this one.
        """
        twin = FeatureStore(self._window)
        twin._first = twin._end = self._end
        kept = self.rows_from(0)
        if kept is not None:
            twin._first, rows = kept
            twin._pieces = [own(rows)]
        return twin

    def rows_from(self, from_pos: int) -> tuple[int, mx.array] | None:
        """First position and rows from `from_pos`, or from the oldest kept; None where none are."""
        if self._window:
            from_pos = max(from_pos, self._end - (self._window - 1))
        start = max(from_pos, self._first)
        if start >= self._end:
            return None
        joined = self._pieces[0] if len(self._pieces) == 1 else mx.concatenate(self._pieces)
        self._pieces = [joined]
        rows = joined[start - self._first :]
        mx.eval(joined, rows)
        return start, rows
