# SPDX-License-Identifier: Apache-2.0
"""Queue of sequences whose grammars are not compiled yet.

A separate thread compiles the grammars, so that steps do not wait for them.

The core server owns the queue. Sequences with grammars keep their order; sequences without a grammar start at once.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from quire_engine.structured_outputs.compiler import GrammarCompiler
from quire_spec.errors import PROCESS_ENDS, QuireError
from quire_spec.protocol.messages import SequenceRequest

logger = logging.getLogger(__name__)


class GrammarQueue:
    """Compiles grammars before their sequences enter the engine. All methods run on the event loop."""

    def __init__(
        self, get_compiler: Callable[[], GrammarCompiler], start_sequence: Callable[[int, SequenceRequest], None]
    ) -> None:
        """`start_sequence` is called with a client id and a request; `get_compiler` can take seconds."""
        self._get_compiler = get_compiler
        self._start_sequence = start_sequence
        self._thread_pool = ThreadPoolExecutor(1, "compile-grammar")
        self._waiting: dict[int, SequenceRequest] = {}

    def warm_up(self) -> None:
        """Read the vocabulary in the background, so that the first sequence does not wait for it."""
        self._thread_pool.submit(self._try_get_compiler)

    def start_when_compiled(self, client_id: int, request: SequenceRequest) -> None:
        """Start a sequence. If it has a grammar, compile the grammar in the background first (vLLM `grammar_init`)."""
        if request.grammar is None:
            self._start_sequence(client_id, request)
            return
        self._waiting[request.id] = request
        future = asyncio.get_running_loop().run_in_executor(self._thread_pool, self._compile, request.grammar)
        future.add_done_callback(lambda _: self._on_compiled(client_id, request))

    def abort(self, sequence_ids: list[int]) -> None:
        """Drop sequences that have not started."""
        for sequence_id in sequence_ids:
            self._waiting.pop(sequence_id, None)

    def _on_compiled(self, client_id: int, request: SequenceRequest) -> None:
        # The object is compared, because another sequence can have the same id.
        if self._waiting.get(request.id) is request:
            del self._waiting[request.id]
            # If the grammar does not compile, the engine reports the error when the sequence starts.
            self._start_sequence(client_id, request)

    def _compile(self, grammar: str) -> None:
        try:
            self._get_compiler().compile(grammar)
        except PROCESS_ENDS:
            raise
        except BaseException as error:
            logger.info("grammar cannot be compiled error=%s: %s", type(error).__name__, str(error)[:200])

    def _try_get_compiler(self) -> None:
        # A model without a tokenizer has no grammars.
        with suppress(QuireError):
            self._get_compiler()
