"""A tiny checkpoint of every family: who makes it, and of what fields."""

from support.tiny import make_tiny_target
from support.tiny_glm5_next import make_tiny_glm5_next
from support.tiny_llama import make_tiny_llama
from support.tiny_qwen3 import make_tiny_qwen3
from support.tiny_qwen3_5 import make_tiny_qwen3_5

MAKERS = {
    "qwen4_exp": (make_tiny_target, {"dtype": "F32", "num_hidden_layers": 4}),
    "glm5_next": (make_tiny_glm5_next, {}),
    "qwen3": (make_tiny_qwen3, {}),
    "qwen3_moe": (make_tiny_qwen3, {"case": "qwen3_moe"}),
    "llama": (make_tiny_llama, {}),
    "qwen3_5": (make_tiny_qwen3_5, {}),
    "qwen3_5_moe": (make_tiny_qwen3_5, {"case": "qwen3_5_moe"}),
}
