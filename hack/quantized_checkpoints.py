# SPDX-License-Identifier: Apache-2.0
"""Writes the quantized checkpoints in tests/engine/weights/quantized/checkpoints. Each format is written by the program
that defines it.

Each folder contains a random Llama with one layer, or a gpt-oss with two layers. The program that quantized the model
is called the writer; `writer.txt` contains its name. `dequantized.json` contains the SHA-256 of each weight after the
writer's own code has dequantized it. Run the script once for each writer, in an environment with transformers:

    python hack/quantized_checkpoints.py compressed-tensors OUT   # pip install compressed-tensors==0.20.0
    python hack/quantized_checkpoints.py mxfp4 OUT                # the same
    python hack/quantized_checkpoints.py actorder OUT             # pip install compressed-tensors==0.12.2
    python hack/quantized_checkpoints.py autoawq OUT SOURCE       # the unpacked wheel of autoawq 0.2.7.post3
    python hack/quantized_checkpoints.py autogptq OUT SOURCE      # the unpacked wheel of auto-gptq 0.7.1
    python hack/quantized_checkpoints.py gptqmodel OUT SOURCE     # the sources of GPTQModel, f4c327a17eb3
    python hack/quantized_checkpoints.py fbgemm OUT SOURCE        # the sources of FBGEMM, 71d6f8b229d9
    python hack/quantized_checkpoints.py auto-round OUT           # pip install auto-round==0.16.1
    python hack/quantized_checkpoints.py bitsandbytes OUT         # pip install bitsandbytes==0.50.2
    python hack/quantized_checkpoints.py modelopt OUT             # pip install nvidia-modelopt==0.47.0

SOURCE is imported without the `__init__` files of its packages, which import compiled kernels.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=0,
    eos_token_id=None,
    initializer_range=0.3,
)
MODEL: str | None = None
GROUP = 32


def new_model(dtype: torch.dtype) -> LlamaForCausalLM:
    """Return a random model, or the model in the folder that --model sets."""
    if MODEL is not None:
        return LlamaForCausalLM.from_pretrained(MODEL, dtype=dtype).eval()
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).to(dtype).eval()


def save(
    out: Path, writer: str, config: dict[str, Any] | None, tensors: dict[str, Tensor], dequantized: dict[str, Tensor]
) -> None:
    """Write a checkpoint. If `config` is None, `out` must already contain config.json."""
    out.mkdir(parents=True, exist_ok=True)
    if CONFIG.tie_word_embeddings:
        tensors = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    if config is not None:
        (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    hashes = {name: digest(tensor) for name, tensor in sorted(dequantized.items())}
    dtype = str(next(iter(dequantized.values())).dtype).removeprefix("torch.")
    (out / "dequantized.json").write_text(json.dumps({"dtype": dtype, "sha256": hashes}, indent=1) + "\n")
    (out / "writer.txt").write_text(f"{writer}, transformers {transformers.__version__}\n")
    print(out.name, sum(path.stat().st_size for path in out.iterdir()))


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def model_config(dtype: str, quantization: dict[str, Any]) -> dict[str, Any]:
    """Return the content of config.json for the model."""
    values = {key: value for key, value in CONFIG.to_diff_dict().items() if key != "transformers_version"}
    return values | {
        "architectures": ["LlamaForCausalLM"], "dtype": dtype, "quantization_config": quantization,
    }  # fmt: skip


def linears(model: nn.Module, lm_head: bool = False) -> dict[str, nn.Linear]:
    """Return a mapping from the names of the linear layers to the layers."""
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and (lm_head or n != "lm_head")}


def write_compressed_tensors(out: Path) -> None:
    """Write one checkpoint for each scheme of compressed-tensors."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    token8 = {"num_bits": 8, "strategy": "token", "dynamic": True}
    int4 = {"num_bits": 4, "type": "int"}
    fp8, fp8_token = {"num_bits": 8, "type": "float"}, token8 | {"type": "float"}
    fp4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    ignore = ["lm_head"]
    schemes: dict[str, tuple[dict[str, Any], dict[str, Any] | None, list[str]]] = {
        "ct-fp8-tensor": (fp8 | {"strategy": "tensor"}, fp8_token | {"strategy": "tensor", "dynamic": False}, ignore),
        "ct-fp8-channel": (fp8 | {"strategy": "channel"}, fp8_token, ["re:.*lm_head"]),
        "ct-fp8-block": (fp8 | {"strategy": "block", "block_structure": [48, 48]}, fp8_token, ignore),
        "ct-int8": ({"num_bits": 8, "type": "int", "strategy": "channel"}, token8 | {"type": "int"}, ignore),
        "ct-int4-group": (int4 | {"strategy": "group", "group_size": GROUP}, None, ["re:.*self_attn.*", "lm_head"]),
        "ct-int4-zeros": (
            int4 | {"strategy": "group", "group_size": GROUP, "symmetric": False},
            None,
            ignore if CONFIG.tie_word_embeddings else [],
        ),
        "ct-int4-channel": (int4 | {"strategy": "channel", "symmetric": False}, None, ignore),
        "ct-nvfp4": (
            fp4 | {"dynamic": False},
            fp4 | {"dynamic": "local"},
            ignore,
        ),
        "ct-int8-weights": ({"num_bits": 8, "type": "int", "strategy": "group", "group_size": GROUP}, None, ignore),
    }
    for name, (weights, inputs, ignored) in schemes.items():
        model = new_model(torch.bfloat16)
        args = QuantizationArgs(**weights)
        activations = None if inputs is None else QuantizationArgs(**inputs)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations)
        config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=ignored)
        apply_quantization_config(model, config)
        for module in model.modules():
            if getattr(module, "quantization_scheme", None) is None:
                continue
            blocks, global_scale = split_blocks(module.weight, weights), None
            if hasattr(module, "weight_global_scale"):
                global_scale = generate_gparam(module.weight.amin(), module.weight.amax())
                module.weight_global_scale.data.copy_(global_scale)
                module.input_global_scale.data.fill_(100)
            ranges = blocks.amin((-1, -2)), blocks.amax((-1, -2))
            scales, zeros = calculate_qparams(*ranges, args, global_scale=global_scale)
            shape = module.weight_scale.shape
            module.weight_scale.data = scales.reshape(shape)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data = zeros.float().round().to(module.weight_zero_point.dtype).reshape(shape)
            if hasattr(module, "input_scale"):
                module.input_scale.data.fill_(0.02)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        tensors = {key: value.clone() for key, value in model.state_dict().items()}
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(model_config("bfloat16", {}), indent=1))
        compressor.update_config(str(folder))
        quantized = [n for n, m in model.named_modules() if getattr(m, "quantization_scheme", None) is not None]
        compressor.decompress_model(model)
        state = model.state_dict()
        version = importlib.metadata.version("compressed-tensors")
        dequantized = {f"{module}.weight": state[f"{module}.weight"] for module in quantized}
        save(folder, f"compressed-tensors {version}", None, tensors, dequantized)


def write_mxfp4(out: Path) -> None:
    """Write a gpt-oss whose experts are packed by compressed-tensors. Its layout and its names are those of OpenAI's
    checkpoints.

    For the hashes, transformers dequantizes the weights. The dequantized weights have the shape [experts, in_features,
    out_features].
    """
    from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    scheme: QuantizationScheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    config = GptOssConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=16, initializer_range=0.3,
        max_position_embeddings=256, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = GptOssForCausalLM(config).to(torch.bfloat16)
    state, dequantized = dict(model.state_dict()), {}
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        weights = state.pop(name).transpose(1, 2)
        blocks, scales = [], []
        for weight in weights:
            groups = weight.unflatten(1, (-1, 32))
            scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
            packed = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
            blocks.append(packed["weight_packed"].unflatten(1, (-1, 16)))
            scales.append(packed["weight_scale"].view(torch.uint8))
        state |= {f"{name}_blocks": torch.stack(blocks), f"{name}_scales": torch.stack(scales)}
        dequantized[name] = convert_moe_packed_tensors(state[f"{name}_blocks"], state[f"{name}_scales"])
    ignored = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ignored}
    values = {key: value for key, value in config.to_diff_dict().items() if key != "transformers_version"}
    values |= {"architectures": ["GptOssForCausalLM"], "dtype": "bfloat16", "quantization_config": quantization}
    version = importlib.metadata.version("compressed-tensors")
    save(out / "mxfp4", f"compressed-tensors {version}", values, state, dequantized)


def split_blocks(weight: Tensor, args: dict[str, Any]) -> Tensor:
    """Split a weight into parts, each of which has one scale. The result has the shape [..., rows, columns]."""
    rows, columns = weight.shape
    height, width = {
        "tensor": (rows, columns), "channel": (1, columns), "group": (1, args.get("group_size")),
        "tensor_group": (1, args.get("group_size")), "block": args.get("block_structure"),
    }[args["strategy"]]  # fmt: skip
    padded = nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    return padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width).transpose(1, 2)


def write_actorder(out: Path) -> None:
    """Write weights in the format pack-quantized. The groups are in the order of the activations. Later releases of
    compressed-tensors no longer write this format."""
    from compressed_tensors.compressors.quantized_compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs

    model = new_model(torch.bfloat16)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
    args = QuantizationArgs(**weights, actorder="group")
    compressor = PackedQuantizationCompressor()
    state, dequantized = dict(model.state_dict()), {}
    for name, linear in linears(model).items():
        weight = state.pop(f"{name}.weight")
        order = activation_order(linear.in_features)
        groups = torch.empty_like(order)
        groups[order] = torch.arange(linear.in_features) // GROUP
        scales = group_parameters(weight, order, True)[0].bfloat16()
        parts = compressor.compress_weight(weight=weight, scale=scales, g_idx=groups.int(), quantization_args=args)
        parts |= {"weight_scale": scales, "weight_g_idx": groups.int()}
        dequantized[f"{name}.weight"] = compressor.decompress_weight(
            compressed_data=dict(parts), quantization_args=args
        )
        state |= {f"{name}.{key}": value for key, value in parts.items()}
    quantization = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args.model_dump(mode="json")}},
        "ignore": ["lm_head"],
    }  # fmt: skip
    version = importlib.metadata.version("compressed-tensors")
    save(
        out / "ct-actorder", f"compressed-tensors {version}", model_config("bfloat16", quantization), state, dequantized
    )


def activation_order(in_features: int) -> Tensor:
    """Return a random order of the input features. GPTQ would compute an order from the activations. Layers with the
    same number of input features get the same order."""
    return torch.randperm(in_features, generator=torch.Generator().manual_seed(in_features))


def group_ranges(weight: Tensor, order: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest weight of each group. `order` divides the input features into groups. Every
    group is treated as if it also contained the weight 0."""
    groups = weight[:, order].float().unflatten(1, (-1, size))
    return groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)


def group_parameters(weight: Tensor, order: Tensor, symmetric: bool, size: int = GROUP) -> tuple[Tensor, Tensor]:
    """Return the scales and the zero points of 4-bit weights. Both are float32 and have the shape [out_features,
    groups]. A zero point is a number from 1 to 15."""
    low, high = group_ranges(weight, order, size)
    if symmetric:
        return torch.maximum(high, -low) / 7, torch.full_like(low, 8)
    scales = (high - low) / 14
    return scales, (-low / scales).round().clamp(1, 14) + 1


def write_autoawq(out: Path, source: Path) -> None:
    """Write a checkpoint in the GEMM version of AWQ."""
    namespace(source, "awq", "awq.modules", "awq.modules.linear", "awq.utils")
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    model = new_model(torch.float16)
    state, dequantized = dict(model.state_dict()), {}
    for name, linear in linears(model).items():
        scales, zeros = group_parameters(linear.weight.data, torch.arange(linear.in_features), False)
        scales = scales.half()
        packed = WQLinear_GEMM.from_linear(
            linear, 4, GROUP, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
        )
        del state[f"{name}.weight"]
        state |= {f"{name}.{key}": value for key, value in packed.state_dict().items()}
        weight = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, GROUP)
        dequantized[f"{name}.weight"] = weight.t()
    quantization = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    config = model_config("float16", quantization | {"modules_to_not_convert": None})
    save(out / "awq", "AutoAWQ 0.2.7.post3", config, state, dequantized)


def gptq_config(**values: Any) -> dict[str, Any]:
    """Return the content of config.json for a GPTQ checkpoint."""
    return model_config("float16", {"quant_method": "gptq", "bits": 4, "group_size": GROUP} | values)


def write_autogptq(out: Path, source: Path) -> None:
    """Write two checkpoints in the first version of the GPTQ format, one with act order and one without. This version
    stores each zero point minus 1."""
    namespace(source, "auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear")
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    for name, symmetric, desc_act in (("gptq", True, False), ("gptq-desc_act", False, True)):
        model = new_model(torch.float16)

        def quantize(linear: nn.Linear, symmetric: bool = symmetric, desc_act: bool = desc_act) -> QuantLinear:
            packed = QuantLinear(4, GROUP, linear.in_features, linear.out_features, True)
            packed.pack(linear, *gptq_parameters(linear, symmetric, desc_act))
            return packed

        def dequantize(packed: QuantLinear) -> Tensor:
            # The product with the identity matrix returns the exact weights.
            return packed(torch.eye(packed.infeatures, dtype=torch.float16)).t()

        # AutoGPTQ adds a bias of zeros to each layer.
        state, dequantized = pack_gptq(model, quantize, dequantize, lm_head=False)
        config = gptq_config(sym=symmetric, desc_act=desc_act, lm_head=False)
        save(out / name, "AutoGPTQ 0.7.1", config, state, dequantized)


def write_gptqmodel(out: Path, source: Path) -> None:
    """Write a checkpoint in the second version of the GPTQ format, and a checkpoint in the first version. The
    checkpoint in the first version has some zero points that are 0. The first version stores each zero point minus 1.
    If a zero point is 0, this subtraction borrows from the next zero point in the same word."""
    for module in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules[module] = MagicMock(__spec__=ModuleSpec(module, None))
    sys.path.insert(0, str(source))
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization.config import FORMAT, QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    for name, version in (("gptq_v2", "gptq_v2"), ("gptq-zeros", "gptq")):
        model = new_model(torch.float16)

        def quantize(linear: nn.Linear) -> TorchLinear:
            size = (linear.in_features, linear.out_features)
            packed = TorchLinear(4, GROUP, False, False, *size, format=FORMAT.GPTQ_V2)
            scales, zeros, groups = gptq_parameters(linear, False, False)
            packed.pack_original(linear, scales, (zeros - 1).clamp(0, 15), groups)
            packed.post_init()
            return packed

        def dequantize(packed: TorchLinear, version: str = version) -> Tensor:
            weight = packed.dequantize_weight().t().clone()
            if version == "gptq":
                convert_gptq_v2_to_v1_format_module(packed, QuantizeConfig(bits=4))
            return weight

        state, dequantized = pack_gptq(model, quantize, dequantize, lm_head=not CONFIG.tie_word_embeddings)
        config = gptq_config(
            sym=False, desc_act=False, lm_head=not CONFIG.tie_word_embeddings, checkpoint_format=version
        )
        save(out / name, "GPTQModel f4c327a17eb3", config, state, dequantized)


def pack_gptq(
    model: nn.Module, quantize: Callable[[nn.Linear], Any], dequantize: Callable[[Any], Tensor], lm_head: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Pack the linear layers of a model. Return the tensors of the model, and the dequantized weights of these
    layers."""
    state, dequantized = dict(model.state_dict()), {}
    for name, linear in linears(model, lm_head).items():
        packed = quantize(linear)
        del state[f"{name}.weight"]
        dequantized[f"{name}.weight"] = dequantize(packed)
        state |= {f"{name}.{key}": value for key, value in packed.state_dict().items()}
    return state, dequantized


def gptq_parameters(linear: nn.Linear, symmetric: bool, desc_act: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scales, the zero points, and the group of each input feature. The scales and the zero points have the
    shape [out_features, groups]."""
    order = activation_order(linear.in_features) if desc_act else torch.arange(linear.in_features)
    groups = torch.empty_like(order)
    groups[order] = torch.arange(linear.in_features) // GROUP
    return *group_parameters(linear.weight.data, order, symmetric), groups.int()


def write_fbgemm(out: Path, source: Path) -> None:
    """Write weights that FBGEMM has quantized row by row. The names are those of transformers' format `fbgemm_fp8`.

    FBGEMM can dequantize only on a GPU. Therefore, this function multiplies the codes by the scales, as FBGEMM's
    documentation specifies.
    """
    names = ("fbgemm_gpu", "fbgemm_gpu.experimental", "fbgemm_gpu.experimental.gemm")
    namespace(source, *names)
    sys.modules[names[-1]].__path__ = [str(source / "fbgemm_gpu/experimental/gemm")]
    from fbgemm_gpu.experimental.gemm.triton_gemm.fp8_gemm import quantize_fp8_row

    model = new_model(torch.bfloat16)
    state, dequantized = dict(model.state_dict()), {}
    for name, linear in linears(model).items():
        values, scales = quantize_fp8_row(linear.weight.data)
        state |= {f"{name}.weight": values, f"{name}.weight_scale": scales[:, None]}
        dequantized[f"{name}.weight"] = (values.float() * scales[:, None]).bfloat16()
    quantization = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    save(out / "fbgemm_fp8", "FBGEMM 71d6f8b229d9", model_config("bfloat16", quantization), state, dequantized)


def write_modelopt(out: Path) -> None:
    """Write one checkpoint in NVFP4 and one in FP8. ModelOpt describes the quantization in config.json, and in
    hf_quant_config.json."""
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from modelopt.torch.quantization.qtensor.fp8_tensor import FP8QTensor
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    for name, algorithm in (("modelopt-nvfp4", "NVFP4"), ("modelopt-fp8", "FP8")):
        model = new_model(torch.bfloat16)
        state, dequantized = dict(model.state_dict()), {}
        for module, linear in linears(model).items():
            weight = f"{module}.weight"
            state[f"{module}.input_scale"] = torch.tensor(0.02)
            if algorithm == "FP8":
                packed, scale = FP8QTensor.quantize(linear.weight.data)
                state |= {weight: packed._quantized_data, f"{weight}_scale": scale.float().reshape(())}
                dequantized[weight] = packed.dequantize(torch.bfloat16, scale=scale.float().reshape(()))
            else:
                packed, scale, tensor_scale = NVFP4QTensor.quantize(linear.weight.data, 16)
                state |= {weight: packed._quantized_data, f"{weight}_scale": scale, f"{weight}_scale_2": tensor_scale}
                scales = {"scale": scale, "double_scale": tensor_scale, "block_sizes": {-1: 16}}
                values = packed.dequantize(torch.float32, **scales).bfloat16()
                # ModelOpt reads the code of -0 as 0.
                dequantized[weight] = torch.copysign(values, linear.weight.data)
            if module.endswith("k_proj"):
                state |= {f"{module}.k_scale": torch.tensor(0.5)}
        details = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*norm*"]}
        details |= {"group_size": 16} if algorithm == "NVFP4" else {}
        document = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": details}
        config = model_config("bfloat16", convert_hf_quant_config_format(document))
        save(out / name, "ModelOpt 0.47.0", config, state, dequantized)
        (out / name / "hf_quant_config.json").write_text(json.dumps(document, indent=1) + "\n")


def write_auto_round(out: Path) -> None:
    """Write one checkpoint in each packing format of AutoRound. One layer has groups of another size."""
    sys.modules["datasets"] = MagicMock(__spec__=ModuleSpec("datasets", None))
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm
    from auto_round_extension.torch.qlinear_torch import QuantLinear
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear as QuantLinearMinusOne

    for name, packing in (("gptq", "auto_gptq"), ("gptqmodel", "gptqmodel"), ("awq", "auto_awq")):
        model = new_model(torch.float16)
        state, dequantized = dict(model.state_dict()), {}
        for module, linear in linears(model).items():
            size = 2 * GROUP if module.endswith("o_proj") else GROUP
            scales, zeros = group_parameters(linear.weight.data, torch.arange(linear.in_features), False, size)
            scales, zeros = scales.half(), zeros.int()
            del state[f"{module}.weight"]
            if name == "awq":
                parts = {"scales": scales.t().contiguous(), "zeros": zeros.t().contiguous()}
                packed = WQLinear_GEMM.from_linear(linear, 4, size, **parts, device="cpu")
                weight = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, size).t()
            else:
                linear_class = QuantLinearMinusOne if name == "gptq" else QuantLinear
                packed = linear_class(4, size, linear.in_features, linear.out_features, False)
                packed.device = torch.device("cpu")
                packed.pack(linear, scales, zeros, None, device="cpu")
                # The product with the identity matrix returns the exact weights.
                weight = packed(torch.eye(linear.in_features, dtype=torch.float16)).t()
            state |= {f"{module}.{key}": getattr(packed, key) for key in ("qweight", "qzeros", "scales")}
            dequantized[f"{module}.weight"] = weight
        extra = {"model.layers.0.self_attn.o_proj": {"group_size": 2 * GROUP}, "lm_head": {"bits": 16}}
        quantization = {
            "quant_method": "auto-round", "packing_format": f"auto_round:{packing}", "bits": 4, "group_size": GROUP,
            "sym": False, "data_type": "int", "block_name_to_quantize": "model.layers", "extra_config": extra,
        }  # fmt: skip
        config = model_config("float16", quantization)
        save(out / f"auto-round-{name}", "AutoRound 0.16.1", config, state, dequantized)


def write_bitsandbytes(out: Path) -> None:
    """Write one checkpoint in NF4 with double quantization, one in FP4 without, and one of LLM.int8()."""
    from bitsandbytes import functional

    for name in ("nf4", "fp4", "int8"):
        model = new_model(torch.bfloat16)
        state, dequantized = dict(model.state_dict()), {}
        for module, linear in linears(model).items():
            weight = f"{module}.weight"
            if name == "int8":
                packed, scales, _ = functional.int8_vectorwise_quant(linear.weight.data.half())
                state |= {weight: packed, f"{module}.SCB": scales, f"{weight}_format": torch.tensor(0).byte()}
                dequantized[weight] = functional.int8_vectorwise_dequant(packed, scales).bfloat16()
            else:
                options = {"compress_statistics": name == "nf4", "quant_type": name}
                packed, quant_state = functional.quantize_4bit(linear.weight.data, **options)
                state[weight] = packed
                state |= {f"{weight}.{key}": value for key, value in quant_state.as_dict(packed=True).items()}
                dequantized[weight] = functional.dequantize_4bit(packed, quant_state)
        quantization = {
            "quant_method": "bitsandbytes", "load_in_4bit": name != "int8", "load_in_8bit": name == "int8",
            "llm_int8_skip_modules": ["lm_head"], "llm_int8_threshold": 6.0, "llm_int8_has_fp16_weight": False,
        }  # fmt: skip
        if name != "int8":
            quantization |= {"bnb_4bit_quant_type": name, "bnb_4bit_use_double_quant": name == "nf4"}
            quantization |= {"bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8"}
        config = model_config("bfloat16", quantization)
        save(out / f"bitsandbytes-{name}", "bitsandbytes 0.50.2", config, state, dequantized)


def namespace(source: Path, *packages: str) -> None:
    """Make packages importable without their `__init__` files."""
    for package in packages:
        module = types.ModuleType(package)
        module.__path__ = [str(source.joinpath(*package.split(".")))]
        sys.modules[package] = module


def main() -> None:
    """Run one writer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("writer")
    parser.add_argument("out", type=Path)
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument(
        "--model", help="folder of the Llama to quantize, for example examples/models/tiny (default: a random model)"
    )
    arguments = parser.parse_args()
    if arguments.model:
        global CONFIG, MODEL
        CONFIG, MODEL = LlamaConfig.from_pretrained(arguments.model), arguments.model
    writers: dict[str, Callable[..., None]] = {
        "compressed-tensors": write_compressed_tensors, "mxfp4": write_mxfp4, "actorder": write_actorder,
        "autoawq": write_autoawq, "autogptq": write_autogptq, "gptqmodel": write_gptqmodel, "fbgemm": write_fbgemm,
        "modelopt": write_modelopt, "auto-round": write_auto_round, "bitsandbytes": write_bitsandbytes,
    }  # fmt: skip
    with torch.inference_mode():
        writers[arguments.writer](arguments.out, *([arguments.source] if arguments.source else []))


if __name__ == "__main__":
    main()
