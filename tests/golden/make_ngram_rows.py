"""Make `ngram_rows.npz`: what MLX and torch make of stored rows of an n-gram table.

Run with the `reference` extra installed:  PYTHONPATH=tests python tests/golden/make_ngram_rows.py
bfloat16 is stored as its bits, because NumPy has no such type.
"""

from pathlib import Path

import mlx.core as mx
import numpy as np
import torch

OUT = Path(__file__).with_name("ngram_rows.npz")
ROWS, WIDTH, GROUP = 8, 160, 32
SCALE = 1.9907e-4  # of the published FP8 table's size


def bits(array):
    """An MLX array as NumPy; bfloat16 as uint16."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def affine(dtype, n_bits):
    """Codes of a random table, and what they mean in float32 and in the scales' own dtype."""
    rng = np.random.default_rng(n_bits)
    table = mx.array(0.02 * rng.standard_normal((ROWS, WIDTH), dtype=np.float32)).astype(dtype)
    how = {"group_size": GROUP, "bits": n_bits}
    codes, scales, biases = mx.quantize(table, **how)
    wide = [scales.astype(mx.float32), biases.astype(mx.float32)]
    return {
        "codes": bits(codes),
        "scales": bits(scales),
        "biases": bits(biases),
        "float32": bits(mx.dequantize(codes, *wide, **how)),
        "own": bits(mx.dequantize(codes, scales, biases, **how)),
    }


def fp8():
    """All 256 codes times the scale, in float32 and rounded once to bfloat16."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = codes.to(torch.float32) * torch.tensor(SCALE, dtype=torch.float32)
    rounded = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return {"scale": np.float32(SCALE), "float32": values.numpy(), "bfloat16": rounded}


def main():
    """Write the file."""
    mx.set_default_device(mx.cpu)
    golden = {f"fp8.{name}": value for name, value in fp8().items()}
    for name, dtype in (("BF16", mx.bfloat16), ("F16", mx.float16), ("F32", mx.float32)):
        golden |= {f"{name}.{key}": value for key, value in affine(dtype, 4).items()}
    golden |= {f"eight.{key}": value for key, value in affine(mx.bfloat16, 8).items()}
    np.savez_compressed(OUT, **golden)


if __name__ == "__main__":
    main()
