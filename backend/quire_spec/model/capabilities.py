# SPDX-License-Identifier: Apache-2.0
"""The capabilities of the engine, in a form that other code can read.

The planner and the validation of the engine both read these tables.

Therefore, a plan never requests a feature that the engine does not support. Tests check that every architecture in the
table has a model class, and that every model class is in the table.
"""

from quire_spec.model.architectures import ARCHITECTURES

SUPPORTED_ARCHITECTURES = tuple(ARCHITECTURES)
ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")
ACTIVATION_ALIASES = {"swish": "silu", "gelu_fast": "gelu_new"}
"""For some of these activations, transformers also uses another name. Maps that name to the name in ACTIVATIONS."""
DEVICES = ("cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
BLOCK_SIZES = (8, 16, 32, 64, 128)
SCHEDULING_POLICIES = ("fcfs", "priority")
MODEL_IMPLS = ("auto", "quire", "transformers")
"""Values of `model_impl`: those of vLLM, whose own classes are called vllm there."""
LOAD_FORMATS = ("auto", "safetensors", "runai_streamer")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "int8_per_token_head")
STATE_DTYPES = ("auto", "float32", "bfloat16")
KV_LOAD_FAILURE_POLICIES = ("recompute", "fail")
KV_SCALE_BYTES = {"int8_per_token_head": 4}
"""In these KV cache dtypes, each key and each value has a scale. Maps the dtype to the size of a scale in bytes. In all
other dtypes, keys and values have no scales."""
QUANTIZATIONS: tuple[str, ...] = ("int8", "int4", "fp8")
"""Formats to which the engine can quantize the weights of a checkpoint while it loads them."""
QUANTIZED_KERNEL_DEVICES = ("cpu", "cuda")
"""Devices that have kernels for quantized weights. On any other device, the engine converts quantized weights to an
unquantized dtype when it loads the checkpoint."""
CHECKPOINT_QUANTIZATIONS = (
    "fp8",
    "fbgemm_fp8",
    "compressed-tensors",
    "awq",
    "gptq",
    "mxfp4",
    "modelopt",
    "auto-round",
    "bitsandbytes",
    "gguf",
)
"""Values of quant_method that are supported in config.json of a quantized checkpoint."""
TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)
MAX_PIPELINE_PARALLEL_SIZE = 16
"""Maximum number of pipeline stages of a model."""
MAX_DATA_PARALLEL_SIZE = 16
"""Maximum number of cores in a pod."""
MAX_IMAGES = 64
"""Largest value of limit_mm_per_prompt.image."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of max_lora_rank, as in vLLM."""
SPECULATIVE_MODEL_METHODS = ("draft_model", "eagle3", "medusa")
"""Methods of speculative decoding that need weights of their own, besides the weights of the main model."""
SPECULATIVE_DRAFTER_METHODS = ("mtp", *SPECULATIVE_MODEL_METHODS)
"""Methods of speculative decoding that compute draft tokens with weights, which can be those of the main model."""
SPECULATIVE_METHODS = ("ngram", "suffix", *SPECULATIVE_DRAFTER_METHODS)
ARCHITECTURES_WITHOUT_HEADS = ("OPTForCausalLM",)
"""EAGLE-3 and Medusa heads cannot be used with these architectures, because the heads cannot read the hidden states of
such models."""
TOOL_CALL_PARSERS = (
    *("hermes", "qwen3_coder", "qwen3_xml", "llama3_json", "llama4_json", "pythonic", "llama4_pythonic", "mistral"),
    *("openai", "deepseek_v3", "deepseek_v31", "ernie45", "functiongemma", "gemma4", "glm45", "glm47", "granite"),
    *("granite4", "hunyuan_a13b", "kimi_k2", "lfm2", "minimax_m2", "olmo3", "phi4_mini_json", "seed_oss", "xlam"),
    "response_template",
)
"""Formats of tool calls that are supported. The names are those of vLLM's --tool-call-parser."""
REASONING_PARSERS = (
    *("qwen3", "deepseek_r1", "mistral", "openai_gptoss", "deepseek_v3", "ernie45", "gemma4", "glm45", "glm47"),
    *("granite", "hunyuan_a13b", "kimi_k2", "minimax_m2", "olmo3", "seed_oss"),
    "response_template",
)
"""Formats of reasoning that are supported. The names are those of vLLM's --reasoning-parser."""
CONVERSIONS = ("auto", "none", "embed", "classify")
"""Values of `convert`, as in vLLM."""
POOLING_TYPES = ("auto", "last", "mean", "cls")

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
