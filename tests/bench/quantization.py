# SPDX-License-Identifier: Apache-2.0
"""Weights quantized at load against the same model in bfloat16: tokens per second, on the 135M shape.

    python tests/bench/quantization.py --streams 1 64 --quantizations int8 int4 fp8
    python tests/bench/quantization.py --streams 64 --quantizations int8 --adapters 16

All engines live in one process and run in turn, in another order each round. The ratio of the fastest runs counts,
because other work on the machine only makes runs slower; the median of the rounds' ratios is printed beside it. With
adapters, each request of the second engine has one of them, and both engines have the same quantization.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

import random_adapters  # noqa: E402
from random_checkpoint import cached_checkpoint  # noqa: E402

from quire_engine import LLM, LoRARequest, SamplingParams  # noqa: E402

NUM_PROMPT_TOKENS = 64


def _run(llm: LLM, prompts: list[list[int]], num_tokens: int, adapters: list[LoRARequest]) -> float:
    """Return the seconds of one run."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    lora = [adapters[i % len(adapters)] for i in range(len(prompts))] if adapters else None
    start = time.perf_counter()
    llm.generate(requests, params, use_tqdm=False, lora_request=lora)
    return time.perf_counter() - start


def main() -> None:
    """Print one line per engine and number of streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64], help="sequences at a time")
    parser.add_argument("--quantizations", nargs="+", default=["int8", "int4", "fp8"])
    parser.add_argument("--adapters", type=int, default=0, help="number of adapters; 0: compare with bfloat16")
    parser.add_argument("--tokens", type=int, default=32, help="output tokens of each request")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    model = cached_checkpoint("135m").resolve()
    lora = {"enable_lora": True, "max_loras": args.adapters, "max_lora_rank": 16} if args.adapters else {}

    def load(quantization: str | None) -> LLM:
        return LLM(
            str(model),
            dtype="bfloat16",
            quantization=quantization,
            max_num_seqs=max(args.streams),
            max_model_len=512,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=512 << 20,
            skip_tokenizer_init=True,
            **lora,
        )

    adapters = [
        LoRARequest(f"a{i}", i + 1, str(folder))
        for i, folder in enumerate(
            random_adapters.make_adapters(model, model.parent / f"{model.name}-adapters", args.adapters, 16)
            if args.adapters
            else []
        )
    ]
    for quantization in args.quantizations:
        engine = load(quantization)
        engines = {
            "base": (engine if args.adapters else load(None), []),
            f"{quantization}{' adapters' if args.adapters else ''}": (engine, adapters),
        }
        for num_streams in args.streams:
            rng = random.Random(num_streams)
            prompts = [[rng.randrange(2, 40_000) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(num_streams)]
            seconds: dict[str, list[float]] = {name: [] for name in engines}
            for run in range(args.runs + 1):
                for name in sorted(engines, reverse=run % 2 == 1):
                    elapsed = _run(engines[name][0], prompts, args.tokens, engines[name][1])
                    seconds[name] += [elapsed] if run else []  # the first run warms up
            base, (name, times) = seconds.pop("base"), seconds.popitem()
            median = statistics.median(b / t for b, t in zip(base, times, strict=True))
            print(
                f"{name} streams={num_streams} ratio={min(base) / min(times):.2f} median={median:.2f} "
                f"tokens_per_s={num_streams * args.tokens / min(times):.1f} "
                f"base_tokens_per_s={num_streams * args.tokens / min(base):.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
