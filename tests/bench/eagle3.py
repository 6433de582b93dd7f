# SPDX-License-Identifier: Apache-2.0
"""Tokens per step of the tiny model with its EAGLE-3 head, on prompts that the training of the head did not see.

    python tests/bench/eagle3.py --temperature 0 --temperature 0.7

A prompt is the beginning of a story or an answer, or a chat up to its answer, from another seed of hack/tiny/corpus.py.
One request runs at a time. Tokens per step are the output tokens, divided by the steps, prompts included.
"""

import argparse
import sys
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "hack/tiny")]

import corpus  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from quire_engine import LLM, SamplingParams  # noqa: E402

MODELS = ROOT / "examples/models"
UNSEEN_SEED = 3_000_017
NUM_PROMPT_TOKENS = 12


def _prompts(num_prompts: int) -> list[list[int]]:
    """Return token ids, half of them from chats."""
    tokenizer = Tokenizer.from_file(str(MODELS / "tiny/tokenizer.json"))
    texts = islice(corpus.CORPORA["base"](UNSEEN_SEED), num_prompts // 2)
    chats = islice(corpus.CORPORA["chat"](UNSEEN_SEED), num_prompts - num_prompts // 2)
    prompts = [tokenizer.encode(document.text).ids[:NUM_PROMPT_TOKENS] for document in texts]
    return prompts + [tokenizer.encode(document.prompt, add_special_tokens=False).ids for document in chats]


def _measure(head: Path, temperature: float, num_draft_tokens: int, prompts: list[list[int]]) -> str:
    """Return one line of the report."""
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": num_draft_tokens}
    llm = LLM(model=str(MODELS / "tiny"), kv_cache_memory_bytes=2**26, speculative_config=speculation)
    num_tokens = 0
    for seed, prompt in enumerate(prompts):
        params = SamplingParams(temperature=temperature, max_tokens=80, seed=seed)
        [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        num_tokens += len(output.outputs[0].token_ids)
    stats = llm.engine.stats()
    return (
        f"temperature={temperature} k={num_draft_tokens} tokens={num_tokens} steps={stats.num_steps} "
        f"tokens_per_step={num_tokens / stats.num_steps:.2f} "
        f"accepted_by_position={stats.accepted_draft_tokens_per_position} drafts={stats.num_drafts}"
    )


def main() -> None:
    """Print one line per temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperature", type=float, action="append", default=[], help="can be repeated; default 0.7")
    parser.add_argument("--tokens", type=int, default=3, help="maximum draft tokens")
    parser.add_argument("--prompts", type=int, default=40, help="number of prompts")
    parser.add_argument("--head", type=Path, default=MODELS / "tiny-eagle3", help="folder of the head")
    arguments = parser.parse_args()
    for temperature in arguments.temperature or [0.7]:
        print(_measure(arguments.head, temperature, arguments.tokens, _prompts(arguments.prompts)), flush=True)


if __name__ == "__main__":
    main()
