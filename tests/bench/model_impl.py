# SPDX-License-Identifier: Apache-2.0
"""A class of transformers (model_impl transformers) beside Quire's own class, for the same random Llama of 135M.

    python tests/bench/model_impl.py

64 requests of 64 tokens run at the same time, and each generates 64 tokens. The script prints the tokens per second of
both, and their ratio. The runs alternate, and the fastest of each counts, because other work on the machine only makes
runs slower.
"""

import argparse
import time

import torch
from random_checkpoint import SHAPES, cached_checkpoint

from quire_engine import LLM, SamplingParams

_NUM_TOKENS = 64


def _seconds(llm: LLM, prompts: list[dict[str, list[int]]]) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def main() -> None:
    """Print a line for each dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], help="default bfloat16 float32")
    parser.add_argument("--requests", type=int, default=64, help="requests at the same time (default 64)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each measurement (default 3)")
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, SHAPES["135m"]["vocab_size"], (args.requests, _NUM_TOKENS), generator=generator)
    prompts = [{"prompt_token_ids": row.tolist()} for row in tokens]
    for dtype in args.dtypes:
        llms = {
            model_impl: LLM(
                cached_checkpoint("135m"),
                dtype=dtype,
                model_impl=model_impl,
                max_model_len=512,
                max_num_seqs=args.requests,
                max_num_batched_tokens=1024,
                enable_prefix_caching=False,
                kv_cache_memory_bytes=1 << 30,
            )
            for model_impl in ("quire", "transformers")
        }
        for llm in llms.values():
            _seconds(llm, prompts)
        seconds = dict.fromkeys(llms, float("inf"))
        for _ in range(args.runs):
            seconds = {name: min(seconds[name], _seconds(llm, prompts)) for name, llm in llms.items()}
        rates = {name: args.requests * _NUM_TOKENS / each for name, each in seconds.items()}
        print(
            f"dtype={dtype} quire={rates['quire']:.0f} tokens/s transformers={rates['transformers']:.0f} tokens/s "
            f"ratio={rates['transformers'] / rates['quire']:.2f}"
        )


if __name__ == "__main__":
    main()
