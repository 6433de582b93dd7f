# SPDX-License-Identifier: Apache-2.0
"""Beam search against sampling: tokens computed per second, on the 135M shape with random weights.

    python tests/bench/beams.py --requests 8 --width 4

Both kinds of run compute the same number of sequences for the same number of steps: `requests` searches with `width`
beams, or as many requests with `width` sampled outputs. The runs alternate in one process, with the same engine. The
fastest run of each kind counts, because other work on the machine only makes runs slower.
"""

import argparse
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from random_checkpoint import SHAPES, cached_checkpoint  # noqa: E402

from quire_engine import LLM, SamplingParams  # noqa: E402

NUM_PROMPT_TOKENS = 64


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--width", type=int, default=4, help="beams, or sampled outputs, per request")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens per sequence")
    parser.add_argument("--runs", type=int, default=3, help="runs of each kind")
    arguments = parser.parse_args()
    llm = LLM(
        model=str(cached_checkpoint(arguments.shape)),
        max_model_len=512,
        max_num_seqs=64,
        kv_cache_memory_bytes=2**30,
        enable_prefix_caching=False,
    )
    rng = random.Random(1)
    prompts = [
        {"prompt_token_ids": [rng.randrange(2, 40_000) for _ in range(NUM_PROMPT_TOKENS)]}
        for _ in range(arguments.requests)
    ]
    # No output ends before the last token, so that both kinds compute the same number of tokens.
    shared = {"n": arguments.width, "max_tokens": arguments.tokens, "ignore_eos": True}
    params = {
        "beams": SamplingParams(use_beam_search=True, early_stopping="never", **shared),
        "sampled": SamplingParams(temperature=1.0, seed=1, **shared),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in params}
    copies = 0
    for _ in range(arguments.runs):
        for kind, kind_params in params.items():
            copies_before, start = llm.engine.stats().num_block_copies, time.perf_counter()
            llm.generate(prompts, kind_params, use_tqdm=False)
            seconds[kind].append(time.perf_counter() - start)
            if kind == "beams":
                copies = llm.engine.stats().num_block_copies - copies_before
    num_tokens = arguments.requests * arguments.width * arguments.tokens
    fastest = {kind: min(values) for kind, values in seconds.items()}
    print(
        f"requests={arguments.requests} width={arguments.width} ratio={fastest['sampled'] / fastest['beams']:.2f} "
        f"beams_tokens_per_s={num_tokens / fastest['beams']:.1f} "
        f"sampled_tokens_per_s={num_tokens / fastest['sampled']:.1f} block_copies={copies}"
    )


if __name__ == "__main__":
    main()
