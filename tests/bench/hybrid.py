# SPDX-License-Identifier: Apache-2.0
"""Layers with states beside what the bytes of the states allow, beside transformers, and beside a dense model.

    python tests/bench/hybrid.py [--model mamba2] [--vllm-python ~/vllm/bin/python]

The hybrid model has the layers of Qwen3.5-0.8B: three of four have Gated DeltaNet with 16 heads and a state of 1 MiB
per sequence. With `--model mamba2`, it has those of Granite 4.0 H 1B: of ten layers, nine have Mamba-2 with 48 heads of
64 features, one group, and a state of 1.5 MiB per sequence. All weights are random. The script prints these ratios:

- decode/allowed: the speed of a step of 64 sequences, relative to what its bytes allow. That is the time of the same
  step without convolutions and recurrences, plus the time in which this machine reads and writes all states once.
- decode/eager: the same step, relative to transformers without compilation, in bfloat16.
- prefill/dense: a prompt of 2,000 tokens, relative to a dense Qwen3 or Granite 4 with as many parameters.
- decode/vllm and prefill/vllm: the same step and prompt, relative to vLLM (`--vllm-python`, see install_vllm.sh).

The fastest of several runs counts, because other work on the machine only makes runs slower.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from child import ChildFailed, ChildProcess
from random_weights import patch_weight_loading

from quire_engine import LLM, SamplingParams
from quire_engine.models.layers import gated_delta_net, mamba2

_VOCAB = 32000
_COMMON: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_STATE = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
_INTERMEDIATE = 3584
_GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "num_local_experts": 0,
    "embedding_multiplier": 12.0,
    "logits_scaling": 6.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0078125,
    "mamba_n_heads": 48,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_head": 64,
}
_SHARED_INTERMEDIATE = 4096


def mamba2_configs(num_layers: int) -> dict[str, dict[str, Any]]:
    """Return the config.json of the model with Mamba-2, and that of a dense model with as many parameters."""
    hidden = _GRANITE["hidden_size"]
    mamba = hidden * (3 * 3072 + 2 * 128 + 48)
    attention = hidden * 128 * 2 * (_GRANITE["num_attention_heads"] + _GRANITE["num_key_value_heads"])
    extra = 9 * (mamba - attention) // 10 // (3 * hidden) // 64 * 64
    kinds = ["full_attention" if i % 10 == 5 else "linear_attention" for i in range(num_layers)]
    common = _GRANITE | {"num_hidden_layers": num_layers}
    return {
        "hybrid": common | {"layer_types": kinds, "shared_intermediate_size": _SHARED_INTERMEDIATE},
        "dense": common
        | {"layer_types": ["full_attention"] * num_layers, "shared_intermediate_size": _SHARED_INTERMEDIATE + extra},
    }


def gated_delta_configs(num_layers: int) -> dict[str, dict[str, Any]]:
    """Return the config.json of the hybrid model, and that of a dense model with as many parameters."""
    common = _COMMON | {"num_hidden_layers": num_layers}
    hidden, head = _COMMON["hidden_size"], _COMMON["head_dim"]
    attention = hidden * head * 2 * (_COMMON["num_attention_heads"] + _COMMON["num_key_value_heads"])
    gated = attention + hidden * head * _COMMON["num_attention_heads"]
    delta = hidden * (2048 * 5 + 2 * 16)
    difference = (3 * delta + gated) // 4 - attention
    return {
        "hybrid": common
        | _STATE
        | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "intermediate_size": _INTERMEDIATE},
        "dense": common
        | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            # A multiple of 64, as in published models.
            "intermediate_size": _INTERMEDIATE + difference // (3 * hidden) // 64 * 64,
        },
    }


def _settings(state_dtype: str) -> dict[str, Any]:
    """Return arguments that LLM of this engine and of vLLM have in common."""
    return {
        "dtype": "bfloat16",
        "max_model_len": 2304,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 1 << 29,
        "mamba_ssm_cache_dtype": state_dtype,
    }


def _load(config: dict[str, Any], folder: Path, state_dtype: str) -> LLM:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with patch_weight_loading():
        return LLM(folder, **_settings(state_dtype))


def _generate(llm: LLM, num_prompts: int, num_tokens: int, num_output: int) -> float:
    """Return the seconds for these prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    prompts = [{"prompt_token_ids": torch.randint(0, _VOCAB, (num_tokens,)).tolist()} for _ in range(num_prompts)]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def _decode_step(llm: LLM, num_seqs: int, num_steps: int, num_runs: int) -> float:
    """Return the seconds of a step that decodes `num_seqs` sequences: of longer outputs minus outputs of one token."""
    long, short = (min(_generate(llm, num_seqs, 2, length) for _ in range(num_runs)) for length in (num_steps + 1, 1))
    return (long - short) / num_steps


def _without_states(llm: LLM, num_seqs: int, num_steps: int, num_runs: int) -> float:
    """Return the seconds of a step without convolutions and recurrences."""

    def skip_rule(qkv: torch.Tensor, *_: Any) -> torch.Tensor:
        return qkv[:, : 16 * 128].unflatten(1, (16, 128)).contiguous()

    def skip_recurrence(xbc: torch.Tensor, *_: Any) -> torch.Tensor:
        return xbc[:, : 48 * 64].unflatten(1, (48, 64)).contiguous()

    with (
        mock.patch.object(gated_delta_net, "short_convolution", lambda x, *_: x),
        mock.patch.object(gated_delta_net, "gated_delta_rule", skip_rule),
        mock.patch.object(mamba2, "short_convolution", lambda x, *_: x),
        mock.patch.object(mamba2, "mamba2_recurrence", skip_recurrence),
    ):
        return _decode_step(llm, num_seqs, num_steps, num_runs)


def _vllm_seconds(folder: Path, args: argparse.Namespace) -> tuple[float, float]:
    """Return the seconds of a step and of a prompt of 2,000 tokens in vLLM, which draws weights of its own.

    Raises:
        ChildFailed: vLLM does not serve this model; the message has its log.
    """
    settings = _settings(args.state_dtype) | {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True}
    with ChildProcess("vllm", "vllm_offline.py", settings, folder.parent, args.vllm_python) as vllm:

        def seconds(num_prompts: int, num_tokens: int, num_output: int) -> float:
            prompts = torch.randint(0, _VOCAB, (num_prompts, num_tokens)).tolist()
            requests = [(prompt, num_output) for prompt in prompts]
            return vllm.call("run", requests=requests, offsets=None)["seconds"]

        seconds(2, 70, 4)
        long, short = (
            _fastest(lambda length=length: seconds(args.sequences, 2, length), args.runs)
            for length in (args.steps + 1, 1)
        )
        return (long - short) / args.steps, _fastest(lambda: seconds(1, 2000, 1), args.runs)


def _copy_seconds(num_bytes: int) -> float:
    """Return the seconds in which all threads read `num_bytes` and write them back, in place."""
    data = torch.ones(num_bytes // 4)
    return _fastest(lambda: _timed(lambda: data.mul_(1.0)), 5)


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _fastest(run: Callable[[], float], num_runs: int) -> float:
    return min(run() for _ in range(num_runs))


@torch.inference_mode()
def _eager_step(config: dict[str, Any], num_seqs: int, num_steps: int) -> float:
    """Return the seconds of a step of transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key not in ("architectures", "torch_dtype")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).to(torch.bfloat16).eval()
    output = model(torch.randint(0, _VOCAB, (num_seqs, 16)), use_cache=True)
    name = "past_key_values" if "past_key_values" in output else "cache"
    seconds = []
    for _ in range(num_steps):
        tokens = output.logits[:, -1:].argmax(-1)
        start = time.perf_counter()
        output = model(tokens, use_cache=True, **{name: output[name]})
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gated-delta", "mamba2"), default="gated-delta")
    parser.add_argument("--layers", type=int, help="layers of each model (default 8, or 10 with --model mamba2)")
    parser.add_argument("--state-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--sequences", type=int, default=64, help="decoding sequences (default 64)")
    parser.add_argument("--steps", type=int, default=32, help="steps of a run (default 32)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each measurement (default 3)")
    parser.add_argument("--vllm-python", metavar="PATH", help="the Python of an environment with vLLM's CPU build")
    args = parser.parse_args()
    is_mamba, num_seqs = args.model == "mamba2", args.sequences
    num_layers = args.layers or (10 if is_mamba else 8)
    shapes = (mamba2_configs if is_mamba else gated_delta_configs)(num_layers)
    with tempfile.TemporaryDirectory() as scratch:
        llms = {name: _load(config, Path(scratch, name), args.state_dtype) for name, config in shapes.items()}
        for llm in llms.values():
            _generate(llm, 2, 70, 4)
        step, rest = (
            measure(llms["hybrid"], num_seqs, args.steps, args.runs) for measure in (_decode_step, _without_states)
        )
        prefill = {name: _fastest(lambda llm=llm: _generate(llm, 1, 2000, 1), args.runs) for name, llm in llms.items()}
        if args.vllm_python:
            try:
                vllm_step, vllm_prefill = _vllm_seconds(Path(scratch, "hybrid"), args)
                print(f"vllm_step_s={vllm_step:.4f} vllm_prefill_s={vllm_prefill:.3f}")
                print(f"decode/vllm={vllm_step / step:.2f} prefill/vllm={vllm_prefill / prefill['hybrid']:.2f}")
            except ChildFailed as error:
                print(error)
    layer_types = shapes["hybrid"].get("layer_types")
    num_state_layers = layer_types.count("linear_attention") if layer_types else num_layers - num_layers // 4
    elements = 48 * 128 * 64 if is_mamba else 16 * 128 * 128
    states = _copy_seconds(num_seqs * num_state_layers * elements * (4 if args.state_dtype == "float32" else 2))
    eager = _eager_step(shapes["hybrid"], num_seqs, 4)
    print(f"step_s={step:.4f} without_states_s={rest:.4f} states_s={states:.4f} eager_s={eager:.4f}")
    print(f"prefill_hybrid_s={prefill['hybrid']:.3f} prefill_dense_s={prefill['dense']:.3f}")
    print(
        f"decode/allowed={(rest + states) / step:.2f} decode/eager={eager / step:.2f} "
        f"prefill/dense={prefill['dense'] / prefill['hybrid']:.2f} tokens/s={num_seqs / step:.0f} "
        f"sequences={num_seqs} layers={num_layers}"
    )


if __name__ == "__main__":
    main()
