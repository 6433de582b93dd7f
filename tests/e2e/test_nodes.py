# SPDX-License-Identifier: Apache-2.0
"""Nodes, each a network namespace with its own `quire serve`: they serve one model, lose each other and form the
next group. Needs root."""

import asyncio
import contextlib
import http.client
import json
import shutil
import signal
import time

import pytest
from support.node_group import MODELS, PORTS, STORY, running_group, write_key
from support.node_namespaces import missing_for_namespaces
from support.quire_serve import EXAMPLES, StreamedResponse

pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(missing_for_namespaces()), reason=f"network namespaces need {missing_for_namespaces()}"),
]

LONG = {"max_tokens": 1800, "ignore_eos": True, "temperature": 0.8}
PARTITION_S = 60.0
STABLE_S = 31.0


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    with running_group(tmp_path_factory.mktemp("nodes")) as group:
        print(f"\ncold start: {group.wait_ready():.1f} s")
        yield group


def completion_with_schema(service):
    """Return the answer to a request with a grammar."""
    schema = {"type": "object", "properties": {"name": {"enum": ["Ann", "Bob"]}}, "required": ["name"]}
    body = {"model": "tales", "prompt": STORY, "max_tokens": 24, "temperature": 0}
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    response = service.request("openai", "/v1/completions", body)
    assert response.status == 200, response
    return response.body["choices"][0]["text"]


def check_texts(group, service):
    """Check that a group generates the texts of one process, also with adapters."""
    for model in MODELS:
        expected = service.text(model, STORY, max_tokens=40, temperature=0)
        assert group.leader.text(model, STORY, max_tokens=40, temperature=0) == expected


def test_three_nodes_of_two_ranks_generate_the_texts_of_one_process(service, tmp_path):
    """Six processes with a part of the weights. Before the tests that use `group`, which has the same addresses."""
    with running_group(tmp_path, num_nodes=3, num_ranks=2) as group:
        print(f"\ncold start of three nodes: {group.wait_ready():.1f} s")
        check_texts(group, service)
        num_workers = [len(group.processes(rank, "rank_worker_process")) for rank in range(3)]
        assert num_workers == [1, 2, 2], "node 0 has the core as its first rank"


def test_two_nodes_generate_the_texts_of_one_process(group, service):
    """With a grammar."""
    check_texts(group, service)
    assert json.loads(completion_with_schema(group.leader)) == json.loads(completion_with_schema(service))
    status = group.worker.status()
    assert (status["node_rank"], status["state"], status["generation"]) == (1, "ready", 1)
    metrics = group.worker.metrics()
    assert "quire_rank_ready 1" in metrics and "quire_rank_generation 1" in metrics


def lose(group, action):
    """Open streams, run `action`, and return the seconds until all streams have ended with UNAVAILABLE."""

    async def scenario() -> tuple[list[StreamedResponse], float]:
        streams, tasks = await group.leader.open_streams([*MODELS], STORY, **LONG)
        started = time.monotonic()
        await asyncio.to_thread(action)
        await asyncio.wait(tasks, timeout=30)
        return streams, max(stream.ended_at for stream in streams) - started

    streams, delay_s = asyncio.run(scenario())
    assert all("UNAVAILABLE" in str(stream.error) for stream in streams), [stream.error for stream in streams]
    return delay_s


def check_refused_with_retry_after(group):
    connection = http.client.HTTPConnection(group.leader.host, PORTS["openai"], timeout=20)
    body = json.dumps({"model": "tales", "prompt": STORY, "max_tokens": 2})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert (response.status, response.getheader("retry-after")) == (503, "1"), response.read()
    connection.close()


@pytest.mark.parametrize(
    ("rank", "module", "number"),
    [
        (1, "rank_worker_process", signal.SIGKILL),
        (1, "rank_worker_process", signal.SIGSTOP),
        (1, "rank_node_process", signal.SIGKILL),
        (1, "rank_node_process", signal.SIGSTOP),
        (0, "quire_engine.core", signal.SIGKILL),
        (0, "quire_engine.core", signal.SIGSTOP),
    ],
)
def test_lost_process_ends_requests_and_the_next_group_forms_in_place(group, rank, module, number):
    """No supervisor ends, so that no container would restart."""
    generation = group.worker.status()["generation"]
    supervisors = [service.process.pid for service in group.services]
    (victim,) = group.processes(rank, module)
    delay_s = lose(group, lambda: victim.send_signal(number))
    lost_at = time.monotonic()
    assert delay_s < 15.0, delay_s
    check_refused_with_retry_after(group)
    assert group.leader.health()[0] == 503
    group.wait_ready()
    print(f"\n{module} {number.name}: streams ended in {delay_s:.1f} s, ready {time.monotonic() - lost_at:.1f} s later")
    assert not victim.is_running()
    assert [service.process.pid for service in group.services] == supervisors
    status = group.worker.status()
    assert status["generation"] == generation + 1 and status["num_groups_lost"] > 0 and status["last_error"]
    assert len(group.processes(1, "rank_worker_process")) == len(group.processes(1, "rank_node_process")) == 1


def test_healed_partition_leaves_one_group(group):
    generation = group.worker.status()["generation"]
    with contextlib.ExitStack() as stack:
        delay_s = lose(group, lambda: stack.enter_context(group.nodes[1].partition(group.nodes[:1])))
        assert delay_s < 15.0, delay_s
        deadline = time.monotonic() + PARTITION_S - delay_s
        check_refused_with_retry_after(group)
        while time.monotonic() < deadline:
            assert group.leader.health()[0] == 503
            time.sleep(0.5)
        status = group.worker.status()
        assert status["state"] in ("connecting", "waiting", "starting"), status
        assert status["generation"] == generation and "no answer for 10 s" in status["last_error"]
    recovery_s = group.wait_ready()
    print(f"\npartition: streams ended in {delay_s:.1f} s, ready {recovery_s:.1f} s after the network was whole")
    assert group.worker.status()["generation"] == generation + 1
    for module in ("rank_worker_process", "rank_node_process"):
        assert len(group.processes(1, module)) == 1
    assert len(group.processes(0, "quire_engine.core")) == 1


def test_killed_supervisor_and_a_node_that_may_not_join(group, tmp_path):
    """A node with another key or other weights is refused with the reason, and the right one joins after it."""
    # A group that lasted ends the long pauses after all the lost ones.
    time.sleep(STABLE_S)
    delay_s = lose(group, group.worker.kill)
    assert delay_s < 15.0, delay_s
    group.worker.assert_nothing_left()
    model = tmp_path / "other-model"
    shutil.copytree(EXAMPLES / "models/tiny", model)
    weights = next(model.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-8:] = b"\0" * 8
    weights.write_bytes(content)
    for name, reason, changes in (
        ("wrong-key", "use the same key on all nodes", {"key": write_key(tmp_path / "key", "o")}),
        ("wrong-model", "model: is 'sampled-sha256", {"model": model}),
    ):
        wrong = group.start(1, name, **changes)
        try:
            wrong.wait(lambda w=wrong, r=reason: r in w.health()[1].get("reason", ""), 60, reason)
            assert "on node 0 and" in wrong.status()["last_error"] or name == "wrong-key"
            assert wrong.process.poll() is None
            assert group.leader.health()[0] == 503
        finally:
            assert wrong.stop() == 0
    group.services[1] = group.start(1)
    group.wait_ready()


def test_sigterm_of_both_nodes_lets_an_open_request_end(group):
    """The last test, because it ends the services. The worker computes until its leader has drained."""
    stream = StreamedResponse()

    async def drained() -> None:
        parameters = LONG | {"max_tokens": 300, "return_finish_reason": True}
        task = asyncio.create_task(group.leader.http_stream("tales", STORY, stream, **parameters))
        while not stream.pieces:
            await asyncio.sleep(0.02)
        for service in reversed(group.services):
            service.child_processes()
            service.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        assert group.worker.status()["state"] == "draining"
        await asyncio.wait_for(task, 60)

    asyncio.run(drained())
    assert (stream.error, stream.events[-1]["finish_reason"]) == (None, "length")
    assert [service.process.wait(60) for service in group.services] == [0, 0]
    for service in group.services:
        service.assert_nothing_left()
