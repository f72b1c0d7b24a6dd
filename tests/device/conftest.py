"""Device tests run alone (`python -m pytest -m device tests/device`), in true float32."""

import os

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # read by MLX when it is loaded
