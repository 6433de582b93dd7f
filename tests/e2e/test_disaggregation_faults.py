# SPDX-License-Identifier: Apache-2.0
"""Two real services behind a double of llm-d's sidecar, with kv_load_failure_policy fail, and with a slow transfer, in
the middle of which processes end or hang."""

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request

import pytest
from support.kv_peer_relay import Relay
from support.kv_pods import forest, kv_pods, metric, num_leases, num_rows
from support.pd_sidecar import Sidecar
from support.quire_serve import example_document

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

BYTES_PER_SECOND = 400_000
"""See test_kv_peers.py."""


@pytest.fixture(scope="module")
def pods(tmp_path_factory):
    document = example_document()
    document["spec"]["engine"] |= {"maxModelLen": 512, "kvCacheOffloading": {"memory": "32Mi"}}
    flags = (f"--kv-transfer-bytes-per-second={BYTES_PER_SECOND}", "--kv-load-failure-policy=fail")
    flags += ("--prefill-local-tokens=64",)
    with kv_pods(document, tmp_path_factory.mktemp("disaggregation"), *flags) as pods:
        yield pods


def post(port, text, path="/v1/completions", timeout=60, **headers):
    """Return status, text and Retry-After."""
    body = {"model": "tales", "prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    headers = {name.replace("_", "-"): value for name, value in headers.items()} | {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, None, timeout) as response:
            return response.status, json.load(response)["choices"][0]["text"], None
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["error"]["message"], error.headers["Retry-After"]


class Read:
    """A request through the sidecar, whose blocks pass a relay."""

    def __init__(self, pods, on_half=None):
        self.relay = Relay(pods.addresses[0], port=next(pods.relay_ports), on_half=on_half)
        self.pods = pods
        port = int(self.relay.address.rpartition(":")[2])
        decoder = f"http://{pods.openai_addresses[1]}"
        self.sidecar = Sidecar(decoder, change_params=lambda params: params | {"remote_port": port})

    def __enter__(self):
        self.relay.__enter__()
        self.sidecar.__enter__()
        return self

    def __exit__(self, *args):
        self.sidecar.__exit__(*args)
        self.relay.__exit__(*args)

    def send(self, text, timeout=60):
        return post(self.sidecar.port, text, timeout=timeout, x_prefiller_host_port=self.pods.openai_addresses[0])


def test_the_sidecar_drives_both_pods(pods):
    prefill, decode = pods.services
    text = forest("Anna", num_days=6)
    with Read(pods) as read:
        status, output, _ = read.send(text)
        assert status == 200 and read.sidecar.statuses == [200]
    assert sum(metric(decode, "quire_kv_transfer_read_blocks_total").values()) >= 4
    assert post(prefill.ports["openai"], text)[:2] == (200, output)


def test_short_prompts_are_not_read(pods):
    before = metric(pods.services[1], "quire_kv_transfer_requested_blocks_total")[""]
    with Read(pods) as read:
        assert read.send(forest("Ben", num_days=3))[0] == 200
    assert metric(pods.services[1], "quire_kv_transfer_requested_blocks_total")[""] == before


def test_without_an_answer_of_the_prefill_pod(pods):
    """The sidecar retries, and returns its own status; older releases and the own driver ask the decode pod."""
    decode, closed = pods.services[1], f"127.0.0.1:{next(pods.relay_ports)}"
    text = forest("Clara")
    for falls_back, expected in ((False, 502), (True, 200)):
        with Sidecar(f"http://{pods.openai_addresses[1]}", falls_back) as sidecar:
            try:
                status, *_ = post(sidecar.port, text, x_prefiller_host_port=closed)
            except json.JSONDecodeError:
                status = 502
        assert status == expected and sidecar.statuses == [502] * 3
    status, message, retry_after = post(decode.ports["openai"], forest("Clemens"), x_prefiller_host_port=closed)
    assert (status, retry_after) == (503, "1") and "did not compute the prompt (unreachable)" in message


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_blocks_that_cannot_be_read_end_the_request_before_its_output(pods, fault):
    prefill, decode = pods.services
    pid = prefill.pid("kv_peer")
    with Read(pods, on_half=lambda: os.kill(pid, getattr(signal, fault))) as read:
        start = time.monotonic()
        status, message, retry_after = read.send(forest(f"David {fault}"))
        assert (status, retry_after) == (503, "1") and "cannot be read" in message
        assert time.monotonic() - start < 5
    if fault == "SIGSTOP":
        os.kill(pid, signal.SIGCONT)
    else:
        prefill.wait(lambda: prefill.is_restarted("kv_peer", pid), 20, "restarted")
    prefill.wait(lambda: prefill.status()["processes"]["kv_peer"]["state"] == "Ready", 20, "ready")
    assert decode.health()[0] == 200 and num_leases(prefill) == 0


def test_a_client_that_disconnects_pins_no_row(pods):
    prefill = pods.services[0]
    with Read(pods) as read:
        with pytest.raises(TimeoutError):
            read.send(forest("Emil"), timeout=1.0)
        # The sidecar itself does not disconnect from the decode pod.
        prefill.wait(lambda: not num_leases(prefill), 8, "released")


def test_a_decode_pod_that_hangs_loses_its_leases(pods):
    prefill, decode = pods.services
    stopped = [decode.pid("core")]
    with Read(pods, on_half=lambda: [os.kill(pid, signal.SIGSTOP) for pid in stopped]) as read:
        request = threading.Thread(target=read.send, args=(forest("Frida"),))
        request.start()
        prefill.wait(lambda: num_rows(prefill), 10, "leased")
        assert prefill.wait(lambda: not (num_leases(prefill) or num_rows(prefill)), 40, "expired") < 34
        os.kill(stopped[0], signal.SIGCONT)
        request.join(30)
    assert decode.health()[0] == 200


def test_a_drain_waits_for_the_pods_that_read(pods):
    """The last test, because it ends the pods."""
    prefill, decode = pods.services
    text = forest("Gustav")
    _, expected, _ = post(prefill.ports["openai"], text)
    with Read(pods, on_half=lambda: prefill.process.send_signal(signal.SIGTERM)) as read:
        status, output, _ = read.send(text)
        assert (status, output) == (200, expected)
    start = time.monotonic()
    # It does not wait for 30 s, as it would for leases that do not end.
    assert prefill.process.wait(60) == 0 and time.monotonic() - start < 25
    prefill.assert_nothing_left()
    assert decode.health()[0] == 200
