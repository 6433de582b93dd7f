# SPDX-License-Identifier: Apache-2.0
"""Checks the constraints of requests, and converts each constraint to the grammar text that the core compiles.

The checks run in worker processes that may die. Results are cached, so that the same constraint is not checked again.
The request manager of the text process uses this module.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeAlias

from quire_engine.ipc.worker_pool import WorkerDied, WorkerPool, WorkersBusy, WorkerTimeout
from quire_engine.structured_outputs.composed_constraint import ComposedConstraint
from quire_spec.engine.structured_outputs import StructuredOutputsParams
from quire_spec.errors import InvalidArgument, QuireError, Unavailable, error_from_code

CHECK_TIMEOUT_S = 2.0
"""A check may take this number of seconds. The largest schemas in common use take about 20 ms."""
LOW_PRIORITY_AFTER_S = 0.1
QUEUE_TIMEOUT_S = 30.0
"""A check may wait this number of seconds for a worker. This includes the start of the worker, which takes seconds if
the vocabulary is large.
"""
MAX_CACHE_BYTES = 64 * 2**20
_ENTRY_BYTES = 512

CheckResult: TypeAlias = str | QuireError
"""The grammar text of a constraint, or the error that rejects it."""


class GrammarChecker:
    """The checker of one checkpoint."""

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos_token_ids: Collection[int],
        check_timeout_s: float = CHECK_TIMEOUT_S,
        max_cache_bytes: int = MAX_CACHE_BYTES,
    ) -> None:
        config = {"folder": str(folder), "vocab_size": vocab_size, "eos_token_ids": sorted(eos_token_ids)}
        self._check_timeout_s = check_timeout_s
        self._workers = WorkerPool(
            "quire_engine.structured_outputs.check_worker",
            config,
            check_timeout_s,
            QUEUE_TIMEOUT_S,
            LOW_PRIORITY_AFTER_S,
        )
        self._max_cache_bytes = max_cache_bytes
        self._cache: OrderedDict[bytes, CheckResult] = OrderedDict()
        self.num_cached_bytes = 0
        self._waiting: dict[bytes, list[Callable[[CheckResult], None]]] = {}
        """For each constraint that is being checked: the callbacks that get the result."""
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start the workers in the background, unless they already run."""
        self._workers.start()

    def submit(
        self, constraint: StructuredOutputsParams | ComposedConstraint, on_done: Callable[[CheckResult], None]
    ) -> None:
        """Check a constraint and pass the result to `on_done` on the event loop; a cached result is passed at once."""
        document = constraint.to_mapping()
        key = hashlib.sha256(json.dumps(document, ensure_ascii=False).encode()).digest()
        if (result := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            on_done(result)
        elif (callbacks := self._waiting.get(key)) is not None:
            callbacks.append(on_done)
        else:
            self._waiting[key] = [on_done]
            task = asyncio.get_running_loop().create_task(self._run(key, document))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, key: bytes, document: dict[str, object]) -> None:
        result: CheckResult
        try:
            result = await self._check(document)
            self._store(key, result)
        except QuireError as error:
            # This error is not cached, because its cause is a limit or the load. Another attempt can succeed.
            result = error
        for on_done in self._waiting.pop(key):
            on_done(result)

    async def _check(self, document: dict[str, object]) -> CheckResult:
        try:
            answer = await self._workers.ask(document)
        except WorkersBusy:
            raise Unavailable("structured_outputs: other constraints are being checked; try again") from None
        except WorkerTimeout:
            raise InvalidArgument(
                f"structured_outputs: checking takes longer than {self._check_timeout_s:g} s; simplify the constraint"
            ) from None
        except WorkerDied:
            raise InvalidArgument("structured_outputs: the constraint needs too much memory; simplify it") from None
        if "grammar" not in answer:
            return error_from_code(answer["error_code"], answer["error"])
        return str(answer["grammar"])

    def _store(self, key: bytes, result: CheckResult) -> None:
        self._cache[key] = result
        self.num_cached_bytes += _size(result)
        while self.num_cached_bytes > self._max_cache_bytes and self._cache:
            self.num_cached_bytes -= _size(self._cache.popitem(last=False)[1])


def _size(result: CheckResult) -> int:
    return _ENTRY_BYTES + len(str(result).encode(errors="replace"))
