# SPDX-License-Identifier: Apache-2.0
"""Two real services of a model whose layers have states: one reads states and blocks of the other, whose process is
killed in the middle of a read."""

import os
import signal

import pytest
from support.kv_peer_relay import Relay
from support.kv_pods import ALWAYS_READ, forest, kv_pods, metric, num_leases
from support.quire_serve import example_document
from support.tiny_checkpoints import BASE, CHECKPOINTS, make_adapter, write_checkpoint
from support.tokenizer import byte_level, save_tokenizer

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def pods(tmp_path_factory):
    kind, overrides = CHECKPOINTS["qwen3_5"]
    sizes = {"vocab_size": 384, "max_position_embeddings": 2048}
    folder = tmp_path_factory.mktemp("qwen3_5")
    model = save_tokenizer(byte_level(), write_checkpoint(folder / "model", kind(**(BASE | overrides | sizes)), 1))
    document = example_document()
    document["spec"]["model"]["source"]["path"] = str(model)
    adapter = make_adapter(model, folder / "pirate", 0, r=4)
    document["spec"]["adapters"] = [{"name": "pirate", "source": {"path": str(adapter)}}]
    document["spec"]["engine"] |= {"maxModelLen": 1024, "kvCacheOffloading": {"memory": "32Mi"}}
    speed = "--kv-transfer-bytes-per-second=100000"
    with kv_pods(document, tmp_path_factory.mktemp("states"), speed, ALWAYS_READ) as pods:
        yield *pods.services, pods.addresses[0], pods.relay_ports


def complete(service, text, model="tales", **fields):
    body = {"model": model, "prompt": text, "max_tokens": 12, "temperature": 0, "ignore_eos": True} | fields
    answer = service.request("openai", "/v1/completions", body)
    assert answer.status == 200, answer
    return answer.body


def prefill_and_decode(pods, text, model="tales", **relay):
    """Return the answer of the decode pod, which reads the state and the blocks from the prefill pod."""
    prefill, decode, address, ports = pods
    role = {"do_remote_decode": True, "do_remote_prefill": False}
    params = complete(prefill, text, model, max_tokens=1, kv_transfer_params=role)["kv_transfer_params"]
    with Relay(address, port=next(ports), **relay) as relay:
        params["remote_port"] = int(relay.address.rpartition(":")[2])
        return complete(decode, text, model, kv_transfer_params=params)


@pytest.mark.parametrize("model", ["tales", "pirate"])
def test_one_pod_computes_the_prompt_and_another_one_continues_from_its_state(pods, model):
    prefill, decode, _, _ = pods
    text = forest("Anna", num_days=4)
    before = metric(decode, "quire_kv_transfer_read_states_total")[""]
    answer = prefill_and_decode(pods, text, model)
    assert answer["choices"] == complete(prefill, text, model)["choices"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
    assert metric(decode, "quire_kv_transfer_read_states_total")[""] == before + 1
    assert not metric(decode, "quire_kv_transfer_errors_total") and num_leases(prefill) == 0
    assert metric(prefill, "quire_host_states_stored_total")[""] > 0


def test_the_process_that_sends_is_killed_during_a_read(pods):
    prefill, decode, _, _ = pods
    pid, text = prefill.pid("kv_peer"), forest("Ben", num_days=5)
    answer = prefill_and_decode(pods, text, on_half=lambda: os.kill(pid, signal.SIGKILL), half_bytes=20_000)
    assert metric(decode, "quire_kv_transfer_errors_total")['reason="closed"'] == 1
    assert answer["choices"] == complete(prefill, text)["choices"]
    prefill.wait(lambda: prefill.is_restarted("kv_peer", pid), 20, "restarted")
    prefill.wait(lambda: prefill.status()["processes"]["kv_peer"]["state"] == "Ready", 20, "ready")
    assert num_leases(prefill) == 0
