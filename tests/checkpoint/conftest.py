"""BLAS before MLX, as in every process that reads weights."""

from common.checkpoint.blas import load_openblas

load_openblas()
