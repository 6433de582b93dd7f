# SPDX-License-Identifier: Apache-2.0
"""`python -m quire_engine compile`: compiles GPU kernels into a folder, which can be part of an image. Needs no GPU.

A model on the meta device runs the steps that an engine runs at start. Each time a step launches a kernel, this kernel
is compiled. Therefore, the module does not need a list of kernels. If a model uses a new kernel, the kernel is
compiled, too.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.kv_cache.state_cache import StateCache
from quire_engine.lora.device_slots import create_slots
from quire_engine.models.base import CausalLM
from quire_engine.models.forward_batch import build_forward_batch
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.moe import MoE
from quire_engine.models.registry import get_model_class
from quire_engine.step.input import build_step_input
from quire_engine.step.plan import ScheduledSpan
from quire_engine.worker.warmup import compile_steps, dummy_span, set_block_tables
from quire_kernels import (
    MIN_CAPABILITY_FOR_FP8,
    LinearWeight,
    pack_weight_codebook,
    pack_weight_fp4,
    pack_weight_fp8,
    pack_weight_int4,
    pack_weight_int8,
)
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError, InvalidArgument
from quire_spec.model.architectures import module_name
from quire_spec.model.capabilities import QUANTIZATIONS
from quire_spec.model.kv_layout import KVLayout
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.quantization import QuantizationScheme, WeightScheme

_LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
"""Configuration of Llama-3.1-8B. Mistral 7B has another vocabulary, and Qwen3-8B has another MLP, but most of their
kernels are the same.
"""
_CONFIG = EngineConfig(model="", device="cuda", dtype="bfloat16", enable_lora=True, lora_experts=True)
_DTYPE, _DEVICE = torch.bfloat16, torch.device("meta")
_SPAN_COUNTS = (1, 17, 33, 65, 129, 257)
"""The compiled steps have these numbers of spans. Each number selects a different variant of the attention plan. Steps
with up to 257 spans use only these variants."""
_LONGEST_STEP = 8192
"""Number of tokens of the longest compiled step. With so many tokens, even a model with hundreds of experts uses tiles
of many rows."""


def compile_kernels(models: Sequence[Path], capability: str, into: Path) -> int:
    """Compile the kernels of bfloat16 models into a folder, and mark the folder as complete.

    The folder also contains the kernels for adapters, for an fp8 KV cache and for weights that are quantized at load.
    In addition, it contains the kernels that run only if QUIRE_KERNELS selects them.

    Args:
        models: folders with a config.json; if empty, kernels are compiled for the shape of Llama-3.1-8B.
        capability: compute capability of the GPU, such as "9.0".
        into: new or existing folder.

    Returns:
        Number of kernels.

    Raises:
        InvalidArgument: Triton is missing, or `capability` is not a compute capability of 8.0 or higher.
        ConfigError: a model's config.json cannot be read.
    """
    match = re.fullmatch(r"(\d{1,2})\.(\d)", capability)
    if match is None or int(match[1]) < 8:
        raise InvalidArgument(
            f"--capability: {capability!r} is not a compute capability of 8.0 or higher; use 9.0 for Hopper"
        )
    version = int(match[1]), int(match[2])
    try:
        from quire_kernels.gpu import compilation
    except ImportError as error:
        raise InvalidArgument(f"compile: Triton cannot be imported ({error}); install triton") from error
    shapes = [ModelConfig.load(folder, "quire") for folder in models] or [ModelConfig.from_config(_LLAMA_3_1_8B)]

    def call_kernels() -> None:
        for shape in shapes:
            for model in _models(shape, version):
                _run_steps(model, version)
            compilation.compile_step_ops(shape.vocab_size, _CONFIG.block_size, _DTYPE)

    return len(compilation.fill_cache(call_kernels, version, into))


def _models(shape: ModelConfig, capability: tuple[int, int]) -> Iterator[CausalLM]:
    """Yield the model; its weights are not quantized at load.

    If the checkpoint is not quantized either, also yield the model once for each quantization that is possible at load.
    """
    for quantization in (None, *QUANTIZATIONS) if shape.quantization is None else (None,):
        factory = ParamFactory(_DTYPE, _DEVICE, quantization=quantization)
        try:
            model = get_model_class(shape.architecture)(shape, factory)
        except ConfigError:
            assert quantization is not None
            continue  # this model cannot be quantized in this way
        model.pack()
        if shape.quantization is not None:
            _quantize_like_checkpoint(model, shape.quantization)
            _quantize_experts_like_checkpoint(model, shape.quantization, capability)
        yield model


def _quantize_like_checkpoint(model: CausalLM, quantization: QuantizationScheme) -> None:
    """Replace the weights of linear layers by empty weights, as if a quantized checkpoint had been loaded.

    Only layers whose weights remain quantized in memory are changed.
    """
    if quantization.method == "mxfp4":
        return  # only experts are quantized
    info = model.shape.architecture_info
    path_by_name = {module_name(path): path for path in info.linears}
    for layer, linear in model.linears():
        try:
            scheme = quantization.scheme_of(f"{info.layers_path}.{layer}.{path_by_name[next(iter(linear.slices))]}")
        except ConfigError:
            continue  # not quantized
        if scheme.has_kernel:
            assert isinstance(linear.weight, torch.Tensor)
            linear.weight = empty_quantized_weight(scheme, *linear.weight.shape)


def _quantize_experts_like_checkpoint(
    model: CausalLM, quantization: QuantizationScheme, capability: tuple[int, int]
) -> None:
    """Replace the weights of experts in the same way as `_quantize_like_checkpoint` does for linear layers.

    The experts of a layer remain quantized only if all of them have the same scheme.
    """
    for index, layer in enumerate(model.layers):
        moe = getattr(layer, "mlp", None)
        if not isinstance(moe, MoE):
            continue
        prefix = f"{model.shape.architecture_info.layers_path}.{index}.{moe.names.block}."
        try:
            gate_up, down = (
                {quantization.scheme_of(name.removesuffix(".weight")) for name, _ in tensors}
                for tensors in (moe.gate_up_tensors(prefix), moe.down_tensors(prefix))
            )
        except ConfigError:
            continue  # not all of them are quantized
        if len(gate_up) == len(down) == 1 and all(_has_experts_kernel(each, capability) for each in gate_up | down):
            weights = []
            for [scheme], weight in ((gate_up, moe.experts.gate_up), (down, moe.experts.down)):
                assert isinstance(weight, torch.Tensor)
                weights.append(empty_quantized_weight(scheme, weight[..., 0].numel(), weight.shape[-1]))
            moe.experts = replace(moe.experts, gate_up=weights[0], down=weights[1])


def _has_experts_kernel(scheme: WeightScheme, capability: tuple[int, int]) -> bool:
    is_convertible = scheme.layout != "fp8" or capability >= MIN_CAPABILITY_FOR_FP8
    return scheme.has_kernel and not scheme.has_act_order and is_convertible


def empty_quantized_weight(scheme: WeightScheme, out_features: int, in_features: int) -> LinearWeight:
    """Return an empty weight on the meta device.

    It has the memory layout that `pack_quantized` gives to the weights of a checkpoint.
    """
    group_size = scheme.block[1] if scheme.block is not None else in_features
    scales = torch.empty(out_features, -(-in_features // group_size), device=_DEVICE)

    def values(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(out_features, in_features, dtype=dtype, device=_DEVICE)

    if scheme.layout == "gguf":
        return pack_weight_codebook(values(torch.uint8), scales, torch.arange(16.0), mins=scales)
    if scheme.layout == "bnb4":
        return pack_weight_codebook(values(torch.uint8), scales, torch.linspace(-1, 1, 16))
    if scheme.layout in ("nvfp4", "nvfp4_packed"):
        return pack_weight_fp4(values(torch.uint8), scales)
    if scheme.layout == "mxfp4":
        return pack_weight_fp4(values(torch.uint8), scales.to(torch.float8_e8m0fnu))
    if scheme.layout == "fp8":
        return pack_weight_fp8(values(torch.float8_e4m3fn), scales)
    if scheme.layout in ("int8", "bnb_int8"):
        return pack_weight_int8(values(torch.int8), scales, weight_only=not scheme.has_quantized_inputs)
    return pack_weight_int4(values(torch.uint8), scales, scales.to(torch.uint8) if scheme.has_zeros else None)


def _run_steps(model: CausalLM, capability: tuple[int, int]) -> None:
    """Run the steps that an engine runs at start.

    The steps without adapters run on each type of KV cache. The steps with adapters run on one type.
    """
    e4m3 = [torch.float8_e4m3fn] if capability >= MIN_CAPABILITY_FOR_FP8 else []
    for dtype in (_DTYPE, *e4m3):
        kv_cache = _create_cache(model.shape, dtype)
        for spans in _steps(model.shape):
            _run_step(model, kv_cache, [replace(span, adapter_slot=None) for span in spans])
    create_slots(model, _CONFIG, _CONFIG.num_lora_pages(model.shape), _DTYPE, _DEVICE)
    kv_cache = _create_cache(model.shape, _DTYPE)
    for spans in _steps(model.shape):
        _run_step(model, kv_cache, spans)


def _create_cache(shape: ModelConfig, dtype: torch.dtype) -> KVCache:
    layout = KVLayout.from_model(shape, shape.max_length)
    states = None
    if shape.states is not None:
        states = StateCache(shape.states, 1, _DTYPE, torch.float32, _DEVICE)
    return KVCache(shape, 1, _CONFIG.block_size, dtype, _DEVICE, layout=layout, states=states)


def _steps(shape: ModelConfig) -> Iterator[list[ScheduledSpan]]:
    max_length = min(shape.max_length, _LONGEST_STEP)
    yield from compile_steps(_CONFIG, max_length)
    span = partial(dummy_span, block_size=_CONFIG.block_size)
    yield [span(0, max_length - 1)]
    for num_spans in _SPAN_COUNTS:
        yield [span(max_length - 1, 1)] * num_spans


def _run_step(model: CausalLM, kv_cache: KVCache, spans: list[ScheduledSpan]) -> None:
    num_groups = kv_cache.layout.num_groups
    set_block_tables(spans, kv_cache.block_size, num_groups)
    step_input = build_step_input(spans, kv_cache.block_size, model.shape.long_rope_threshold, num_groups=num_groups)
    batch = build_forward_batch(step_input, kv_cache, _DEVICE)
    hidden = model(batch, kv_cache)
    assert hidden is not None
    model.compute_logits(hidden, batch.for_logit_rows(slice(batch.num_logits)))
