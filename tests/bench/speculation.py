# SPDX-License-Identifier: Apache-2.0
"""Speculation with scripted drafts: tokens per second relative to none, on the 135M shape with random weights.

    python tests/bench/speculation.py --streams 1 8 --keep 0.8 0.5 0

The draft is the recorded continuation. Each of its tokens is kept with the given probability; otherwise it is wrong.
Acceptance is never measured on random weights, which do not continue text predictably. Runs with and without drafts
alternate in one process, with the same engine and without prefix cache. The fastest run of each kind counts, because
other work on the machine only makes runs slower.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from random_checkpoint import cached_checkpoint  # noqa: E402
from support.scripted_drafts import ScriptedProposer  # noqa: E402

from quire_engine import LLM, SamplingParams  # noqa: E402
from quire_engine.sequence import Sequence  # noqa: E402
from quire_engine.speculation.draft_policy import DraftPolicy  # noqa: E402

NUM_PROMPT_TOKENS = 64


def _run(llm: LLM, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return time.perf_counter() - start, [list(output.outputs[0].token_ids) for output in outputs]


def _continuation(recorded: dict[tuple[int, ...], list[int]]) -> Callable[[Sequence, int], list[int]]:
    def continue_(sequence: Sequence, num_tokens: int) -> list[int]:
        end = len(sequence.output_token_ids)
        return recorded[tuple(sequence.prompt_token_ids)][end : end + num_tokens]

    return continue_


def _measure(llm: LLM, num_streams: int, keep: float, num_tokens: int, num_runs: int) -> str:
    """Return one line of the report."""
    planner = llm.engine._scheduler.draft_planner
    rng = random.Random(num_streams)
    prompts = [[rng.randrange(2, 40_000) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(num_streams)]
    nothing = ScriptedProposer(lambda sequence, num_tokens: [])
    planner._proposer = nothing
    _, outputs = _run(llm, prompts, num_tokens)
    recorded = dict(zip(map(tuple, prompts), outputs, strict=True))
    drafts = ScriptedProposer(_continuation(recorded), keep)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    num_equal = 0
    for run in range(2 * num_runs):
        speculating = run % 2 == 1
        planner._proposer = drafts if speculating else nothing
        planner._policy = DraftPolicy("cpu", 3)
        elapsed, outputs = _run(llm, prompts, num_tokens)
        seconds[speculating].append(elapsed)
        num_equal += sum(a == b for a, b in zip(outputs, recorded.values(), strict=True))
    fastest, num_output_tokens = min(seconds[True]), num_streams * num_tokens
    counts = planner.counts
    return (
        f"streams={num_streams} keep={keep} ratio={min(seconds[False]) / fastest:.2f} "
        f"tokens_per_s={num_output_tokens / fastest:.1f} "
        f"drafts={counts.num_drafts} draft_tokens={counts.num_draft_tokens} accepted={counts.num_accepted_tokens} "
        f"equal_outputs={num_equal}/{2 * num_runs * num_streams}"
    )


def main() -> None:
    """Print one line per combination."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1], help="sequences at a time")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.8, 0.5, 0.0], help="probability of a right token")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens per sequence")
    parser.add_argument("--runs", type=int, default=3, help="runs with and without drafts")
    arguments = parser.parse_args()
    llm = LLM(
        model=str(cached_checkpoint("135m")),
        max_model_len=512,
        max_num_seqs=64,
        kv_cache_memory_bytes=2**30,
        enable_prefix_caching=False,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )
    for num_streams in arguments.streams:
        for keep in arguments.keep:
            print(_measure(llm, num_streams, keep, arguments.tokens, arguments.runs), flush=True)


if __name__ == "__main__":
    main()
