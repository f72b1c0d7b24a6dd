"""Score given tokens: what `python -m target_svc score` writes and says.

Knows files of ids and of scores, and forwards of a target. Does not know sessions, drafters or
sampling. However rows are fed, the state is the one that serving uses, so a checkpoint that scores
well one way and badly another has a fault in its state.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError, TooLong
from target_svc.models.family import Model, read_ahead, run_rows
from target_svc.prefill import check_ids
from target_svc.rollback import commit

_ROWS_OUT: Final = 256  # scores brought to the host at a time: 250 MB at a quarter million ids


def parse_feed(feed: str) -> int:
    """Rows per forward of "all", "one" or a number; 0 is all.

    Raises:
        ConfigError: something else.
    """
    if feed in ("all", "one"):
        return int(feed == "one")
    if not feed.isdecimal() or int(feed) < 1:
        raise ConfigError(f"--feed {feed!r}; right are 'all', 'one' or a number of rows from 1 on")
    return int(feed)


def read_ids(path: Path) -> list[int]:
    """Token ids of a `.npy` file: one axis, at least one integer.

    Raises:
        ConfigError: the file is missing, of another kind, or does not hold that.
    """
    try:
        with path.open("rb") as file:
            ids: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r} ({error.strerror}); give ids.npy") from error
    except ValueError as error:
        raise ConfigError(
            f"not a .npy file: {str(path)!r} ({error}); write it by np.save"
        ) from error
    if ids.dtype.kind not in "iu" or ids.ndim != 1 or not ids.size:
        raise ConfigError(
            f"{str(path)!r} holds {ids.dtype} {list(ids.shape)}; right are integer token ids [N], "
            "N at least 1"
        )
    return [int(token) for token in ids]


def score(model: Model, ids: Sequence[int], path: Path, *, feed_rows: int) -> float | None:
    """Write the scores of what follows each token, float32 [N, V], as a `.npy` file.

    The file appears when it is whole. Evaluates; memory holds the rows of one forward.

    Args:
        model: the target.
        ids: N tokens of one sequence.
        path: of the result.
        feed_rows: rows per forward; 0 is all of them.

    Returns:
        Mean nats per token of ids 1..N-1, each given those before it; None where N is 1.

    Raises:
        BadRequest: an id is outside the vocabulary; nothing was written.
        TooLong: more ids than the context; nothing was written.
        ConfigError: the file cannot be written.
    """
    facts = model.facts
    check_ids(ids, facts.vocab_size, "token")
    if len(ids) > facts.context_len:
        raise TooLong(f"{len(ids)} token ids; the context of this target is {facts.context_len}")
    part = path.with_name(path.name + ".part")
    try:
        shape = (len(ids), facts.vocab_size)
        out = np.lib.format.open_memmap(part, mode="w+", dtype=np.float32, shape=shape)
        nats = 0.0
        for start, rows in _score_rows(model, ids, feed_rows or len(ids)):
            out[start : start + len(rows)] = rows
            following = ids[start + 1 : start + 1 + len(rows)]
            nats += float(np.sum(_nats(rows[: len(following)], following)))
        out.flush()
        del out
        os.replace(part, path)
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r} ({error.strerror}); name another") from error
    finally:
        part.unlink(missing_ok=True)
    return nats / (len(ids) - 1) if len(ids) > 1 else None


def _score_rows(
    model: Model, ids: Sequence[int], feed_rows: int
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Scores as they are made: first position, and rows of float32."""
    state = model.new_state()
    for start in range(0, len(ids), feed_rows):
        read_ahead(model, ids[start : start + 2 * feed_rows], state, skip=feed_rows)
        chunk = ids[start : start + feed_rows]
        hidden = run_rows(model, chunk, state)
        commit(state, len(chunk))
        mx.eval(hidden, *state.arrays())
        for at in range(0, len(chunk), _ROWS_OUT):
            rows = model.logits(hidden[at : at + _ROWS_OUT]).astype(mx.float32)
            yield start + at, np.array(rows)


def _nats(rows: NDArray[np.float32], following: Sequence[int]) -> NDArray[np.float64]:
    """-log p of each following id under its row of scores."""
    wide = rows.astype(np.float64)
    top = wide.max(axis=1, initial=-np.inf)
    total: NDArray[np.float64] = top + np.log(np.exp(wide - top[:, None]).sum(axis=1))
    chosen: NDArray[np.float64] = wide[np.arange(len(wide)), list(following)]
    return total - chosen
