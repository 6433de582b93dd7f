# SPDX-License-Identifier: Apache-2.0
"""Tokens per step of the tiny model with drafts, on conversations of users that repeat themselves.

    python tests/bench/repeated_questions.py --method ngram --method suffix

The questions are in repeated_questions.json. A prompt contains the conversation so far, with the model's own answers.
One conversation runs at a time, sampled at temperature 0.7; all run `--rounds` times with other seeds, in one engine.
Tokens per step are the output tokens, divided by the steps, prompts included. The first line has no drafts.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from quire_engine import LLM, LoRARequest, SamplingParams  # noqa: E402

MODEL, ADAPTERS = ROOT / "examples/models/tiny", ROOT / "examples/adapters"
NAMES = {"sql": "SQL", None: "Answer"}
NGRAM_LENGTHS = {"prompt_lookup_min": 1, "prompt_lookup_max": 5}


def _ask(llm: LLM, conversation: dict[str, Any], seed: int) -> int:
    """Run one conversation; return its output tokens."""
    adapter, history, num_tokens = conversation["adapter"], "", 0
    lora = None if adapter is None else LoRARequest(adapter, 1, str(ADAPTERS / adapter))
    params = SamplingParams(temperature=0.7, max_tokens=80, seed=seed, stop=["\nQuestion:"])
    for question in conversation["questions"]:
        history += f"Question: {question}\n{NAMES[adapter]}:"
        [output] = llm.generate([history], params, lora_request=lora, use_tqdm=False)
        num_tokens += len(output.outputs[0].token_ids)
        history += output.outputs[0].text.rstrip() + "\n"
    return num_tokens


def _measure(method: str | None, num_draft_tokens: int, num_rounds: int) -> str:
    """Return one line of the report."""
    conversations = json.loads((Path(__file__).parent / "repeated_questions.json").read_text())["conversations"]
    speculation = {"method": method, "num_speculative_tokens": num_draft_tokens}
    llm = LLM(
        model=str(MODEL),
        enable_lora=True,
        kv_cache_memory_bytes=2**27,
        speculative_config=(speculation | (NGRAM_LENGTHS if method == "ngram" else {})) if method else None,
    )
    tokens, steps = {"sql": 0, None: 0}, {"sql": 0, None: 0}
    for seed in range(num_rounds):
        for conversation in conversations:
            before, adapter = llm.engine.stats().num_steps, conversation["adapter"]
            tokens[adapter] += _ask(llm, conversation, seed)
            steps[adapter] += llm.engine.stats().num_steps - before
    stats = llm.engine.stats()
    return (
        f"method={method} k={num_draft_tokens} tokens={sum(tokens.values())} steps={sum(steps.values())} "
        f"tokens_per_step={sum(tokens.values()) / sum(steps.values()):.2f} "
        f"sql={tokens['sql'] / steps['sql']:.2f} answers={tokens[None] / steps[None]:.2f} "
        f"draft_tokens={stats.num_draft_tokens} accepted={stats.num_accepted_draft_tokens}"
    )


def main() -> None:
    """Print one line per method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", action="append", default=[], help="ngram or suffix; can be repeated")
    parser.add_argument("--tokens", type=int, default=8, help="maximum draft tokens")
    parser.add_argument("--rounds", type=int, default=3, help="times that each conversation runs")
    arguments = parser.parse_args()
    for method in [None, *arguments.method]:
        print(_measure(method, arguments.tokens, arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
