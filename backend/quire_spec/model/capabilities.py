# SPDX-License-Identifier: Apache-2.0
"""Capabilities of the engine as data. The planner and the engine's validation both read this table.

A plan therefore never requests an unsupported feature. Tests check that each architecture of this table has a model
class, and that each model class is in this table.
"""

from quire_spec.model.architectures import ARCHITECTURES

SUPPORTED_ARCHITECTURES = tuple(ARCHITECTURES)
ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")
ACTIVATION_ALIASES = {"swish": "silu"}
"""Maps aliases of activations in transformers to names in ACTIVATIONS."""
DEVICES = ("cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
BLOCK_SIZES = (8, 16, 32, 64, 128)
SCHEDULING_POLICIES = ("fcfs", "priority")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "int8_per_token_head")
KV_SCALE_BYTES = {"int8_per_token_head": 4}
"""Maps KV cache dtypes to the size in bytes of the scale of a key or value. Other dtypes have no scales."""
QUANTIZATIONS: tuple[str, ...] = ("int8", "int4", "fp8")
"""Formats to which the engine can quantize a checkpoint when it loads the checkpoint."""
QUANTIZED_KERNEL_DEVICES = ("cpu", "cuda")
"""Devices with kernels for quantized weights. On other devices the engine dequantizes a quantized checkpoint when it
loads the checkpoint."""
CHECKPOINT_QUANTIZATIONS = ("fp8", "fbgemm_fp8", "compressed-tensors", "awq", "gptq", "mxfp4")
"""Supported values of quant_method in config.json of quantized checkpoints."""
TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)
LORA_RANKS = (8, 16, 32, 64, 128, 256)
SPECULATIVE_MODEL_METHODS = ("draft_model", "eagle3", "medusa")
"""Methods of speculative decoding that need weights in addition to the main model's weights."""
SPECULATIVE_METHODS = ("ngram", "suffix", *SPECULATIVE_MODEL_METHODS)
ARCHITECTURES_WITHOUT_HEADS = ("OPTForCausalLM",)
"""Architectures that do not support EAGLE-3 and Medusa heads, because these cannot read their hidden states."""
TOOL_CALL_PARSERS = (
    *("hermes", "qwen3_coder", "qwen3_xml", "llama3_json", "llama4_json", "pythonic", "llama4_pythonic", "mistral"),
    "openai",
)
"""Supported formats of tool calls, with the names of vLLM's --tool-call-parser."""
REASONING_PARSERS = ("qwen3", "deepseek_r1", "mistral", "openai_gptoss")
"""Supported formats of reasoning, with the names of vLLM's --reasoning-parser."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
