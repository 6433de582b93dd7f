# SPDX-License-Identifier: Apache-2.0
"""Time to tokenize the next turn of a long conversation: `python tests/bench/conversation.py FOLDER`. Best of 5 runs.

FOLDER is a checkpoint with ChatML tokens. The text process encodes a conversation in segments and keeps their ids, so
that a turn costs what is new in it. The whole text is encoded for comparison.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from quire_engine.tokenization.tokenizer import Tokenizer

NUM_TURNS, WORDS_PER_TURN, NUM_RUNS = 100, 300, 5
WORDS = (Path(__file__).resolve().parents[2] / "docs/architecture.md").read_text().split()


def turn(role: str, start: int, num_words: int) -> str:
    words = [WORDS[(start + i) % len(WORDS)] for i in range(num_words)]
    return f"<|im_start|>{role}\n{' '.join(words)}<|im_end|>\n"


def run_ms(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def main(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    roles = ("user", "assistant")
    conversation = "".join(turn(roles[i % 2], 37 * i, WORDS_PER_TURN) for i in range(NUM_TURNS))
    num_tokens = len(tokenizer.encode_rendered(conversation))
    texts = [conversation + turn("user", 1000 + 50 * i, 30) + "<|im_start|>assistant\n" for i in range(NUM_RUNS)]
    cached_ms = min(run_ms(lambda text=text: tokenizer.encode_rendered(text)) for text in texts)  # type: ignore[misc]
    whole_ms = min(run_ms(lambda text=text: tokenizer.encode(text, None, False)) for text in texts)  # type: ignore[misc]
    assert tokenizer.encode_rendered(texts[0]) == tokenizer.encode(texts[0], None, False)
    print(f"{num_tokens} tokens, {NUM_TURNS} turns: whole {whole_ms:.1f} ms, next turn {cached_ms:.1f} ms")
    print(f"ratio {whole_ms / cached_ms:.0f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
