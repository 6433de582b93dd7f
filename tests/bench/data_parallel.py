# SPDX-License-Identifier: Apache-2.0
"""Two cores behind one text process: the dispatch against round robin, and two cores against one with both threads.

    python tests/bench/data_parallel.py [--rounds 2]

All loads go to the socket of a real text process. Round robin pins each request to a core (data_parallel_rank).

- chat: conversations of two to six turns arrive at random times; a turn repeats all earlier turns. TTFT, p50.
- burst: prompts with 24 beginnings, whose popularity follows Zipf's law, arrive at once at empty caches. Tokens/s.
- plain: requests without common beginnings, all at once. Output tokens/s.

Each pair of figures alternates in a round, and the ratio of a round is printed beside the bars.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import random_checkpoint
from workload import Workload

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / path) for path in ("tests", "hack", "backend", "kernels")]

from support.engine_processes import EngineProcesses  # noqa: E402

from quire_spec.constants import TEXT_SOCKET, core_names  # noqa: E402
from quire_spec.engine.sampling_params import SamplingParams  # noqa: E402
from quire_spec.protocol.messages import GenerateRequest, Hello, OutputDelta  # noqa: E402
from quire_spec.protocol.request_client import RequestClient  # noqa: E402

BARS = {"chat": 0.7, "burst": 1.12, "plain": 0.95}
"""Chat: at most this ratio of TTFT; the others: at least this ratio of tokens/s."""
NUM_CORES = 2
PLAIN = Workload(64, (32, 256), (32, 128), vocab_size=49152, seed=1)
NUM_CONVERSATIONS, CHAT_RATE = 24, 1.5
"""Conversations, and turns per second while they last. Both cores are busy for about half of the time."""
NUM_BEGINNINGS, BURST_SIZE = 24, 120


@dataclass
class Answer:
    """A finished request."""

    ttft_s: float
    token_ids: list[int]
    num_prompt_tokens: int


class Load:
    """Sends requests to the text process."""

    def __init__(self, client: RequestClient, round_robin: bool, salt: str) -> None:
        self._client, self._round_robin, self._salt = client, round_robin, salt
        self._num_sent = 0

    async def send(self, prompt: list[int], num_output_tokens: int) -> Answer:
        """Run one greedy request; raise RuntimeError if it fails."""
        deltas: asyncio.Queue[OutputDelta] = asyncio.Queue()
        params = SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
        rank = self._num_sent % NUM_CORES if self._round_robin else None
        self._num_sent += 1
        request = GenerateRequest(
            self._client.new_id(), "base", None, prompt, params, True, self._salt, data_parallel_rank=rank
        )
        sent_at, ttft_s, token_ids = time.perf_counter(), 0.0, []
        self._client.submit(request, deltas.put_nowait)
        while True:
            delta = await deltas.get()
            ttft_s = ttft_s or time.perf_counter() - sent_at
            token_ids += delta.token_ids
            if delta.error_code is not None:
                raise RuntimeError(delta.error)
            if delta.final:
                return Answer(ttft_s, token_ids, len(prompt))


async def chat(load: Load, key: int) -> float:
    """Run all conversations; return the median TTFT in seconds of all turns."""
    rng = random.Random(f"chat {key}")
    answers: list[Answer] = []

    async def converse(turns: list[tuple[list[int], float]], starts_at: float) -> None:
        history: list[int] = []
        await asyncio.sleep(starts_at)
        for message, pause_s in turns:
            history += message
            answer = await load.send(history, 24)
            answers.append(answer)
            history += answer.token_ids
            await asyncio.sleep(pause_s)

    conversations = []
    for _ in range(NUM_CONVERSATIONS):
        turns = [
            (rng.choices(range(49152), k=rng.randint(120, 300)), rng.uniform(1, 4)) for _ in range(rng.randint(2, 6))
        ]
        conversations.append(turns)
    span_s = sum(map(len, conversations)) / CHAT_RATE
    await asyncio.gather(*(converse(turns, rng.uniform(0, span_s)) for turns in conversations))
    return statistics.median(answer.ttft_s for answer in answers)


async def burst(load: Load, key: int) -> float:
    """Send all prompts at once; return all prompt and output tokens per second."""
    rng = random.Random(f"burst {key}")
    beginnings = [rng.choices(range(49152), k=512) for _ in range(NUM_BEGINNINGS)]
    chosen = rng.choices(beginnings, [1 / rank for rank in range(1, NUM_BEGINNINGS + 1)], k=BURST_SIZE)
    prompts = [beginning + rng.choices(range(49152), k=32) for beginning in chosen]
    return await _tokens_per_s((load.send(prompt, 8) for prompt in prompts), counts_prompts=True)


async def plain(load: Load, key: int) -> float:
    """Send all requests at once; return the output tokens per second."""
    requests = PLAIN.requests(key)
    return await _tokens_per_s((load.send(*request) for request in requests), counts_prompts=False)


async def _tokens_per_s(requests: Iterable[Coroutine[Any, Any, Answer]], counts_prompts: bool) -> float:
    started_at = time.perf_counter()
    answers = await asyncio.gather(*requests)
    seconds = time.perf_counter() - started_at
    return sum(len(a.token_ids) + counts_prompts * a.num_prompt_tokens for a in answers) / seconds


async def measure(folder: Path, scenario: Any, round_robin: bool, key: int) -> float:
    """Run a scenario once, with a salt of its own so that all caches are cold."""
    client = RequestClient(folder / TEXT_SOCKET, Hello("openai", pid=os.getpid()))
    await client.connect()
    try:
        name = f"{scenario.__name__} {round_robin} {key}"
        await asyncio.gather(*(Load(client, True, f"warm {name}").send([7] * 64, 8) for _ in range(2)))
        result: float = await scenario(Load(client, round_robin, name), key)
        return result
    finally:
        await client.close()


def engine(folder: Path, num_cores: int, model: Path) -> EngineProcesses:
    """Start a text process with cores that together use all CPU cores."""
    config = {"model": str(model), "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 768 * 2**20}
    processes = EngineProcesses(folder, num_threads=None, **config, data_parallel_size=num_cores)
    return processes.start(*core_names(num_cores), "text", timeout_s=300.0)


def report(name: str, ours: float, theirs: float) -> None:
    """Print both figures and their ratio beside the bar."""
    ratio = ours / theirs
    is_met = ratio <= BARS[name] if name == "chat" else ratio >= BARS[name]
    print(
        f"{name:<6} {ours:>10.3f} {theirs:>10.3f}  ratio {ratio:.3f}  bar {BARS[name]}  {'ok' if is_met else 'MISSED'}"
    )


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--shape", choices=sorted(random_checkpoint.SHAPES), default="135m")
    parser.add_argument("--only", choices=sorted(BARS), action="append")
    args = parser.parse_args()
    model, names = random_checkpoint.cached_checkpoint(args.shape), args.only or list(BARS)
    print("load    dispatch / two cores    round robin / one core")
    with tempfile.TemporaryDirectory() as temporary, engine(Path(temporary) / "two", 2, model) as two:
        # The first run touches the memory of the caches for the first time.
        asyncio.run(measure(two.folder, burst, True, -1))
        for key in range(args.rounds):
            for scenario in (chat, burst):
                if scenario.__name__ in names:
                    pair = [asyncio.run(measure(two.folder, scenario, rr, key)) for rr in (False, True)]
                    report(scenario.__name__, *pair)
        if "plain" in names:
            with engine(Path(temporary) / "one", 1, model) as one:
                for key in range(args.rounds):
                    report(
                        "plain",
                        asyncio.run(measure(two.folder, plain, False, key)),
                        asyncio.run(measure_one(one.folder, key)),
                    )


async def measure_one(folder: Path, key: int) -> float:
    """Run the plain load on one core."""
    client = RequestClient(folder / TEXT_SOCKET, Hello("openai", pid=os.getpid()))
    await client.connect()
    try:
        return await plain(Load(client, False, f"one {key}"), key)
    finally:
        await client.close()


if __name__ == "__main__":
    main()
