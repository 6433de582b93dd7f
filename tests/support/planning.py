# SPDX-License-Identifier: Apache-2.0
"""Models, GPUs and services for planner tests, and the schema of status.plan."""

import functools
from typing import Any

import yaml

from quire_operator.api import crd, openapi_schema
from quire_operator.api.llmservice import LLMService
from quire_operator.api.yaml_manifest import parse_manifests
from quire_operator.plan.checkpoint import CheckpointInfo
from quire_operator.plan.gpu import GpuInfo, MemorySource
from quire_operator.plan.inputs import PlannerInputs
from quire_operator.plan.plan import Plan
from quire_operator.plan.planner import make_plan

GIB = 2**30
NO_LORA = "lora: {maxLoaded: 0}"
L4, H100, T4 = "NVIDIA-L4", "NVIDIA-H100-80GB-HBM3", "Tesla-T4"

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
QWEN_05B = QWEN_7B | {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
QWEN3_30B_A3B = QWEN_7B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "head_dim": 128,
    "vocab_size": 151936,
}
GEMMA3_12B = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "torch_dtype": "bfloat16",
}
QWEN3_5_4B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    },
}
# Few KV heads with a window, and larger ones without. 15 layers have keys of their own.
GEMMA4_SMALL = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
}
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
# metadata.total_size of the models' safetensors indexes.
WEIGHT_BYTES = {"8b": 16_060_522_496, "70b": 141_107_412_992, "70b-fp8": int(67.7 * GIB)}


def checkpoint_info(config: dict[str, Any], size: int | None = None) -> CheckpointInfo:
    return CheckpointInfo.from_files(config, None if size is None else {"metadata": {"total_size": size}})


MODELS = {
    "8b": checkpoint_info(LLAMA_8B, WEIGHT_BYTES["8b"]),
    "70b": checkpoint_info(LLAMA_70B, WEIGHT_BYTES["70b"]),
    "70b-fp8": checkpoint_info(LLAMA_70B, WEIGHT_BYTES["70b-fp8"]),
    "qwen": checkpoint_info(QWEN_7B),
    "moe": checkpoint_info(QWEN3_30B_A3B),
    "moe-fp8": checkpoint_info(QWEN3_30B_A3B | {"quantization_config": {"quant_method": "fp8"}}, 31 * GIB),
    "moe-nvfp4": checkpoint_info(QWEN3_30B_A3B | {"quantization_config": NVFP4}, 18 * GIB),
    "qwen-0.5b": checkpoint_info(QWEN_05B),
    "tiny": checkpoint_info(TINY),
    "gemma": checkpoint_info(GEMMA3_12B),
    "deepseek-lite": checkpoint_info(DEEPSEEK_V2_LITE),
    "gemma-4": checkpoint_info(GEMMA4_SMALL),
    "qwen3.5": checkpoint_info(QWEN3_5_4B),
    "gemma-full": checkpoint_info(GEMMA3_12B | {"sliding_window": None}),
}


@functools.cache
def llm_service(spec: str, name: str = "s") -> LLMService:
    """Return a service from the YAML of its spec without the model."""
    head = f"apiVersion: quire.dev/v1alpha1\nkind: LLMService\nmetadata: {{name: {name}, namespace: team}}\n"
    text = spec if "model:" in spec else f"model: {{source: {{huggingFace: {{repo: o/m}}}}}}\n{spec}"
    lines = "\n".join(f"  {line}" for line in text.splitlines())
    (document,) = parse_manifests(f"{head}spec:\n{lines}\n", "f.yaml")
    return LLMService.from_body(crd.require_valid(document))


def planner_inputs(model: str, gpu: str | int | None, spec: str = NO_LORA) -> PlannerInputs:
    """`gpu` is a product, MiB of the label, or None for a CPU."""
    gpu_info = (
        GpuInfo("", gpu, MemorySource.SPEC) if isinstance(gpu, int) else GpuInfo.from_product(gpu) if gpu else None
    )
    assert gpu is None or gpu_info is not None, gpu
    text = spec if gpu is not None else f"device: CPU\n{spec}"
    return PlannerInputs.from_service(llm_service(text), MODELS[model], gpu_info)


def plan_for(model: str, gpu: str | int | None, spec: str = NO_LORA) -> Plan:
    return make_plan(planner_inputs(model, gpu, spec))


@functools.cache
def status_schema() -> dict[str, Any]:
    """Return the CRD's schema of status.plan."""
    document = yaml.safe_load(crd.find_crd_file().read_text())
    root = document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return root["properties"]["status"]["properties"]["plan"]


def schema_problems(body: Any) -> list[str]:
    """Return the errors that an API server would report for a status.plan."""
    return [str(problem) for problem in openapi_schema.iter_problems(status_schema(), body)]
