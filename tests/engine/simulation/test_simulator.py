# SPDX-License-Identifier: Apache-2.0
"""The simulator runs the engine's own policies, so its times can be computed by hand or compared with real steps."""

import random
from dataclasses import replace

import pytest
from support.fake_runner import TokenEchoRunner
from support.simulation import CONFIG, INFO, MEMORY, NUM_BLOCKS, TINY, step_model

from quire_engine.core.engine import Engine
from quire_engine.simulation.recording import RecordingRunner, sequence_requests
from quire_engine.simulation.simulator import ROUTERS, simulate
from quire_engine.simulation.trace import TraceRequest
from quire_engine.weights.checkpoint import Checkpoint
from quire_spec.engine.speculative_config import SpeculativeConfig
from quire_spec.errors import InvalidArgument

BLOCK = 32


def run(trace, model=None, **options):
    options = {"num_blocks": NUM_BLOCKS, "block_tokens": BLOCK} | options
    return simulate(model or step_model(), options.pop("config", CONFIG), trace, **options)


def test_one_request_takes_the_time_of_its_steps():
    # 600 tokens are computed in chunks of 256, 256 and 88; then 9 steps decode a token each.
    result = run([TraceRequest(5.0, 600, 10)])
    ((arrival, times),) = result.timeline.requests()
    first = 5.0 + 3 * 0.001 + 600 * 1e-5
    assert arrival == 5.0 and times == pytest.approx([first + i * (0.001 + 1e-4) for i in range(10)])
    assert result.num_steps == 12 and result.outside_share == 0 and result.prefix_hit_share == 0


def test_a_request_that_arrives_during_a_step_waits_for_its_end():
    result = run([TraceRequest(0.0, 200, 1, line=1), TraceRequest(0.0001, 200, 1, line=2)])
    times = [tokens[0] for _, tokens in result.timeline.requests()]
    assert times == pytest.approx([0.003, 0.006])


def test_shared_beginnings_are_computed_once():
    trace = [TraceRequest(float(i), 320, 4, (*tuple(range(8)), 100 + i, 200 + i), line=i) for i in range(5)]
    assert run(trace).prefix_hit_share == pytest.approx(4 * 8 / 50)
    assert run(trace, config=replace(CONFIG, enable_prefix_caching=False)).prefix_hit_share == 0


def test_two_replicas_share_the_work():
    trace = [TraceRequest(0.0, 256, 8, line=i) for i in range(8)]
    one, two = run(trace), run(trace, num_replicas=2)
    assert two.timeline.duration_s < 0.6 * one.timeline.duration_s
    for options in ({"router": "round-robin"}, {"num_replicas": 1, "config": replace(CONFIG, data_parallel_size=2)}):
        assert run(trace, **{"num_replicas": 2} | options).timeline.latencies() == two.timeline.latencies()


def test_the_dispatch_of_a_pod_avoids_the_core_with_long_requests():
    trace = [TraceRequest(0.0, 900 if i % 2 else 32, 8, line=i) for i in range(24)]
    pod = run(trace, config=replace(CONFIG, data_parallel_size=2))
    assert pod.timeline.duration_s < 0.8 * run(trace, num_replicas=2, router="round-robin").timeline.duration_s


def test_equal_beginnings_run_on_one_core_of_a_pod():
    """Nine prompts of each document arrive, some at once and some later: most of them find the document."""
    documents = [tuple(range(100 * d, 100 * d + 8)) for d in range(7)]
    trace = [
        TraceRequest(i // 4 * 0.05, 288, 4, (*documents[i % 7], 10_000 + i), line=i) for i in range(9 * len(documents))
    ]
    pod = run(trace, config=replace(CONFIG, data_parallel_size=2))
    most = 8 / 9 * 256 / 288
    assert 0.95 * most < pod.prefix_hit_share <= most
    replicas = {router: run(trace, num_replicas=2, router=router) for router in ROUTERS}
    assert replicas["prefix-aware"].timeline.latencies() == pod.timeline.latencies()
    assert replicas["least-requests"].prefix_hit_share < 0.95 * most


@pytest.mark.parametrize("seed", range(5))
def test_the_steps_are_those_of_the_engine(seed):
    """The same requests, all at once, on an engine with a runner that checks the content of every KV block."""
    rng = random.Random(seed)
    trace = [
        TraceRequest(0.0, rng.randrange(1, 400), rng.randrange(1, 400), (rng.randrange(3),), line=i) for i in range(40)
    ]
    runner = RecordingRunner(TokenEchoRunner(66, CONFIG.block_size))
    config, memory = replace(CONFIG, async_scheduling=False), replace(MEMORY, num_blocks=66)
    engine = Engine(config, Checkpoint(TINY, INFO.shape, frozenset(), ""), runner, memory, lambda: 0.0)
    for request in sequence_requests(trace, 997, BLOCK, 1024):
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert engine.stats().num_preemptions > 0
    result = run(trace, num_blocks=66)
    assert (result.num_steps, result.num_preemptions) == (len(runner.started), engine.stats().num_preemptions)


def test_what_is_not_simulated_is_refused():
    with pytest.raises(InvalidArgument, match="line 7 of the trace: 1000 input and 100 output tokens exceed max_model"):
        run([TraceRequest(0.0, 1000, 100, line=7)])
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    with pytest.raises(InvalidArgument, match="speculative_config is not simulated"):
        run([TraceRequest(0.0, 10, 10)], config=replace(CONFIG, speculative_config=drafts))
