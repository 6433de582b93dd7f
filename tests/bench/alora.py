# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of an adapter with an invocation (aLoRA) after tokens that the base model has cached.

    OMP_NUM_THREADS=2 python tests/bench/alora.py

Random weights of the 135M shape, bfloat16. `base cached`: the base model has answered the prefix; then comes the
prefix, at most 64 more tokens with the invocation, and the adapter answers. `adapter, nothing cached`: the same number
of tokens that occur for the first time. `plain LoRA`: an adapter without an invocation after the base model's answer,
which shares no block. Rounds alternate, and medians are compared. The bar of the first ratio is 0.1.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import random_adapters
import random_checkpoint
from tier import Bench

from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.protocol.messages import SequenceRequest

INVOCATION = [3, 1, 4, 1, 5]
"""No prefix contains these tokens in this order."""
BAR = 0.1


class InvocationBench(Bench):
    """An engine with a plain adapter and one that has an invocation."""

    def __init__(self, shape: str, prefix_tokens: int) -> None:
        model = _with_more_positions(random_checkpoint.cached_checkpoint(shape))
        fields = {"model": str(model), "max_model_len": 4096, "enable_lora": True, "max_loras": 2, "max_num_seqs": 8}
        super().__init__(shape, prefix_tokens, **fields)
        plain, invoked = random_adapters.make_adapters(model, model.parent / f"{model.name}-adapters", 2, 16)
        self._add("plain", plain)
        folder = invoked.with_name(f"{invoked.name}-invocation")
        folder.mkdir(exist_ok=True)
        (folder / "adapter_model.safetensors").write_bytes((invoked / "adapter_model.safetensors").read_bytes())
        config = json.loads((invoked / "adapter_config.json").read_text()) | {"alora_invocation_tokens": INVOCATION}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        self._add("invoked", folder)

    def _add(self, digest: str, path: Path) -> None:
        self.engine.add_adapter(digest, path, self.engine.read_adapter(path), slot_pinned=True)

    def adapter_ttft(self, prompt: list[int], adapter: str | None) -> float:
        """Return the seconds from the arrival of `prompt` to its first output token."""
        self._next_id += 1
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        start = time.perf_counter()
        self.engine.add(SequenceRequest(self._next_id, prompt, params, adapter))
        while self.engine.has_work:
            self.engine.step()
        return time.perf_counter() - start


def _with_more_positions(model: Path) -> Path:
    """Return the checkpoint with the limit of 4,096 tokens."""
    folder = model.with_name(f"{model.name}-4096")
    folder.mkdir(exist_ok=True)
    for path in model.iterdir():
        if not (folder / path.name).exists():
            (folder / path.name).symlink_to(path.resolve())
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def main() -> int:
    """Print the ratios; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(random_checkpoint.SHAPES), default="135m")
    parser.add_argument("--prefix-tokens", type=int, default=2000)
    parser.add_argument("--more-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    bench = InvocationBench(arguments.shape, arguments.prefix_tokens)
    end = INVOCATION + [11] * (arguments.more_tokens - len(INVOCATION))
    times: dict[str, list[float]] = {"adapter, nothing cached": [], "base cached": [], "plain LoRA": []}
    for _ in range(arguments.rounds):
        times["adapter, nothing cached"].append(bench.adapter_ttft(bench.new_prefix() + end, "invoked"))
        for name, adapter in {"base cached": "invoked", "plain LoRA": "plain"}.items():
            prefix = bench.new_prefix()
            bench.adapter_ttft(prefix, None)
            times[name].append(bench.adapter_ttft(prefix + end, adapter))
    reference = statistics.median(times["adapter, nothing cached"])
    for name, values in times.items():
        median, low, high = (1e3 * f(values) for f in (statistics.median, min, max))
        print(f"{name}: ttft_ms={median:.1f} ({low:.1f}-{high:.1f}) ratio={median / 1e3 / reference:.3f}")
    return int(statistics.median(times["base cached"]) > BAR * reference)


if __name__ == "__main__":
    sys.exit(main())
