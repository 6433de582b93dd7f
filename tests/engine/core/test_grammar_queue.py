# SPDX-License-Identifier: Apache-2.0
"""Sequences with grammars start in order once these are compiled, unless they are aborted; others do not wait."""

import asyncio
import gc
import threading

from quire_engine.core.grammar_queue import GrammarQueue
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import InvalidArgument
from quire_spec.protocol.messages import SequenceRequest


def request(sequence_id, grammar=None):
    return SequenceRequest(sequence_id, [1], SamplingParams(), grammar=grammar)


async def test_order_and_aborts():
    release, compiled, started = threading.Event(), [], []

    class Compiler:
        def compile(self, grammar):
            assert release.wait(10)
            compiled.append(grammar)
            if grammar == "wrong":
                raise InvalidArgument("wrong")
            if grammar == "b":
                raise BaseException("native code panicked")

    loop_errors: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: loop_errors.append(context))
    queue = GrammarQueue(Compiler, lambda client_id, request: started.append((client_id, request.id)))
    queue.warm_up()
    for sequence_id, grammar in ((1, "a"), (2, "a"), (3, "wrong"), (4, "b"), (5, None)):
        queue.start_when_compiled(7, request(sequence_id, grammar))
    queue.abort([4, 99])
    # The id is free again, and the new sequence is another one.
    queue.start_when_compiled(7, request(4, "c"))
    assert started == [(7, 5)]
    release.set()
    async with asyncio.timeout(10):
        while len(started) < 5:
            await asyncio.sleep(0.001)
    assert started == [(7, 5), (7, 1), (7, 2), (7, 3), (7, 4)]
    gc.collect()  # reports exceptions of futures that were not read
    assert not loop_errors
    assert compiled == ["a", "a", "wrong", "b", "c"]
