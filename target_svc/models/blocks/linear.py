"""Products with a network's matrices, plain or packed: rows, rows of chosen experts, embeddings.

Owns whether a packed matrix stays packed, and how it is multiplied then. Does not know what the
rows mean. On a GPU a verify reads far more weights than it computes with them, so four bits instead
of sixteen are time; on CPU float32 values are exact and faster (a 9216 x 2560 matrix of 4 bits, one
core: 1 row 21 ms against 18, 8 rows 163 against 16, 64 rows 1331 against 41).

Invariant: row i of a product depends on row i of its input only. On CPU a packed product has the
same bits for any number of rows. On a GPU MLX takes one kernel for few rows and another for many,
which sum in another order: rows have the same bits where the number of rows is the same, and that
is all that roll-back rests on (`tests/device/test_packed.py`). Rounds of one width throughout are
`target.verify_width`.
"""

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import mlx.core as mx

from common.checkpoint.matrix import Matrix, Packed, can_join, join, scaled, values_of
from common.checkpoint.packed import PackFormat
from common.errors import ConfigError
from target_svc.models.blocks.norms import is_cpu

logger = logging.getLogger(__name__)

_MANY: Final = 64  # rows, over every border between kernels
_TRIED_ROWS: Final = 4096  # of a matrix; longer ones are tried with as many and the odd rest
KEPT_MODES: Final = ("affine", "mxfp4", "nvfp4")  # others are dequantized when they are loaded


class Linear:
    """`x @ W^T` of matrices that read the same input; their outputs stand side by side.

    Args:
        parts: [out, in] each, in the order of the outputs.
        bias: of all outputs, or None.
        gain: what the products are times.
    """

    def __init__(self, *parts: Matrix, bias: mx.array | None = None, gain: float = 1.0) -> None:
        self._products = [_product(join(run), gain) for run in _runs(parts)]
        self._bias = bias

    def __call__(self, x: mx.array) -> mx.array:
        """Apply to x [.., in]; out [.., sum of out]."""
        if len(self._products) == 1:
            return self._products[0](x, self._bias)
        out = mx.concatenate([product(x, None) for product in self._products], axis=-1)
        return out if self._bias is None else out + self._bias


class GatheredLinear:
    """`x @ W[e]^T` for chosen experts e.

    Args:
        matrix: [E, out, in].
        gain: what the products are times.
    """

    def __init__(self, matrix: Matrix, gain: float = 1.0) -> None:
        self._matrix: mx.array | _PackedProduct
        if isinstance(matrix, Packed):
            self._matrix = _PackedProduct(matrix, gain)
        else:
            plain = mx.contiguous(matrix.swapaxes(1, 2))
            self._matrix = plain if gain == 1.0 else plain * gain

    @property
    def plain(self) -> mx.array | None:
        """[E, in, out], times the gain; None where the matrix is packed."""
        return None if isinstance(self._matrix, _PackedProduct) else self._matrix

    def __call__(self, x: mx.array, ids: mx.array, *, is_sorted: bool = False) -> mx.array:
        """Apply expert `ids` to rows x, broadcast as `mx.gather_mm` does.

        Args:
            x: [.., 1, in].
            ids: uint32 [..].
            is_sorted: whether equal ids stand together, which is faster.
        """
        if isinstance(self._matrix, _PackedProduct):
            return self._matrix.gather(x, ids, is_sorted=is_sorted)
        return mx.gather_mm(x, self._matrix, rhs_indices=ids, sorted_indices=is_sorted)


class Embedding:
    """Rows of a table [V, H] by id."""

    def __init__(self, table: Matrix) -> None:
        self.dtype = table.dtype
        self._table = _PackedProduct(table, 1.0) if isinstance(table, Packed) else table

    def __call__(self, ids: mx.array) -> mx.array:
        """Rows [R, H] of ids int32 [R]."""
        table = self._table
        return table.values_at(ids) if isinstance(table, _PackedProduct) else table[ids]


class _PlainProduct:
    def __init__(self, matrix: mx.array, gain: float) -> None:
        matrix = mx.contiguous(matrix.T)
        self._matrix = matrix if gain == 1.0 else matrix * gain

    def __call__(self, x: mx.array, bias: mx.array | None) -> mx.array:
        return x @ self._matrix if bias is None else mx.addmm(bias, x, self._matrix)


class _PackedProduct:
    def __init__(self, matrix: Packed, gain: float) -> None:
        folded = scaled(matrix, gain) if gain != 1.0 and matrix.biases is not None else matrix
        packed = folded if isinstance(folded, Packed) else matrix
        self._gain = 1.0 if packed is not matrix else gain
        self._weight = mx.contiguous(packed.weight)
        self._scales = mx.contiguous(packed.scales)
        self._biases = None if packed.biases is None else mx.contiguous(packed.biases)
        self._dtype = matrix.dtype
        form = matrix.form
        self._form: dict[str, Any] = {
            "group_size": form.group,
            "bits": form.bits,
            "mode": form.mode,
        }

    def __call__(self, x: mx.array, bias: mx.array | None) -> mx.array:
        out = mx.quantized_matmul(
            x, self._weight, self._scales, self._biases, transpose=True, **self._form
        )
        out = out if self._gain == 1.0 else out * self._gain
        return out if bias is None else out + bias

    def gather(self, x: mx.array, ids: mx.array, *, is_sorted: bool) -> mx.array:
        out = mx.gather_qmm(
            x,
            self._weight,
            self._scales,
            self._biases,
            rhs_indices=ids,
            transpose=True,
            sorted_indices=is_sorted,
            **self._form,
        )
        return out if self._gain == 1.0 else out * self._gain

    def values_at(self, ids: mx.array) -> mx.array:
        biases = None if self._biases is None else self._biases[ids]
        rows = mx.dequantize(self._weight[ids], self._scales[ids], biases, **self._form)
        return rows.astype(self._dtype)


def _product(matrix: Matrix, gain: float) -> _PlainProduct | _PackedProduct:
    if isinstance(matrix, Packed):
        return _PackedProduct(matrix, gain)
    return _PlainProduct(matrix, gain)


def _runs(parts: Sequence[Matrix]) -> list[list[Matrix]]:
    """Neighbours that one product serves."""
    runs: list[list[Matrix]] = []
    for part in parts:
        if runs and can_join(runs[-1][0], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def holds_packed(owner: object) -> bool:
    """Whether an object, or a block that it is made of, multiplies with a packed matrix."""
    if isinstance(owner, _PackedProduct):
        return True
    if isinstance(owner, list | tuple):
        return any(map(holds_packed, owner))
    is_block = type(owner).__module__.startswith("target_svc.models.")
    return is_block and any(map(holds_packed, getattr(owner, "__dict__", {}).values()))


# --------------------------------------------------------------------------- kept or not


class Tensors:
    """A network's tensors by published name, each taken once, so that it is freed when it is used.

    Args:
        matrices: by published name; emptied as they are taken.
        keep_packed: whether packed matrices stay packed; None keeps them on a GPU that multiplies
            their format.
    """

    def __init__(self, matrices: dict[str, Matrix], *, keep_packed: bool | None) -> None:
        self._matrices = matrices
        self._must = keep_packed is True
        self._keeps = not is_cpu() if keep_packed is None else keep_packed

    def take(self, name: str) -> mx.array:
        """Hand plain values over."""
        return values_of(self._matrices.pop(name))

    def find(self, name: str) -> mx.array | None:
        """Hand plain values over where there are any."""
        return self.take(name) if name in self._matrices else None

    def matrix(self, name: str) -> Matrix:
        """Hand a matrix over, packed if it stays so.

        Raises:
            ConfigError: it must stay packed, and this device cannot multiply its format.
        """
        found = self._matrices.pop(name)
        if not isinstance(found, Packed):
            return found
        form = found.form
        if not self._keeps or form.mode not in KEPT_MODES:
            return found.values()
        if multiplies(form, found.dtype, found.shape[-2:]):
            return found
        if self._must:
            raise ConfigError(
                f"target.keep_packed: 'on', but this device does not multiply {form.mode} of "
                f"{form.bits} bits in groups of {form.group} ({name}); use 'auto' or 'off'"
            )
        return found.values()

    def find_matrix(self, name: str) -> Matrix | None:
        """Hand a matrix over where there is one."""
        return self.matrix(name) if name in self._matrices else None

    def all_of(self, at: str, names: Sequence[str]) -> list[Any]:
        """Hand over what stands under these names: matrices, and values of all else."""
        return [self.matrix(at + name) for name in names]


@cache
def multiplies(form: PackFormat, dtype: mx.Dtype, shape: tuple[int, ...]) -> bool:
    """Whether the default device multiplies matrices of this format and shape; tried once.

    Tried are a row and many, for which MLX has kernels of their own, of one matrix and of chosen
    ones, in order and out of it.

    Args:
        form: how they are packed.
        dtype: of their values.
        shape: (out, in).
    """
    out, into = shape
    both = _zeros(form, dtype, (2, min(out, _TRIED_ROWS + out % _TRIED_ROWS), into))
    biases = None if both.biases is None else both.biases[0]
    product = Linear(both.of_parts(both.weight[0], both.scales[0], biases))
    gathered = GatheredLinear(both)
    try:
        for rows in (1, _MANY):
            x, ids = mx.zeros((rows, 1, into), dtype=dtype), mx.zeros((rows,), dtype=mx.uint32)
            mx.eval(product(x[:, 0]), *(gathered(x, ids, is_sorted=s) for s in (False, True)))
    except (RuntimeError, ValueError) as error:
        logger.warning(
            "this device does not multiply %s of %d bits, %d x %d, as packed; values instead: %s",
            *(form.mode, form.bits, out, into, error),
        )
        return False
    return True


def _zeros(form: PackFormat, dtype: mx.Dtype, shape: tuple[int, ...]) -> Packed:
    *rows, into = shape
    weight = mx.zeros((*rows, into * form.bits // 32), dtype=mx.uint32)
    is_affine = form.mode == "affine"
    scales = mx.zeros((*rows, into // form.group), dtype=dtype if is_affine else mx.uint8)
    return Packed(weight, scales, mx.zeros_like(scales) if is_affine else None, form, dtype)
