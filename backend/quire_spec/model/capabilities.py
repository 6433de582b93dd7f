# SPDX-License-Identifier: Apache-2.0
"""What the engine can do, as data: the planner reads it before planning, the engine before refusing.

One table, so that a plan never asks for what the engine does not have. The engine's tests hold it to the truth:
every architecture listed here has a model class, and the other way round.
"""

from quire_spec.model.architectures import ARCHITECTURES

SUPPORTED_ARCHITECTURES = tuple(ARCHITECTURES)
ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")
ACTIVATION_ALIASES = {"swish": "silu"}
"""Other names that transformers has for them."""
DEVICES = ("cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
BLOCK_SIZES = (8, 16, 32, 64, 128)
SCHEDULING_POLICIES = ("fcfs", "priority")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
QUANTIZATIONS: tuple[str, ...] = ()
TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)
LORA_RANKS = (8, 16, 32, 64, 128, 256)
SPECULATION = False

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
