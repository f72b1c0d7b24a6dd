"""The weights of a mixed-stream sub-layer in one launch, on Metal and on CUDA.

Knows one thread's work: one row of logits. Does not know streams or sub-layers. The plain form
needs two or three launches for each of about forty normalizations, twice a layer.
Invariant: computes the same function as `sinkhorn.SinkhornConnection` without a kernel; where a
kernel cannot be compiled, the plain form serves and a line is logged.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import mlx.core as mx

logger = logging.getLogger(__name__)

#: What a device's language calls the index of a thread; one thread per block and row.
_METAL_ROW: Final = "const uint row = thread_position_in_grid.x;"
_CUDA_ROW: Final = "const unsigned int row = blockIdx.x;"

#: The body in the common part of Metal and CUDA: no pointers, constants in front.
_BODY: Final = """
  const unsigned int at = row * (2 + S) * S;
  for (int s = 0; s < S; ++s) {
    vectors[row * 2 * S + s] = 1.0f / (1.0f + exp(-logits[at + s])) + EPS;
    vectors[row * 2 * S + S + s] = 2.0f / (1.0f + exp(-logits[at + S + s]));
  }
  float m[S * S];
  for (int r = 0; r < S; ++r) {
    float top = logits[at + 2 * S + r * S];
    for (int s = 1; s < S; ++s) top = max(top, logits[at + 2 * S + r * S + s]);
    float sum = 0.0f;
    for (int s = 0; s < S; ++s) {
      m[r * S + s] = exp(logits[at + 2 * S + r * S + s] - top);
      sum += m[r * S + s];
    }
    for (int s = 0; s < S; ++s) m[r * S + s] = m[r * S + s] / sum + EPS;
  }
  for (int round = 0; round < ROUNDS; ++round) {
    for (int r = 0; r < S && round > 0; ++r) {
      float sum = EPS;
      for (int s = 0; s < S; ++s) sum += m[r * S + s];
      const float factor = 1.0f / sum;
      for (int s = 0; s < S; ++s) m[r * S + s] *= factor;
    }
    for (int s = 0; s < S; ++s) {
      float sum = EPS;
      for (int r = 0; r < S; ++r) sum += m[r * S + s];
      const float factor = 1.0f / sum;
      for (int r = 0; r < S; ++r) m[r * S + s] *= factor;
    }
  }
  for (int i = 0; i < S * S; ++i) mix[row * S * S + i] = m[i];
"""


def kernel_source(streams: int, rounds: int, eps: float, row: str) -> str:
    """The body for these constants; `row` declares the thread's row."""
    constants = (
        f"constexpr int S = {streams}; constexpr int ROUNDS = {rounds}; "
        f"constexpr float EPS = {eps:.9e}f;"
    )
    return f"{constants}\n{row}{_BODY}"


@cache
def weigh_kernel(
    streams: int, rounds: int, eps: float
) -> Callable[[mx.array], tuple[mx.array, mx.array]] | None:
    """A function from logits [R, (2 + S) S] to read and write weights [R, 2 S] and C [R, S, S].

    Asked once for each shape, on the default device; evaluates one row to see that it runs.

    Args:
        streams: S.
        rounds: column normalizations.
        eps: floor of a normalization.

    Returns:
        None where there is no GPU or the kernel does not compile there.
    """
    make: Any
    if mx.metal.is_available():
        make, row = mx.fast.metal_kernel, _METAL_ROW
    elif mx.cuda.is_available():
        make, row = mx.fast.cuda_kernel, _CUDA_ROW
    else:
        return None
    kernel = make(
        name=f"weigh_streams_{streams}_{rounds}",
        input_names=["logits"],
        output_names=["vectors", "mix"],
        source=kernel_source(streams, rounds, eps, row),
    )

    def weigh(logits: mx.array) -> tuple[mx.array, mx.array]:
        rows = logits.shape[0]
        vectors, mix = kernel(
            inputs=[logits],
            grid=(rows, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(rows, 2 * streams), (rows, streams, streams)],
            output_dtypes=[mx.float32, mx.float32],
        )
        return vectors, mix

    try:
        mx.eval(weigh(mx.zeros((1, (2 + streams) * streams))))
    except RuntimeError as error:
        logger.warning("no kernel for mixed streams on this device, plain form instead: %s", error)
        return None
    return weigh
