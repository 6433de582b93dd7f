# SPDX-License-Identifier: Apache-2.0
"""The builds of the compiled CPU kernels that this processor can run, beside the AVX2 build: the time of each kernel.

    python tests/bench/builds.py

The builds alternate on the same tensors, one thread. The number is the median, over all rounds, of the AVX2 build's
processor time divided by that of the other build in the same round, so that other work on the machine counts little.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from quire_engine.worker.device import retain_freed_memory
from quire_kernels import (
    ExpertWeights,
    Mamba2Params,
    Routing,
    argmax_first,
    build_attention_metadata,
    build_state_batch,
    choose_experts,
    cpu_build,
    cpu_native,
    fused_experts,
    gated_delta_rule,
    linear,
    mamba2_recurrence,
    pack_experts,
    pack_weight,
    paged_attention,
    quantize_experts,
    quantize_weight,
    rms_norm,
    sample,
    silu_mul,
)

CPU = torch.device("cpu")
Case = Callable[[], Callable[[], object]]
"""Prepares weights in the layout of the build that is loaded, and returns the call that is timed."""
_HIDDEN, _INNER = 896, 2432


@contextmanager
def loaded(path: Path) -> Iterator[None]:
    """Use the library at `path`."""
    library = cpu_native._bind(path)
    with mock.patch.object(cpu_native, "load_library", lambda: library):
        yield


def _random(*size: int) -> Tensor:
    return torch.randn(size).bfloat16() * size[-1] ** -0.5


def _linear(quantization: str | None, num_tokens: int) -> Case:
    """24 layers exceed the caches, like those of a model."""
    weights, x = [_random(3072, 576) for _ in range(24)], torch.randn(num_tokens, 576).bfloat16()

    def prepare() -> Callable[[], object]:
        packed = [quantize_weight(weight, quantization) if quantization else pack_weight(weight) for weight in weights]
        return lambda: [linear(x, weight, None) for weight in packed]

    return prepare


def _mlp(num_tokens: int) -> Case:
    """The dense MLP of as many parameters as a token uses of `_experts`. 8 layers exceed the caches."""
    layers = [(_random(4 * _INNER, _HIDDEN), _random(_HIDDEN, 2 * _INNER)) for _ in range(8)]
    x = torch.randn(num_tokens, _HIDDEN).bfloat16()

    def prepare() -> Callable[[], object]:
        packed = [(pack_weight(gate_up), pack_weight(down)) for gate_up, down in layers]
        return lambda: [linear(silu_mul(linear(x, gate_up, None)), down, None) for gate_up, down in packed]

    return prepare


def _experts(quantization: str | None, num_tokens: int) -> Case:
    """16 experts of tests/bench/moe.py, of which each token uses 2."""
    weights = ExpertWeights(_random(16, 2 * _INNER, _HIDDEN), _random(16, _HIDDEN, _INNER), None, None, "silu")
    x = torch.randn(num_tokens, _HIDDEN).bfloat16()
    choice = choose_experts(torch.randn(num_tokens, 16), Routing(2))

    def prepare() -> Callable[[], object]:
        packed = quantize_experts(weights, quantization) if quantization else pack_experts(weights)
        return lambda: fused_experts(x, *choice, packed)

    return prepare


def _attention(starts: list[int], lengths: list[int]) -> Case:
    """9 heads on 3 KV heads of 64."""
    size = -(-(starts[0] + lengths[0]) // 16)
    cache = torch.randn(2, len(starts) * size, 16, 3, 64).bfloat16()
    tables = torch.randperm(len(starts) * size).view(len(starts), size)
    batch = build_attention_metadata(starts, lengths, tables, cache, CPU)
    queries = torch.randn(sum(lengths), 9, 64).bfloat16()
    return lambda: lambda: paged_attention(queries, cache, batch, 0.125)


def _gated_delta(lengths: list[int]) -> Case:
    """16 heads of 128, as in Qwen3.5-0.8B."""
    tokens = sum(lengths)
    batch = build_state_batch(list(range(len(lengths))), lengths, CPU)
    states = torch.randn(len(lengths), 16, 128, 128) * 0.1
    qkv, a, b = torch.randn(tokens, 3 * 16 * 128).bfloat16(), *(torch.randn(tokens, 16).bfloat16() for _ in range(2))
    a_log, bias = torch.rand(16), torch.rand(16)
    return lambda: lambda: gated_delta_rule(qkv, a, b, a_log, bias, states, batch)


def _mamba2(lengths: list[int]) -> Case:
    """48 heads of 64 with a state of 128, as in Granite 4.0 H 1B."""
    tokens = sum(lengths)
    batch = build_state_batch(list(range(len(lengths))), lengths, CPU)
    states = torch.randn(len(lengths), 48, 128, 64) * 0.1
    xbc, dt = torch.randn(tokens, 48 * 64 + 2 * 128).bfloat16(), torch.randn(tokens, 48).bfloat16()
    params = Mamba2Params(torch.rand(48), torch.rand(48), torch.rand(48), 1)
    return lambda: lambda: mamba2_recurrence(xbc, dt, params, states, batch)


def _pointwise() -> Case:
    x, weight, gate_up = torch.randn(64, 576).bfloat16(), torch.ones(576).bfloat16(), torch.randn(64, 3072).bfloat16()
    return lambda: lambda: (rms_norm(x, weight, 1e-5), silu_mul(gate_up))


def _sample(temperature: float) -> Case:
    logits, positions = torch.randn(64, 49152).bfloat16(), torch.arange(64)
    if temperature == 0:
        return lambda: lambda: argmax_first(logits)
    off = torch.zeros(64, dtype=torch.int64), torch.ones(64), torch.zeros(64)
    return lambda: lambda: sample(logits, torch.full((64,), temperature), *off, positions, positions, False, False)


CASES: dict[str, Callable[[], Case]] = {
    **{
        f"linear {kind or 'bfloat16'}, {rows} rows": lambda kind=kind, rows=rows: _linear(kind, rows)
        for kind in (None, "int8", "int4", "fp8")
        for rows in (1, 8, 64)
    },
    **{
        f"experts {kind or 'bfloat16'}, {rows} tokens": lambda kind=kind, rows=rows: _experts(kind, rows)
        for kind in (None, "int4")
        for rows in (1, 64)
    },
    "dense MLPs of the experts, 64 tokens": lambda: _mlp(64),
    "attention, 64 sequences of 256": lambda: _attention([255] * 64, [1] * 64),
    "attention, prompt of 512": lambda: _attention([0], [512]),
    "gated delta, 64 sequences": lambda: _gated_delta([1] * 64),
    "gated delta, prompt of 512": lambda: _gated_delta([512]),
    "mamba2, 64 sequences": lambda: _mamba2([1] * 64),
    "mamba2, prompt of 512": lambda: _mamba2([512]),
    "norm and silu, 64 rows": _pointwise,
    "greedy, 64 rows of 49,152": lambda: _sample(0),
    "sampling, 64 rows of 49,152": lambda: _sample(0.8),
}


def measure(case: Case, builds: dict[str, Path], rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of processor time of each build in each round."""
    calls, times = {}, {name: [] for name in builds}
    for name, path in builds.items():
        with loaded(path):
            calls[name] = case()
            calls[name]()
    for _ in range(rounds):
        for name, path in builds.items():
            with loaded(path):
                start = time.thread_time()
                calls[name]()
                times[name].append((time.thread_time() - start) * 1e3)
    return times


def main() -> None:
    """Print a line for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", default="", help="kernels whose name contains this text")
    parser.add_argument("--library", type=Path, nargs="*", default=[], help="further libraries")
    arguments = parser.parse_args()
    supported = [
        each for each in cpu_build.instruction_sets(platform.machine()) if each.cpu_flags <= cpu_build.cpu_flags()
    ]
    builds = {each.name: cpu_build.build(each) for each in reversed(supported)}
    builds |= {path.stem[-12:]: path for path in arguments.library}
    torch.set_num_threads(1)
    retain_freed_memory()
    base, *others = builds
    print(f"{'':<38}{base + ' ms':>12}" + "".join(f"{name:>14}" for name in others))
    for name, prepare in CASES.items():
        if arguments.only not in name:
            continue
        with torch.inference_mode():
            times = measure(prepare(), builds, arguments.rounds)
        ratios = [statistics.median(a / b for a, b in zip(times[base], times[other], strict=True)) for other in others]
        numbers = "".join(f"{ratio:14.2f}" for ratio in ratios)
        print(f"{name:<38}{statistics.median(times[base]):12.2f}{numbers}", flush=True)


if __name__ == "__main__":
    main()
