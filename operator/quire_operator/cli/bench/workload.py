# SPDX-License-Identifier: Apache-2.0
"""The requests of a benchmark, generated from a seed: prompts, models, lengths and times of arrival."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_spec.errors import ConfigError

_TEXT = """
the of and to in is was for that it with as his on be at by had not are but from or have an they which one you
were all her she there would their we him been has when who will no more if out so up said what its about than
into them can only other time new some could these two may first then do any like my now over such our man me
even most made after also did many off before must well back through years much where your way down should
because
"""
WORDS = _TEXT.split()
"""Common words. In most tokenizers, each is one token, so that the length of a prompt in tokens is close to the wanted
one, which `TokensOfWords` corrects."""


@dataclass(frozen=True, slots=True)
class Load:
    """One load: a number of open requests, or a number of new requests per second."""

    concurrency: int | None = None
    request_rate: float | None = None

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}" if self.request_rate is None else f"{self.request_rate:g} requests/s"


@dataclass(frozen=True, slots=True)
class Request:
    """One request."""

    model: str
    prompt: str | Sequence[Any]
    """Text, or the messages of a chat."""
    max_tokens: int


@dataclass(frozen=True, slots=True)
class TokensOfWords:
    """The number of tokens of a prompt is `fixed + per_word * words`; `fixed` are those of a chat template."""

    fixed: float = 0.0
    per_word: float = 1.0

    def num_words(self, num_tokens: int) -> int:
        """Return the number of words, at least 1, of a prompt with about this number of tokens."""
        return max(1, round((num_tokens - self.fixed) / self.per_word))


@dataclass(frozen=True, slots=True)
class Workload:
    """All requests. A request depends only on the seed, its load and its number."""

    weights: Mapping[str, float]
    """Weight of each model."""
    input_len: tuple[int, int]
    """Smallest and largest number of tokens; each length between is as likely. Not for a dataset."""
    output_len: tuple[int, int]
    seed: int
    tokens_of_words: TokensOfWords = TokensOfWords()
    dataset: Sequence[Mapping[str, Any]] = ()

    def request(self, key: object, number: int, offset: int = 0) -> Request:
        """Return a request.

        Args:
            key: distinguishes loads, so that no load has a prompt of an earlier load in its prefix cache.
            number: its number in the load.
            offset: the number of requests of earlier loads, for the lines of a dataset.
        """
        rng = random.Random(f"{self.seed} {key} {number}")
        [model] = rng.choices([*self.weights], [*self.weights.values()])
        max_tokens = rng.randint(*self.output_len)
        if self.dataset:
            line = self.dataset[(offset + number) % len(self.dataset)]
            prompt = line["messages"] if "messages" in line else line["prompt"]
            return Request(line.get("model", model), prompt, line.get("output_tokens", max_tokens))
        num_words = self.tokens_of_words.num_words(rng.randint(*self.input_len))
        return Request(model, " ".join(rng.choices(WORDS, k=num_words)), max_tokens)

    def arrivals(self, rate: float) -> Iterator[float]:
        """Yield the seconds from the start at which requests arrive: a Poisson process."""
        rng = random.Random(f"{self.seed} arrivals {rate}")
        seconds = 0.0
        while True:
            yield seconds
            seconds += rng.expovariate(rate)


def model_weights(text: str, adapters: Sequence[str]) -> dict[str, float]:
    """Return the weight of each model for the value of --adapters.

    Args:
        adapters: the adapters of the server.

    Raises:
        ConfigError: the value cannot be understood, or the server has no adapters.
    """
    kind, _, exponent = text.partition(":")
    if kind in ("uniform", "zipf"):
        if not adapters:
            raise ConfigError(
                f"--adapters {text}: the server lists no adapters in /v1/models; name models, as in sql=3,pirate=1"
            )
        power = 0.0 if kind == "uniform" else _number(exponent or "1", text)
        return {name: (rank + 1) ** -power for rank, name in enumerate(adapters)}
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = part.rpartition("=")
        if not name or name in weights:
            raise ConfigError(f"--adapters: {part!r} is not NAME=WEIGHT with a new name; write it as in sql=3,pirate=1")
        weights[name] = _number(weight, text)
    if not sum(weights.values()):
        raise ConfigError(f"--adapters {text}: all weights are 0; give at least one model a weight")
    return weights


def _number(text: str, value: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ConfigError(f"--adapters {value}: {text!r} is not a number of at least 0; correct it")
    return number


def read_dataset(file: Path, endpoint: str) -> list[dict[str, Any]]:
    """Return the lines of a dataset, each with `prompt` or `messages`.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset {file}: {error}; give a text file in UTF-8") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"--dataset {file}: the file has no prompts; add a line")
    if file.suffix not in (".jsonl", ".json"):
        return [{"prompt": line} for _, line in numbered]
    return [_dataset_line(line, f"--dataset {file}:{number}", endpoint) for number, line in numbered]


def _dataset_line(text: str, where: str, endpoint: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}; write one JSON object in each line") from error
    if not isinstance(line, dict) or not (
        isinstance(line.get("prompt"), str) or isinstance(line.get("messages"), list)
    ):
        raise ConfigError(f'{where}: has neither "prompt" (a text) nor "messages" (a list); add one')
    if "messages" in line and endpoint != "chat":
        raise ConfigError(f"{where}: messages require --endpoint chat; add the option")
    output_tokens = line.get("output_tokens", 1)
    if not isinstance(output_tokens, int) or output_tokens < 1:
        raise ConfigError(f"{where}: output_tokens {output_tokens!r}: is not an integer of at least 1")
    return line
