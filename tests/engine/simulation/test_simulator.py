# SPDX-License-Identifier: Apache-2.0
"""The simulator runs the engine's own policies, so its times can be computed by hand or compared with real steps."""

import random
from dataclasses import replace

import pytest
from support.fake_runner import TokenEchoRunner
from support.simulation import CONFIG, INFO, MEMORY, NUM_BLOCKS, TINY, step_model

from quire_engine.core.engine import Engine
from quire_engine.simulation.recording import RecordingRunner, sequence_requests
from quire_engine.simulation.resource_costs import ResourceCosts
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


LORA = replace(CONFIG, enable_lora=True, max_loras=1, max_cpu_loras=2)


def with_adapters(*adapters, interval_s=1.0):
    return [TraceRequest(i * interval_s, 100, 1, (), adapter, line=i) for i, adapter in enumerate(adapters)]


def ttft_s(trace, costs, **options):
    return run(trace, step_model().with_costs(costs), **options).timeline.ttft_s()


def test_requests_wait_for_their_adapter():
    """A pod starts with the last two adapters in host memory, and with no adapter in its slot."""
    costs, step_s = ResourceCosts(adapter_read=0.3, adapter_copy=0.02), 0.002
    waits = ttft_s(with_adapters("a", "a", None, "b", "c", "b", "a"), costs, config=LORA)
    expected = [0.32, 0, 0, 0.32, 0.32, 0.02, 0.32]
    assert waits == pytest.approx([wait + step_s for wait in expected])


def test_a_request_delays_no_other_while_it_waits_for_an_adapter():
    costs = ResourceCosts(adapter_read=0.3, adapter_copy=0.02)
    assert ttft_s(with_adapters("a", None, interval_s=0.0), costs, config=LORA) == pytest.approx([0.022, 0.002])


def test_the_dispatch_of_a_pod_knows_the_adapters_of_its_cores():
    config = replace(LORA, data_parallel_size=2)
    model = step_model().with_costs(ResourceCosts(adapter_copy=0.02))
    trace = with_adapters(*"abaabbabbaab", interval_s=0.1)
    assert run(trace, model, config=config).num_adapter_evictions == 0
    assert run(trace, model, config=LORA).num_adapter_evictions == 7


def test_adapters_that_cannot_be_simulated_are_refused():
    trace = with_adapters(None, "a")
    with pytest.raises(InvalidArgument, match="line 1 of the trace: adapter 'a': the service has no adapters"):
        run(trace)
    with pytest.raises(InvalidArgument, match=r"adapter-copy: the recording does not contain .* --costs adapter-copy="):
        run(trace, config=LORA)


TIERS = replace(CONFIG, kv_offloading_size=128 / 1024)
"""Host memory for 128 blocks, twice as many as the device has."""


def evicted_prefix(num_others):
    """A document of 512 tokens is used twice, then other documents, then the first one again."""
    documents = [0, 0, *(d for d in range(1, num_others + 1) for _ in range(2)), 0]
    blocks = [tuple(range(100 * d, 100 * d + 16)) for d in documents]
    return [TraceRequest(float(i), 544, 8, (*b, 10_000 + i), line=i) for i, b in enumerate(blocks)]


@pytest.mark.parametrize("block_copy", [1e-5, 4e-5])
def test_blocks_return_from_host_memory(block_copy):
    trace, costs = evicted_prefix(2), ResourceCosts(block_copy=block_copy)
    computed, *_, restored = ttft_s(trace, costs, config=TIERS, num_blocks=66)
    assert computed == pytest.approx(3 * 0.001 + 544e-5)
    # All 32 blocks are copied by the step that computes the other tokens, because nothing else runs.
    assert restored == pytest.approx(0.001 + 32e-5 + 32 * block_copy)
    result = run(trace, step_model().with_costs(costs), config=TIERS, num_blocks=66)
    assert result.host_hit_share == pytest.approx(512 / (7 * 544 - 3 * 512))
    without = run(trace, step_model().with_costs(costs), num_blocks=66)
    assert without.host_hit_share == 0 and without.timeline.ttft_s()[-1] == pytest.approx(computed)


def test_blocks_are_computed_if_that_is_faster_than_copying():
    *_, last = ttft_s(evicted_prefix(2), ResourceCosts(block_copy=1e-3), config=TIERS, num_blocks=66)
    assert last == pytest.approx(3 * 0.001 + 544e-5)


def test_blocks_return_from_the_folder():
    config = replace(TIERS, kv_offloading_size=66 / 1024, kv_offloading_folder="/kv")
    trace, costs = evicted_prefix(6), ResourceCosts(block_copy=2e-5, folder_block=4e-5)
    model = step_model().with_costs(costs)
    result = run(trace, model, config=config, num_blocks=66)
    assert result.num_folder_read_blocks == 32
    assert result.timeline.ttft_s()[-1] == pytest.approx(32 * 4e-5 + 0.001 + 32e-5 + 32 * 2e-5)
    small = run(trace, model, config=replace(config, kv_offloading_folder_size=66 / 1024), num_blocks=66)
    assert small.num_folder_read_blocks == 0
    with pytest.raises(InvalidArgument, match="folder-block: the recording does not contain this time"):
        run(trace, step_model().with_costs(ResourceCosts(block_copy=1e-5)), config=config, num_blocks=66)


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
