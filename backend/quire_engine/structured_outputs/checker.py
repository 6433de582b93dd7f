# SPDX-License-Identifier: Apache-2.0
"""Checks the constraints of requests, and converts each constraint to the grammar text that the core compiles.

The checks run in worker processes that may die. Results are cached, so that the same constraint is not checked again.
The request processor of the text process uses this module.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from quire_engine.ipc.worker_pool import WorkerDied, WorkerPool, WorkersBusy, WorkerTimeout
from quire_engine.structured_outputs.composed_constraint import ComposedConstraint
from quire_spec.engine.structured_outputs import StructuredOutputsParams
from quire_spec.errors import InvalidArgument, QuireError, Unavailable, error_from_code

CPU_LIMIT_S = 2.0
"""A check may take this number of seconds of CPU time. The largest schemas in common use take about 20 ms."""
QUEUE_TIMEOUT_S = 30.0
"""A check may wait this number of seconds for a worker. This includes the start of the worker, which takes seconds if
the vocabulary is large.
"""
MAX_CACHE_BYTES = 64 * 2**20
_ENTRY_BYTES = 512


class GrammarChecker:
    """The checker of one checkpoint."""

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos_token_ids: Collection[int],
        cpu_limit_s: float = CPU_LIMIT_S,
        max_cache_bytes: int = MAX_CACHE_BYTES,
    ) -> None:
        config = {"folder": str(folder), "vocab_size": vocab_size, "eos_token_ids": sorted(eos_token_ids)}
        self._cpu_limit_s = cpu_limit_s
        module = "quire_engine.structured_outputs.check_worker"
        self._workers = WorkerPool(module, config, cpu_limit_s, QUEUE_TIMEOUT_S)
        self._max_cache_bytes = max_cache_bytes
        self._cache: OrderedDict[bytes, str | QuireError] = OrderedDict()
        """Maps the digest of a constraint to its grammar, or to the error that rejects it."""
        self.num_cached_bytes = 0
        self._running: dict[bytes, _Check] = {}
        """Checks for which requests wait, by the digest of the constraint."""

    def start(self) -> None:
        """Start the workers in the background, unless they already run."""
        self._workers.start()

    async def aclose(self) -> None:
        """End the workers."""
        await self._workers.aclose()

    async def check(self, constraint: StructuredOutputsParams | ComposedConstraint) -> str:
        """Return the grammar text of a constraint. A cached result is returned without waiting.

        Raises:
            InvalidArgument: the constraint cannot be enforced, or checking it takes too much CPU time or memory.
            Unavailable: other constraints are being checked, or the machine is busy.
        """
        document = constraint.to_mapping()
        key = hashlib.sha256(json.dumps(document, ensure_ascii=False).encode()).digest()
        if (result := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
        else:
            if (check := self._running.get(key)) is None:
                task = asyncio.get_running_loop().create_task(self._run(key, document))
                check = self._running[key] = _Check(task)
            check.num_waiters += 1
            try:
                result = await asyncio.shield(check.task)
            finally:
                check.num_waiters -= 1
                if not check.num_waiters:
                    # If the last request was cancelled, its check must not delay the checks of other requests.
                    del self._running[key]
                    check.task.cancel()
        if isinstance(result, QuireError):
            # A new instance, because a traceback would keep the request in memory as long as the cache.
            raise error_from_code(result.code, str(result))
        return result

    async def _run(self, key: bytes, document: dict[str, object]) -> str | QuireError:
        try:
            result = await self._check(document)
            self._store(key, result)
        except QuireError as error:
            # This error is not cached, because its cause is a limit or the load. Another attempt can succeed.
            result = error
        return result

    async def _check(self, document: dict[str, object]) -> str | QuireError:
        try:
            answer = await self._workers.ask(document)
        except WorkersBusy:
            raise Unavailable("structured_outputs: the server is too busy to check the constraint; try again") from None
        except WorkerTimeout:
            raise InvalidArgument(
                f"structured_outputs: checking takes more than {self._cpu_limit_s:g} s of CPU time; simplify the "
                "constraint"
            ) from None
        except WorkerDied:
            raise InvalidArgument("structured_outputs: the constraint needs too much memory; simplify it") from None
        if "grammar" not in answer:
            return error_from_code(answer["error_code"], answer["error"])
        return str(answer["grammar"])

    def _store(self, key: bytes, result: str | QuireError) -> None:
        self._cache[key] = result
        self.num_cached_bytes += _size(result)
        while self.num_cached_bytes > self._max_cache_bytes and self._cache:
            self.num_cached_bytes -= _size(self._cache.popitem(last=False)[1])


@dataclass(slots=True)
class _Check:
    """A check that is running or waits for a worker."""

    task: asyncio.Task[str | QuireError]
    num_waiters: int = 0
    """Number of requests that wait for the result."""


def _size(result: str | QuireError) -> int:
    return _ENTRY_BYTES + len(str(result).encode(errors="replace"))
