# SPDX-License-Identifier: Apache-2.0
"""The requests of a benchmark and their arrival times, generated from a seed, the same for every engine."""

import itertools
import random
from dataclasses import dataclass
from typing import NamedTuple


class Request(NamedTuple):
    """One request, as it goes to an engine's process: greedy, and end-of-sequence is ignored."""

    prompt_token_ids: list[int]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked, run by run. Each run has a key and prompts of its own, so that no prefix cache knows them yet."""

    num_requests: int
    prompt_tokens: tuple[int, int]
    """Least and most, each length between as likely."""
    output_tokens: tuple[int, int]
    vocab_size: int
    """Prompts are drawn from all token ids."""
    seed: int

    def requests(self, *key: object) -> list[Request]:
        """The requests of one run; two runs share none."""
        rng = random.Random(f"{self.seed} requests {key}")
        sizes = [(rng.randint(*self.prompt_tokens), rng.randint(*self.output_tokens)) for _ in range(self.num_requests)]
        return [Request(self._random_tokens(prompt, rng), output) for prompt, output in sizes]

    def offsets(self, rate: float, *key: object) -> list[float]:
        """Seconds from the start at which each request arrives: a Poisson process of `rate` requests a second."""
        rng = random.Random(f"{self.seed} arrivals {key}")
        gaps = (rng.expovariate(rate) for _ in range(self.num_requests - 1))
        return list(itertools.accumulate(gaps, initial=0.0))

    def prefix_pair(self, num_tokens: int, *key: object) -> list[Request]:
        """Two prompts that share their first `num_tokens` tokens and end with 16 of their own; two output tokens."""
        rng = random.Random(f"{self.seed} prefix {key}")
        prefix = self._random_tokens(num_tokens, rng)
        return [Request(prefix + self._random_tokens(16, rng), 2) for _ in range(2)]

    def _random_tokens(self, count: int, rng: random.Random) -> list[int]:
        return rng.choices(range(self.vocab_size), k=count)
