# SPDX-License-Identifier: Apache-2.0
"""Two real services: one reads KV blocks of the other, which is killed and stopped in the middle of a read."""

import http.client
import json
import os
import queue
import signal
import time

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from support.kv_peer_relay import Relay
from support.kv_pods import ALWAYS_READ, forest, kv_pods, metric, num_leases, num_rows
from support.quire_serve import example_document

from quire_engine.kv_transfer.peer_connection import PeerConnection
from quire_spec.engine.kv_transfer_config import PeerAddress
from quire_spec.protocol import kv_wire
from quire_spec.protocol.kv_wire import RowLayout
from quire_spec.protocol.protocol_error import ProtocolError

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

BYTES_PER_SECOND = 400_000
"""The holder sends about four blocks in a second, so that the read of a long prompt takes three seconds."""


@pytest.fixture(scope="module")
def pods(tmp_path_factory):
    """Return the holder, the reader, the address of the holder, and a port of a relay for each test."""
    document = example_document()
    document["spec"]["engine"] |= {"maxModelLen": 512, "kvCacheOffloading": {"memory": "32Mi"}}
    speed = f"--kv-transfer-bytes-per-second={BYTES_PER_SECOND}"
    with kv_pods(document, tmp_path_factory.mktemp("peers"), speed, ALWAYS_READ, num_relays=16) as pods:
        yield *pods.services, pods.addresses[0], pods.relay_ports


def complete(service, text, source=None, model="tales", timeout=60):
    """Return status, text and number of cached tokens."""
    connection = http.client.HTTPConnection("127.0.0.1", service.ports["openai"], timeout=timeout)
    body = {"model": model, "prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"} | ({"x-kv-cache-source-host-port": source} if source else {})
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
    finally:
        connection.close()
    if response.status != 200:
        return response.status, answer["error"]["message"], 0
    return 200, answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("model", ["tales", "pirate"])
def test_the_reader_uses_blocks_of_the_holder(pods, model):
    holder, reader, address, ports = pods
    text = forest("Anna", num_days=7)
    _, expected, _ = complete(holder, text, model=model)
    with Relay(address, port=next(ports)) as relay:
        status, output, num_cached = complete(reader, text, relay.address, model)
    assert (status, output) == (200, expected) and num_cached >= 80
    assert sum(metric(reader, "quire_kv_transfer_read_blocks_total").values()) > 0
    holder.wait(lambda: metric(holder, "quire_kv_transfer_sent_bytes_total")[""] > 0, 10, "counted")
    assert num_leases(holder) == 0


def test_the_status_names_what_differs_in_another_pod(pods):
    holder, _, address, _ = pods
    layout = RowLayout(kv_wire.VERSION, 32, "float32", "0/1", "model", "rows", 4096)
    key = kv_wire.read_key(holder.folder.parent / "key")
    assert holder.status()["kv_differences"] == []
    with pytest.raises(ProtocolError, match="differs in 'block_size'"):
        PeerConnection.open(PeerAddress.parse(address), key, layout, lambda: True)
    holder.wait(lambda: holder.status()["kv_differences"] == ["block_size"], 30, "reported")


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_one_pod_computes_the_prompt_and_another_one_generates(pods, path):
    """As llm-d's sidecar and vllm-router drive them: they copy the object of the first response."""
    prefill, decode, address, ports = pods
    text = forest(f"Emma {path}", num_days=6)
    body = {"model": "tales", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    body |= {"messages": [{"role": "user", "content": text}]} if path.startswith("chat") else {"prompt": text}
    role = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None, "remote_port": None}
    first = prefill.request("openai", f"/v1/{path}", body | {"max_tokens": 1, "kv_transfer_params": role})
    assert first.status == 200, first
    params = first.body["kv_transfer_params"]
    assert f"{params['remote_host']}:{params['remote_port']}" == address
    # Leases begin when the decode pod reads. A client that never sends the second request leaves none.
    assert num_leases(prefill) == num_rows(prefill) == 0
    with Relay(address, port=next(ports)) as relay:
        params["remote_port"] = int(relay.address.rpartition(":")[2])
        second = decode.request("openai", f"/v1/{path}", body | {"kv_transfer_params": params})
    assert second.status == 200 and "kv_transfer_params" not in second.body, second
    assert second.body["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    alone = prefill.request("openai", f"/v1/{path}", body)
    assert second.body["choices"] == alone.body["choices"]


@pytest.mark.parametrize("door", ["grpc", "generate"])
def test_both_roles_at_the_doors_of_the_server(pods, door):
    """The object is a parameter of the request, and an output of the response of the prefill pod."""
    prefill, decode, address, ports = pods
    text = forest(f"Ida {door}", num_days=6)
    role = {"do_remote_decode": True, "do_remote_prefill": False}
    first = infer(prefill, door, text, 1, kv_transfer_params=json.dumps(role))
    params = json.loads(first["kv_transfer_params"])
    assert f"{params['remote_host']}:{params['remote_port']}" == address
    assert params["quire"]["tokens"] >= 64 and len(params["quire"]["digest"]) == 64
    before = metric(decode, "vllm:external_prefix_cache_hits_total")[""]
    with Relay(address, port=next(ports)) as relay:
        params["remote_port"] = int(relay.address.rpartition(":")[2])
        second = infer(decode, door, text, 8, kv_transfer_params=json.dumps(params))
    assert metric(decode, "vllm:external_prefix_cache_hits_total")[""] >= before + 64
    assert "kv_transfer_params" not in second
    assert second["text_output"] == infer(prefill, door, text, 8)["text_output"]
    errors = metric(decode, "quire_kv_transfer_errors_total")
    params["quire"]["keys_root"] = "0" * 64
    assert infer(decode, door, forest("Jan"), 8, kv_transfer_params=json.dumps(params))["text_output"]
    after = metric(decode, "quire_kv_transfer_errors_total")
    assert after['reason="keys_root"'] == errors.get('reason="keys_root"', 0) + 1
    with pytest.raises(Exception, match=r"kv_transfer_params\.remote_host: '127\.0\.0\.1:1' is not an allowed peer"):
        infer(decode, door, text, 8, kv_transfer_params=json.dumps(params | {"remote_port": 1}))


def infer(service, door, text, max_tokens, **parameters):
    """Return the outputs of a request as texts."""
    parameters |= {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    if door == "generate":
        response = service.generate("tales", text, **parameters)
        if response.status != 200:
            raise RuntimeError(response.body)
        return response.body
    prompt = grpcclient.InferInput("text_input", [1], "BYTES")
    prompt.set_data_from_numpy(np.array([text.encode()], np.object_))
    answers = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(f"127.0.0.1:{service.ports['grpc']}") as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("tales", [prompt], parameters=parameters)
        result, error = answers.get(timeout=60)
        client.stop_stream()
    if error is not None:
        raise error
    names = [output["name"] for output in result.get_response(as_json=True)["outputs"]]
    return {name: result.as_numpy(name)[0].decode() for name in names}


def test_only_allowed_peers_are_read(pods):
    _, reader, _, _ = pods
    for source in ("127.0.0.1:1", "10.0.0.1:8005", "http://a", "x" * 5000):
        status, message, _ = complete(reader, "x", source)
        assert status == 400 and "x-kv-cache-source-host-port" in message


def test_a_cancelled_request_pins_no_row(pods):
    holder, reader, address, ports = pods
    complete(holder, forest("Ben"))
    with Relay(address, port=next(ports)) as relay:
        with pytest.raises(TimeoutError):
            complete(reader, forest("Ben"), relay.address, timeout=0.7)
        start = time.monotonic()
        holder.wait(lambda: not num_leases(holder), 5, "released")
        assert time.monotonic() - start < 1.0


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_process_that_serves_blocks_fails_during_a_read(pods, fault):
    """The answer only takes longer, the failure is counted, and the process serves again."""
    holder, reader, address, ports = pods
    text = forest(f"Clara {fault}")
    _, expected, _ = complete(holder, text)
    before, pid = metric(reader, "quire_kv_transfer_errors_total"), holder.pid("kv_peer")
    with Relay(address, port=next(ports), on_half=lambda: os.kill(pid, getattr(signal, fault))) as relay:
        start = time.monotonic()
        status, output, num_cached = complete(reader, text, relay.address)
        assert time.monotonic() - start < 5
    assert (status, output) == (200, expected) and 30 < num_cached < 150
    reason = {"SIGKILL": 'reason="closed"', "SIGSTOP": 'reason="deadline"'}[fault]
    after = metric(reader, "quire_kv_transfer_errors_total")
    assert after.get(reason, 0) == before.get(reason, 0) + 1
    if fault == "SIGSTOP":
        os.kill(pid, signal.SIGCONT)
    else:
        holder.wait(lambda: holder.is_restarted("kv_peer", pid), 20, "restarted")
    holder.wait(lambda: holder.status()["processes"]["kv_peer"]["state"] == "Ready", 20, "ready")
    assert holder.health()[0] == 200 and num_leases(holder) == 0
    text = forest(f"David {fault}", num_days=7)
    _, expected, _ = complete(holder, text)
    with Relay(address, port=next(ports)) as relay:
        status, output, num_cached = complete(reader, text, relay.address)
    assert (status, output) == (200, expected) and num_cached >= 80


def test_the_holder_is_killed_during_a_read(pods):
    """The last test, because it ends the holder."""
    holder, reader, address, ports = pods
    _, expected, _ = complete(holder, forest("Emma"))
    with Relay(address, port=next(ports), on_half=holder.kill) as relay:
        assert complete(reader, forest("Emma"), relay.address)[:2] == (200, expected)
    start = time.monotonic()
    assert complete(reader, forest("Felix"), address)[0] == 200
    assert time.monotonic() - start < 3
    assert reader.health()[0] == 200
