"""How weights are read.

Owns the BLAS choice on Linux, strict reading of safetensors folders, and fingerprints of what two
processes must agree on. Does not know any network: callers say which tensors they expect.
May import: mlx (in `weights` only), numpy, `common.errors`. This file imports nothing, so that
`common.checkpoint.blas` can run before MLX is loaded.
"""
