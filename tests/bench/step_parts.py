# SPDX-License-Identifier: Apache-2.0
"""The parts of a decoding step on a CPU and their times: products, attention, norms, rotation, sampler, planning.

    python tests/bench/step_parts.py --sequences 64 --context 72

The step is a real one of the 135M shape with random weights. Its layers are one compiled call. To time their parts,
the same compiled functions are called one by one in the same order, on the same tensors; the row "layers, one call"
shows how little this adds. All rows are the mean of the fastest half of the steps, so that other work on the machine
counts less.
"""

import argparse
import ctypes
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

import torch  # noqa: E402
from random_checkpoint import SHAPES, cached_checkpoint  # noqa: E402

from quire_engine import LLM, SamplingParams  # noqa: E402
from quire_engine.worker.sampling import sampler as sampler_module  # noqa: E402
from quire_kernels import cpu_native, fused_decoder, sample  # noqa: E402
from quire_spec.protocol.framing import encode_frame  # noqa: E402
from quire_spec.protocol.messages import SequenceRequest  # noqa: E402

Times = defaultdict[str, float]


class PartTimer:
    """Adds the seconds of calls to the current step, by part."""

    def __init__(self) -> None:
        self.steps: list[Times] = []
        self._inner = 0.0

    def begin_step(self) -> None:
        """Start a new step."""
        self.steps.append(defaultdict(float))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part, without the parts inside it."""
        outer, self._inner = self._inner, 0.0
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.steps[-1][name] += seconds - self._inner
            self._inner = outer + seconds

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Time all calls of a method as a part."""
        original: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return original(*args, **kwargs)

        setattr(owner, method, timed)


def run_layers(timer: PartTimer, decoder: Any, hidden: Any, step: Any, caches: Any, workspace: Any) -> None:
    """Call the functions of `quire_decode` one by one. bfloat16 weights, no adapters, no norms of queries and keys."""
    library, item = cpu_native.get_library(), 2
    size, heads = decoder._layers_struct, decoder._heads
    rows, width = step.tokens, heads.num_heads * heads.head_dim

    def timed(name: str, function: str, *args: Any) -> None:
        with timer.part(name):
            getattr(library, function)(*args)

    for index in range(size.num_layers):
        layer = decoder._layer_structs[index]
        ldq, gated = layer.qkv.outputs, layer.gate_up.outputs // 2
        qkv, attended = workspace, workspace + item * rows * ldq
        normed = attended + item * rows * width
        gate_up = normed + item * rows * max(size.hidden, gated)
        keys, values = caches[2 * index], caches[2 * index + 1]
        cache = (size.heads, size.kv_heads, size.head_dim)
        timed("norms", "quire_rms_norm", hidden, size.hidden, layer.attention_norm, normed, rows, size.hidden, size.eps)
        linear = ("products: q, k, v", layer.qkv, normed, size.hidden, qkv, 0)
        _multiply(timed, rows, *linear)
        positions = (step.cos, step.sin, keys, values, step.addresses, rows)
        timed("rotation and KV write", "quire_rotate_write", qkv, ldq, *positions, *cache, step.rotary_dim)
        spans = (step.tables, step.max_blocks, step.starts, step.contexts, attended, step.spans)
        numbers = (step.block_size, size.scale, layer.window, size.softcap, getattr(layer, "sinks", None))
        timed("attention", "quire_attention", qkv, ldq, keys, values, *spans, *cache, *numbers)
        _multiply(timed, rows, "products: o", layer.output, attended, width, hidden, 1)
        timed("norms", "quire_rms_norm", hidden, size.hidden, layer.mlp_norm, normed, rows, size.hidden, size.eps)
        _multiply(timed, rows, "products: gate, up", layer.gate_up, normed, size.hidden, gate_up, 0)
        timed("silu", "quire_silu_mul", gate_up, normed, rows, gated)
        _multiply(timed, rows, "products: down", layer.down, normed, gated, hidden, 1)


def _multiply(
    timed: Callable[..., None], rows: int, name: str, product: Any, x: int, inputs: int, out: int, add: int
) -> None:
    timed(name, "quire_linear", x, inputs, product.packed, product.bias, out, rows, product.outputs, inputs, add)


class SplitLibrary:
    """Replaces the call of all layers: times it as one call, or splits it."""

    def __init__(self, timer: PartTimer, decoder: Any) -> None:
        self.is_split = False
        self._timer = timer
        self._decoder = decoder

    def quire_decode(self, hidden: int, layers: int, step: int, caches: int, workspace: int) -> None:
        """See csrc/decoder.cpp."""
        if not self.is_split:
            with self._timer.part("layers, one call"):
                cpu_native.get_library().quire_decode(hidden, layers, step, caches, workspace)
            return
        pointers = ctypes.cast(caches, ctypes.POINTER(ctypes.c_void_p))
        run_layers(self._timer, self._decoder, hidden, fused_decoder._Step.from_address(step), pointers, workspace)


class _CpuNative:
    """The module `cpu_native` with another library."""

    def __init__(self, library: SplitLibrary) -> None:
        self._library = library

    def get_library(self) -> SplitLibrary:
        """See cpu_native."""
        return self._library

    def __getattr__(self, name: str) -> Any:
        return getattr(cpu_native, name)


def instrument(timer: PartTimer, llm: LLM) -> SplitLibrary:
    """Time the parts of the steps of an engine."""
    executor = llm.engine._step_executor
    scheduler, runner = executor._scheduler, executor._runner
    model, sampler = runner._model, runner._sampler
    timer.wrap(scheduler, "schedule", "planning")
    timer.wrap(scheduler, "update_from_step", "planning")
    timer.wrap(runner, "_build_input", "inputs")
    timer.wrap(runner, "execute", "rest of the runner")
    timer.wrap(model, "compute_logits", "products: logits")
    timer.wrap(sampler, "sample", "sampler")
    timer.wrap(model, "forward_layers", "embedding, angles")
    library = SplitLibrary(timer, model.fused_decoder)
    fused_decoder.cpu_native = _CpuNative(library)  # type: ignore[assignment]
    return library


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--context", type=int, default=72, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--temperature", type=float, default=0.8)
    arguments = parser.parse_args()
    llm = LLM(
        model=str(cached_checkpoint(arguments.shape)),
        max_model_len=1024,
        max_num_seqs=arguments.sequences,
        kv_cache_memory_bytes=2**30,
        enable_prefix_caching=False,
    )
    timer = PartTimer()
    library = instrument(timer, llm)
    rng = random.Random(1)
    params = SamplingParams(temperature=arguments.temperature, max_tokens=1000, ignore_eos=True, seed=1)
    for index in range(arguments.sequences):
        prompt = [rng.randrange(2, 40_000) for _ in range(arguments.context)]
        llm.engine.add(SequenceRequest(index, prompt, params))
    timer.begin_step()
    while llm.engine.stats().num_running < arguments.sequences or len(timer.steps) < 8:
        timer.begin_step()
        llm.engine.step()
    # Three kinds of steps alternate, so that each has the same load: as usual, split, and with torch's sampler.
    times: dict[str, list[Times]] = {"whole": [], "split": [], "torch": []}
    for index in range(arguments.steps):
        kind = list(times)[index % len(times)]
        library.is_split = kind == "split"
        sampler_module.sample = sample.reference if kind == "torch" else sample
        timer.begin_step()
        with timer.part("engine: stats, results"):
            result = llm.engine.step()
        assert len(result.results) == arguments.sequences and not result.results[0].error, result.results[:1]
        with timer.part("message to the text process"):
            encode_frame(result)
        times[kind].append(timer.steps[-1])
    whole, split, torch_sampler = (_mean_of_fastest(steps) for steps in times.values())
    total = sum(whole.values())
    print(f"sequences={arguments.sequences} context={arguments.context} threads={torch.get_num_threads()}")
    print(f"{'part':32} {'ms':>8} {'%':>6}")
    for name, seconds in sorted(split.items(), key=lambda entry: -entry[1]):
        print(f"{name:32} {1000 * seconds:8.2f} {100 * seconds / sum(split.values()):6.1f}")
    print(f"{'step, layers split':32} {1000 * sum(split.values()):8.2f}")
    print(f"{'step, layers in one call':32} {1000 * total:8.2f}")
    print(f"{'layers in one call':32} {1000 * whole['layers, one call']:8.2f}")
    print(f"{'step, sampler of torch':32} {1000 * sum(torch_sampler.values()):8.2f}")
    print(f"{'sampler of torch':32} {1000 * torch_sampler['sampler']:8.2f}")


def _mean_of_fastest(steps: list[Times]) -> dict[str, float]:
    """Return the mean of each part over the fastest half of steps."""
    fastest = sorted(steps, key=lambda times: sum(times.values()))[: max(1, len(steps) // 2)]
    return {name: statistics.mean(times[name] for times in fastest) for name in fastest[0]}


if __name__ == "__main__":
    main()
