# SPDX-License-Identifier: Apache-2.0
"""Runs the checks of loaded adapters (adapter_probe.py) in the steps of the engine, with a time limit."""

import asyncio
from itertools import count
from pathlib import Path

from quire_engine.core.adapter_probe import (
    canary_request,
    check_canary,
    measure_effect,
    probe_requests,
    trained_tokens,
)
from quire_engine.core.engine import Engine
from quire_engine.core.engine_loop import EngineLoop
from quire_engine.core.internal_batch import InternalBatch
from quire_spec.constants import AdapterDigest
from quire_spec.documents.adapter_catalog import Canary
from quire_spec.errors import InvalidArgument, Unavailable
from quire_spec.protocol.messages import SequenceDelta, SequenceRequest
from quire_spec.protocol.results import AdapterCheck

PROBE_TIMEOUT_S = 120.0
"""Maximum time of an effect probe in seconds. It runs in a fraction of a second, but can wait for running requests."""


class AdapterVerifier:
    """Checks adapters that the engine has loaded."""

    def __init__(self, engine: Engine, engine_loop: EngineLoop) -> None:
        self._engine, self._engine_loop = engine, engine_loop
        self._ids = count(-1, -1)
        """Ids of internal sequences are negative. Those of clients are not."""

    async def verify(self, digest: AdapterDigest, folder: Path, canary: Canary | None) -> AdapterCheck:
        """Run the effect probe of an adapter, then its canary.

        Raises:
            InvalidArgument: the adapter fails a check.
            Unavailable: a check did not end in time.
        """
        special_tokens = await asyncio.to_thread(trained_tokens, folder)
        vocab_size, max_length = self._engine.shape.vocab_size, self._engine.max_model_len
        requests = probe_requests(digest, special_tokens, vocab_size, max_length, self._ids)
        effect = measure_effect(await self._run(requests, PROBE_TIMEOUT_S, "the effect probe"))
        if canary is None:
            return AdapterCheck(effect)
        tokenizer = await asyncio.to_thread(self._engine.input_processor.tokenizer)
        if tokenizer is None:
            raise InvalidArgument("canary: the model has no tokenizer; remove the canary")
        request = canary_request(digest, canary, tokenizer, max_length, self._ids)
        [deltas] = await self._run([request], canary.timeoutSeconds, "the canary")
        return AdapterCheck(effect, check_canary(canary, tokenizer, deltas))

    async def _run(self, requests: list[SequenceRequest], timeout_s: float, what: str) -> list[list[SequenceDelta]]:
        """Return the deltas of each sequence."""
        batch = InternalBatch(requests)
        self._engine_loop.run_internal(batch)
        try:
            async with asyncio.timeout(timeout_s):
                deltas = await asyncio.wrap_future(batch.future)
        except TimeoutError:
            raise Unavailable(f"{what} did not end within {timeout_s:g} s") from None
        finally:
            self._engine_loop.abort_internal(batch)
        return [deltas[request.id] for request in requests]
