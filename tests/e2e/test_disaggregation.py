# SPDX-License-Identifier: Apache-2.0
"""Two real services: one computes the prompts of the other, whose requests name it in x-prefiller-host-port. It is
stopped and killed meanwhile."""

import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import psutil
import pytest
from support.kv_pods import ALWAYS_READ, forest, kv_pods, metric, num_leases
from support.quire_serve import example_document

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

LOCAL_TOKENS = 64


@pytest.fixture(scope="module")
def pods(tmp_path_factory):
    """Return the two services, which accept the API keys a and b. The second one computes prompts of up to LOCAL_TOKENS
    tokens by itself, and reads the others also when other programs make reads slow."""
    document = example_document()
    document["spec"]["engine"] |= {"maxModelLen": 512, "kvCacheOffloading": {"memory": "32Mi"}}
    folder = tmp_path_factory.mktemp("disaggregation")
    (folder / "keys").mkdir()
    for key in ("a", "b"):
        (folder / "keys" / key).write_text(f"key-{key}")
    flags = (
        f"--openai-api-keys-dir={folder / 'keys'}",
        f"--prefill-local-tokens={LOCAL_TOKENS}",
        ALWAYS_READ,
    )
    with kv_pods(document, folder, *flags) as pods:
        prefill, decode = pods.services
        names = {"prefill": prefill, "decode": decode, "prefiller": pods.openai_addresses[0]}
        yield SimpleNamespace(**names, address=pods.addresses[0], relay_ports=pods.relay_ports)


def send(service, path, body, key="a", timeout=60, **headers):
    """Return status and document, or the events of a stream."""
    url = f"http://127.0.0.1:{service.ports['openai']}{path}"
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    headers |= {"Content-Type": "application/json", "Authorization": f"Bearer key-{key}"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode(), headers), None, timeout
        ) as r:
            status, text = r.status, r.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read().decode()
    if text.startswith("data:"):
        return status, [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return status, json.loads(text)


def completion(text, **fields):
    return {"model": "tales", "prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}


def complete(service, text, prefiller=None, key="a", **headers):
    """Return the output and the number of cached tokens."""
    headers |= {} if prefiller is None else {"x_prefiller_host_port": prefiller}
    status, document = send(service, "/v1/completions", completion(text), key, **headers)
    assert status == 200, document
    return document["choices"][0]["text"], document["usage"]["prompt_tokens_details"]["cached_tokens"]


def results(pods):
    return metric(pods.decode, "quire_remote_prefills_total")


def count(pods, result):
    return results(pods).get(f'result="{result}"', 0)


def num_requests(service):
    return sum(metric(service, "vllm:request_success_total").values())


@pytest.mark.parametrize("model", ["tales", "pirate"])
@pytest.mark.parametrize("route", ["completions", "stream", "chat/completions", "responses", "messages"])
def test_the_other_pod_computes_the_prompt(pods, route, model):
    text = forest(f"Anna {route} {model}", num_days=12)
    before, path = (count(pods, "used"), num_requests(pods.prefill)), f"/v1/{route.replace('stream', 'completions')}"
    body = {"model": model, "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": text}]}
    if route in ("completions", "stream"):
        body = completion(text, model=model, stream=route == "stream")
    if route == "responses":
        body = {"model": model, "max_output_tokens": 8, "temperature": 0, "input": text}
    hits = metric(pods.decode, "vllm:external_prefix_cache_hits_total")[""]
    status, answer = send(pods.decode, path, body, x_prefiller_host_port=f"{pods.prefiller}, 10.0.0.1:8004")
    assert status == 200, answer
    assert metric(pods.decode, "vllm:external_prefix_cache_hits_total")[""] >= hits + 100
    assert (count(pods, "used"), num_requests(pods.prefill)) == (before[0] + 1, before[1] + 1)

    def output(answer):
        if isinstance(answer, list):
            return "".join(event["choices"][0]["text"] for event in answer)
        fields = answer.get("choices") or answer.get("output") or answer["content"]
        return [{name: value for name, value in field.items() if name != "id"} for field in fields]

    assert output(send(pods.prefill, path, body)[1]) == output(answer)


def test_short_and_cached_prompts_are_computed_here(pods):
    num_before, local = num_requests(pods.prefill), count(pods, "local")
    complete(pods.decode, "Once upon a time", pods.prefiller)
    text = forest("Ben")
    complete(pods.decode, text)
    complete(pods.decode, f"{text} And then", pods.prefiller)
    assert (num_requests(pods.prefill), count(pods, "local")) == (num_before, local + 2)


def test_only_allowed_pods_are_asked(pods):
    before = results(pods)
    for address in ("127.0.0.1:1", "10.0.0.1:8004", "http://a", f"{pods.prefiller}/x", "x" * 5000):
        status, document = send(
            pods.decode, "/v1/completions", completion(forest("Clara")), x_prefiller_host_port=address
        )
        assert status == 400 and "x-prefiller-host-port" in document["error"]["message"]
    assert results(pods) == before


def test_an_api_key_gets_no_blocks_of_another_one(pods):
    """The prefill pod gets the key of the client, so that both pods have the same salt."""
    text = forest("David")
    expected, _ = complete(pods.prefill, text)
    requested = metric(pods.decode, "quire_kv_transfer_read_blocks_total")[""]
    output, num_cached = complete(pods.decode, text, key="b", x_kv_cache_source_host_port=pods.address)
    assert (output, num_cached) == (expected, 0)
    assert metric(pods.decode, "quire_kv_transfer_read_blocks_total")[""] == requested
    text = forest("Emma")
    output, num_cached = complete(pods.decode, text, pods.prefiller, key="b")
    assert num_cached >= 100 and complete(pods.prefill, text, key="a")[1] == 0
    status, _ = send(
        pods.decode, "/v1/completions", completion(text), key="wrong", x_prefiller_host_port=pods.prefiller
    )
    assert status == 401


def test_no_pod_answers_at_the_address(pods):
    port = next(pods.relay_ports)
    text = forest("Frida")
    expected, _ = complete(pods.prefill, text)
    assert complete(pods.decode, text, f"127.0.0.1:{port}")[0] == expected
    assert count(pods, "unreachable") == 1
    assert complete(pods.decode, forest("Gustav"), f"127.0.0.1:{port}")[1] == 0
    assert count(pods, "skipped") == 1


def test_a_client_that_disconnects_ends_its_request_in_the_other_pod(pods):
    listener = socket.create_server(("127.0.0.1", next(pods.relay_ports)))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    body = completion(forest("Hanna"))
    with pytest.raises(TimeoutError):
        send(pods.decode, "/v1/completions", body, timeout=1, x_prefiller_host_port=address)
    connection, _ = listener.accept()
    connection.settimeout(5)
    while connection.recv(2**16):
        pass
    connection.close()
    listener.close()


def test_the_prefill_pod_is_stopped_for_a_while(pods):
    processes = [psutil.Process(pods.prefill.process.pid), *pods.prefill.child_processes()]
    text = forest("Ida")
    expected, _ = complete(pods.prefill, text)
    front = pods.prefill.pid("openai")
    before = count(pods, "deadline")
    os.kill(front, signal.SIGSTOP)
    try:
        start = time.monotonic()
        assert complete(pods.decode, text, pods.prefiller) == (expected, 0)
        assert 4 < time.monotonic() - start < 8 and count(pods, "deadline") == before + 1
        start = time.monotonic()
        complete(pods.decode, forest("Jakob"), pods.prefiller)
        assert time.monotonic() - start < 3
    finally:
        os.kill(front, signal.SIGCONT)
    assert all(process.is_running() for process in processes)
    deadline = time.monotonic() + 20
    number = 0
    while complete(pods.decode, forest(f"Klara {number}"), pods.prefiller)[1] == 0:
        assert time.monotonic() < deadline
        number += 1
        time.sleep(0.5)


def test_the_prefill_pod_is_killed_before_its_answer_and_while_it_is_read(pods):
    """The last test, because it ends the pod."""
    text = forest("Lena")
    expected, _ = complete(pods.prefill, text)
    core = pods.prefill.pid("core")
    os.kill(core, signal.SIGSTOP)
    killer = threading.Timer(1.0, pods.prefill.kill)
    killer.start()
    start = time.monotonic()
    assert complete(pods.decode, text, pods.prefiller)[0] == expected
    assert 0.5 < time.monotonic() - start < 5
    killer.join()
    assert count(pods, "unreachable") >= 1 and pods.decode.health()[0] == 200
    assert complete(pods.decode, forest("Mona"), pods.prefiller)[1] == 0
    assert num_leases(pods.decode) == 0
