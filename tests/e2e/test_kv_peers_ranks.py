# SPDX-License-Identifier: Apache-2.0
"""Two real services whose blocks are divided between two ranks: one reads blocks of the other, and ranks are killed in
the middle of a read."""

import signal
import time

import pytest
from support.kv_peer_relay import Relay
from support.kv_pods import ALWAYS_READ, forest, kv_pods, metric, num_leases
from support.quire_serve import example_document
from support.thread_workers import rank_worker_processes

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

SCHEMA = {"type": "object", "properties": {"animal": {"enum": ["bear", "wolf"]}}, "required": ["animal"]}
GRAMMAR = {"response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}}


@pytest.fixture(scope="module")
def pods(tmp_path_factory):
    document = example_document()
    document["spec"]["engine"] |= {"maxModelLen": 512, "kvCacheOffloading": {"memory": "32Mi"}}
    document["spec"]["engine"]["tensorParallelSize"] = 2
    speed = "--kv-transfer-bytes-per-second=400000"
    with kv_pods(document, tmp_path_factory.mktemp("ranks"), speed, ALWAYS_READ, num_relays=16) as pods:
        yield *pods.services, pods.addresses[0], pods.relay_ports


def complete(service, text, model="tales", **fields):
    body = {"model": model, "prompt": text, "max_tokens": 12, "temperature": 0} | fields
    return service.request("openai", "/v1/completions", body)


def prefill_and_decode(pods, text, model="tales", before=lambda: None, on_half=None, **fields):
    """Return the answer of the decode pod, which reads the blocks of the prompt from the prefill pod. `before` runs
    between the two requests, and `on_half` in the middle of the read."""
    prefill, decode, _, ports = pods
    role = {"do_remote_decode": True, "do_remote_prefill": False}
    first = complete(prefill, text, model, max_tokens=1, kv_transfer_params=role, **fields)
    assert first.status == 200, first
    params = first.body["kv_transfer_params"]
    before()
    with Relay(pods[2], port=next(ports), on_half=on_half) as relay:
        params["remote_port"] = int(relay.address.rpartition(":")[2])
        return complete(decode, text, model, kv_transfer_params=params, **fields)


def signal_rank(service, number):
    (worker,) = rank_worker_processes(service.pid("core"))
    worker.send_signal(number)


def wait_restarted(service, core_pid):
    service.wait(lambda: service.is_restarted("core", core_pid), 60, "restarted")
    service.wait(lambda: service.health()[0] == 200, 60, "ready")


@pytest.mark.parametrize(("model", "fields"), [("tales", {}), ("pirate", {}), ("tales", GRAMMAR)])
def test_roles_apart_with_two_ranks_generate_the_text_of_one_rank(pods, service, model, fields):
    prefill, decode, _, _ = pods
    text = forest(f"Anna {model} {len(fields)}", num_days=7)
    answer = prefill_and_decode(pods, text, model, **fields)
    assert answer.status == 200 and answer.body["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    assert answer.body["choices"] == complete(service, text, model, **fields).body["choices"]
    assert not metric(decode, "quire_kv_transfer_errors_total") and num_leases(prefill) == 0


@pytest.mark.parametrize("fault", ["killed while it is read", "stopped before it copies blocks to host memory"])
def test_a_rank_of_the_holder_fails(pods, fault):
    """All ranks of the holder end. The reader uses what has arrived, and computes the rest."""
    prefill = pods[0]
    text, core = forest(f"Ben {fault}", num_days=12), prefill.pid("core")
    start = time.monotonic()
    if fault.startswith("killed"):
        answer = prefill_and_decode(pods, text, on_half=lambda: signal_rank(prefill, signal.SIGKILL))
    else:
        answer = prefill_and_decode(pods, text, before=lambda: signal_rank(prefill, signal.SIGSTOP))
    assert answer.status == 200 and time.monotonic() - start < 8
    wait_restarted(prefill, core)
    assert answer.body["choices"] == complete(prefill, text).body["choices"]
    assert num_leases(prefill) == 0


def test_a_rank_of_the_reader_is_killed_while_it_reads(pods):
    """Its requests end, as with any lost rank, and the holder releases its rows."""
    prefill, decode, _, _ = pods
    text, core = forest("Clara"), decode.pid("core")
    start = time.monotonic()
    assert prefill_and_decode(pods, text, on_half=lambda: signal_rank(decode, signal.SIGKILL)).status == 503
    assert time.monotonic() - start < 15
    prefill.wait(lambda: num_leases(prefill) == 0, 5, "released")
    wait_restarted(decode, core)
    answer = prefill_and_decode(pods, forest("David", num_days=7))
    assert answer.status == 200 and answer.body["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
