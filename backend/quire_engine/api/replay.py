# SPDX-License-Identifier: Apache-2.0
"""Runs requests on an engine at given times, and records when their tokens were generated.

The benchmark and the recordings of the simulator use it.
"""

import time
from collections.abc import Callable, Sequence

from tqdm import tqdm

from quire_engine.api.timeline import Timeline
from quire_engine.core.engine import Engine
from quire_spec.protocol.messages import SequenceRequest


def replay(
    engine: Engine,
    requests: Sequence[SequenceRequest],
    arrivals_s: Sequence[float],
    *,
    progress: bool = False,
    on_step: Callable[[float], None] | None = None,
) -> Timeline:
    """Run requests on an idle engine until all have finished.

    Args:
        engine: an engine without requests.
        requests: the requests, in the order of their arrival.
        arrivals_s: when each of them arrives, in seconds after the call.
        progress: show a progress bar on stderr.
        on_step: called after each step with its seconds. They contain everything since the end of the step before, or
            since the engine got work.

    Raises:
        QuireError: the engine failed.
    """
    timeline, num_added = Timeline(), 0
    start = now = last_end = time.perf_counter()
    with tqdm(total=len(requests), desc="requests", disable=not progress, dynamic_ncols=True) as bar:
        while num_added < len(requests) or engine.has_work:
            while num_added < len(requests) and start + arrivals_s[num_added] <= now:
                engine.add(requests[num_added])
                timeline.arrive(requests[num_added].id, arrivals_s[num_added])
                num_added += 1
            engine.read_pending_adapters()
            if not engine.has_work:
                time.sleep(max(0.0, start + arrivals_s[num_added] - time.perf_counter()))
                now = last_end = time.perf_counter()
                continue
            results = engine.step().results
            now = time.perf_counter()
            if on_step is not None:
                on_step(now - last_end)
            last_end = now
            for result in results:
                timeline.add(result, now - start)
                bar.update(result.finish_reason is not None)
    return timeline
