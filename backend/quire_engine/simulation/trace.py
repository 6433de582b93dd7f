# SPDX-License-Identifier: Apache-2.0
"""Traces of requests: when each of them arrives, how long it is, and which beginning it shares with others.

A trace has one JSON object per line, in the format of Mooncake's traces:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}

`timestamp` is in milliseconds. Each of `hash_ids` stands for the tokens of one block of the prompt. Prompts with equal
ids at their beginning share these tokens. Without ids, a prompt shares nothing. The field "adapter" is Quire's own.

Source of the format: Qin et al.: "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving", 2024
"""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire_spec.errors import InvalidArgument, truncated_repr

MOONCAKE_BLOCK_TOKENS = 512
_MAX_LENGTH = 2**24
_MAX_HASH_ID = 2**48


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    arrival_s: float
    """Seconds after the first request of the trace."""
    num_input_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()
    adapter: str | None = None
    line: int = 0
    """Number of the line in the file."""

    def prompt(self, vocab_size: int, block_tokens: int) -> list[int]:
        """Return a prompt of `num_input_tokens` token ids.

        Blocks with the same id have the same tokens. A prompt without ids has a beginning of its own.
        """
        tokens: list[int] = []
        num_blocks = -(-self.num_input_tokens // block_tokens)
        for index in range(num_blocks):
            is_shared = index < len(self.hash_ids)
            seed = self.hash_ids[index] if is_shared else _MAX_HASH_ID + self.line * _MAX_LENGTH + index
            tokens += _block(seed, min(block_tokens, self.num_input_tokens - len(tokens)), vocab_size)
        return tokens


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a trace.

    Raises:
        InvalidArgument: a line is wrong; the message contains its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise InvalidArgument(f"--trace: {path}: {error}") from error
    requests = [_parse(f"{path}, line {i}", line, i) for i, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise InvalidArgument(f"--trace: {path} contains no request")
    for previous, request in itertools.pairwise(requests):
        if request.arrival_s < previous.arrival_s:
            raise InvalidArgument(
                f"{path}, line {request.line}: timestamp: {request.arrival_s * 1000:g} is before the previous line's "
                f"{previous.arrival_s * 1000:g}; sort the lines"
            )
    start_s = requests[0].arrival_s
    return [replace(request, arrival_s=request.arrival_s - start_s) for request in requests]


def _parse(where: str, line: str, number: int) -> TraceRequest:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidArgument(f"{where}: {truncated_repr(fields)} is not an object")
    timestamp = fields.get("timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp < math.inf:
        raise InvalidArgument(f"{where}: timestamp: {truncated_repr(timestamp)} is not a number of milliseconds >= 0")
    lengths = [_integer(where, name, fields.get(name), 1, _MAX_LENGTH) for name in ("input_length", "output_length")]
    hash_ids = fields.get("hash_ids", [])
    if not isinstance(hash_ids, list):
        raise InvalidArgument(f"{where}: hash_ids: {truncated_repr(hash_ids)} is not a list")
    ids = tuple(_integer(where, "hash_ids", item, 0, _MAX_HASH_ID - 1) for item in hash_ids)
    adapter = fields.get("adapter")
    if adapter is not None and not isinstance(adapter, str):
        raise InvalidArgument(f"{where}: adapter: {truncated_repr(adapter)} is not a name")
    return TraceRequest(timestamp / 1000, lengths[0], lengths[1], ids, adapter, number)


def _integer(where: str, name: str, value: Any, minimum: int, maximum: int) -> int:
    if type(value) is not int or not minimum <= value <= maximum:
        raise InvalidArgument(f"{where}: {name}: {truncated_repr(value)} is not an integer from {minimum} to {maximum}")
    return value


def _block(seed: int, size: int, vocab_size: int) -> list[int]:
    """Return tokens that begin with the digits of `seed`. Only the beginning must differ, because the hash of a KV
    block also covers all tokens before it."""
    digits = list(_digits(seed, vocab_size))
    return (digits + [0] * (size - len(digits)))[:size]


def _digits(number: int, base: int) -> Iterator[int]:
    while True:
        number, digit = divmod(number, base)
        yield digit
        if not number:
            return
