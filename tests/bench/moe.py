# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts with 0.5B active parameters beside the dense model of that size, with random weights.

    python tests/bench/moe.py
    python tests/bench/moe.py --adapters 16

The dense model has the shape of Qwen2.5-0.5B. The other one has 16 experts of half its intermediate size, of which each
token uses 2. Random routers give every expert about as many tokens. Both engines are in one process (8 GiB), and their
runs alternate. The fastest run of each counts, because other work on the machine only makes runs slower.

With --adapters, the mixture with that many adapters on experts, routers and attention is compared with its own base (10
GiB with 16 adapters of rank 16).
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from workload import Workload

from quire_engine import LLM, LoRARequest, SamplingParams
from quire_engine.models import base
from quire_engine.weights.param_shard import LoadTarget, unsharded

_COMMON: dict[str, Any] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 151936,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 2432, "norm_topk_prob": True}
CONFIGS = {
    "dense": _COMMON | {"architectures": ["Qwen3ForCausalLM"]},
    "moe": _COMMON | {"architectures": ["Qwen3MoeForCausalLM"]} | _EXPERTS,
}


def _fill_randomly(folder: Path, tensors: Iterable[tuple[str, LoadTarget]], **_: Any) -> None:
    """Fill with parts of one pool of random numbers, because drawing billions takes longer than the benchmark. Every
    square linear keeps the deviation of its inputs."""
    pool = torch.randn(1 << 24).bfloat16() * _COMMON["hidden_size"] ** -0.5
    with torch.inference_mode():
        for index, (name, target) in enumerate(tensors):
            tensor = unsharded(target).tensor
            if "norm" in name:
                tensor.fill_(1.0)
                continue
            for row, part in enumerate(tensor.flatten().split(1 << 20)):
                start = (index * 7919 + row * 104729) % (len(pool) - len(part))
                part.copy_(pool[start : start + len(part)])


def _load(name: str, folder: Path, **lora: Any) -> LLM:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    with mock.patch.object(base, "load_weights", _fill_randomly):
        return LLM(
            folder,
            dtype="bfloat16",
            max_model_len=512,
            max_num_seqs=64,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=1 << 29,
            **lora,
        )


def _make_adapter(folder: Path, seed: int, rank: int) -> LoRARequest:
    """Write an adapter of experts, routers and attention in the format of PEFT."""
    shape = CONFIGS["moe"]
    hidden, experts, inner = shape["hidden_size"], shape["num_experts"], shape["moe_intermediate_size"]
    heads, kv_heads = (shape[f"num_{kind}_heads"] * shape["head_dim"] for kind in ("attention", "key_value"))
    attention = {"q_proj": (hidden, heads), "k_proj": (hidden, kv_heads), "v_proj": (hidden, kv_heads)}
    sizes = {f"self_attn.{name}": size for name, size in (attention | {"o_proj": (heads, hidden)}).items()}
    sizes |= {"mlp.gate": (hidden, experts)}
    of_experts = {"mlp.experts.base_layer": (hidden, 2 * inner), "mlp.experts": (inner, hidden)}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, (d_in, d_out) in (sizes | of_experts).items():
            ranks = rank * (experts if name in of_experts else 1)
            for half, size, spread in (("A", (ranks, d_in), d_in**-0.5), ("B", (d_out, ranks), rank**-0.5 / 4)):
                values = torch.randn(size, generator=generator).bfloat16() * spread
                tensors[f"base_model.model.model.layers.{layer}.{name}.lora_{half}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    parameters = ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_parameters": parameters}
    config |= {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(folder.name, seed + 1, str(folder))


def _run(llm: LLM, workload: Workload, run: int, adapters: Sequence[LoRARequest] = ()) -> float:
    """Return the output tokens per second of one run. Requests use the adapters in turn."""
    requests = workload.requests(run)
    params = [SamplingParams(temperature=0.0, max_tokens=r.num_output_tokens, ignore_eos=True) for r in requests]
    prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
    start = time.perf_counter()
    lora = [adapters[i % len(adapters)] for i in range(len(prompts))] if adapters else None
    llm.generate(prompts, params, use_tqdm=False, lora_request=lora)
    return sum(request.num_output_tokens for request in requests) / (time.perf_counter() - start)


def _compare_adapters(args: argparse.Namespace, workload: Workload, warmup: Workload) -> None:
    """Print the speed of the mixture with adapters and without, in one engine, and the ratio."""
    with tempfile.TemporaryDirectory() as scratch:
        lora = {"enable_lora": True, "lora_experts": True, "max_loras": args.adapters, "max_lora_rank": args.rank}
        llm = _load("moe", Path(scratch, "moe"), quantization=args.quantization, **lora)
        adapters = [_make_adapter(Path(scratch, f"adapter-{i}"), i, args.rank) for i in range(args.adapters)]
        # Loads all adapters into their slots.
        _run(llm, Workload(args.adapters, (16, 32), (4, 8), 40_000, seed=1), 0, adapters)
        _run(llm, warmup, 0)
        ratios = []
        for run in range(args.runs):
            base, adapted = _run(llm, workload, run), _run(llm, workload, run, adapters)
            ratios.append(adapted / base)
            print(f"run={run} base={base:.1f} adapters={adapted:.1f} ratio={ratios[-1]:.2f}", flush=True)
    print(f"adapters/base={sorted(ratios)[len(ratios) // 2]:.2f} adapters={args.adapters} rank={args.rank}")


def main() -> None:
    """Print the speed of both models and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64, help="requests of a run (default 64)")
    parser.add_argument(
        "--prompt-tokens", type=int, nargs=2, default=(32, 256), help="bounds of the number (default 32 256)"
    )
    parser.add_argument(
        "--output-tokens", type=int, nargs=2, default=(32, 128), help="bounds of the number (default 32 128)"
    )
    parser.add_argument("--runs", type=int, default=2, help="runs of each model (default 2)")
    parser.add_argument("--adapters", type=int, default=0, help="compare this number of adapters with the base")
    parser.add_argument("--rank", type=int, default=16, help="LoRA rank of the adapters (default 16)")
    parser.add_argument("--quantization", choices=("int8", "int4"), help="quantize the mixture at load")
    args = parser.parse_args()
    workload = Workload(args.requests, tuple(args.prompt_tokens), tuple(args.output_tokens), 40_000, seed=0)
    warmup = Workload(4, (16, 32), (4, 8), 40_000, seed=1)
    if args.adapters:
        _compare_adapters(args, workload, warmup)
        return
    with tempfile.TemporaryDirectory() as scratch:
        llms = {name: _load(name, Path(scratch, name)) for name in CONFIGS}
        for llm in llms.values():
            _run(llm, warmup, 0)
        speeds: dict[str, list[float]] = {name: [] for name in llms}
        for run in range(args.runs):
            for name, llm in llms.items():
                speeds[name].append(_run(llm, workload, run))
                print(f"{name} run={run} tokens_per_s={speeds[name][-1]:.1f}", flush=True)
    print(f"moe/dense={max(speeds['moe']) / max(speeds['dense']):.2f} requests={args.requests}")


if __name__ == "__main__":
    main()
