# SPDX-License-Identifier: Apache-2.0
"""The object kv_transfer_params: the response of a prefill pod is the request of a decode pod, and wrong objects are
refused by the name of the field."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from quire_server.openai.errors import ApiError
from quire_server.openai.http.allowed_peers import AllowedPeers
from quire_server.openai.http.remote_prefill import KVTransferParams, RemotePrefill
from quire_server.openai.settings import FrontSettings
from quire_spec.documents.pod_config import OpenAIConfig
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.kv_transfer_config import KVTransferConfig

REQUEST = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
"""What llm-d's sidecar and vllm-router send to a prefill pod."""


def remote_prefill(allowed=("10.0.0.0/8:8005", "[fd00::/8]:8005"), address="10.0.0.1"):
    transfer = None if allowed is None else KVTransferConfig("key", allowed_peers=allowed)
    engine = EngineConfig("", kv_transfer=transfer)
    settings = FrontSettings(Path(), "m", "0.0.0.0", OpenAIConfig(8004), engine=engine, advertised_host=address)
    return RemotePrefill(settings, AllowedPeers(transfer))


def source(end, document, is_stream=False):
    return asyncio.run(end.source(msgspec.convert(document, KVTransferParams), is_stream))


@pytest.mark.parametrize(("address", "expected"), [("10.0.0.1", "10.0.0.1:8005"), ("fd00::1", "[fd00::1]:8005")])
def test_the_response_of_a_prefill_pod_names_its_blocks(address, expected):
    end = remote_prefill(address=address)
    assert source(end, REQUEST) == ""
    document = end.response(msgspec.convert(REQUEST, KVTransferParams), "cmpl-1")
    assert document["remote_request_id"] == "cmpl-1" and document["do_remote_prefill"]
    # Routers add fields, and the object passes through JSON.
    copied = msgspec.json.decode(msgspec.json.encode(document | {"other": {"a": 1}}))
    assert source(remote_prefill(), copied, is_stream=True) == expected
    assert remote_prefill().response(msgspec.convert(copied, KVTransferParams), "x") is None
    assert source(remote_prefill(None), copied) == "", "a pod without peers computes the prompt"


@pytest.mark.parametrize(
    ("changes", "is_stream", "message"),
    [
        ({"do_remote_prefill": True}, False, "do_remote_decode: is true, and so is do_remote_prefill"),
        ({}, True, "do_remote_decode: is true, so stream must be false"),
        ({"do_remote_decode": False, "do_remote_prefill": True, "remote_port": 8005}, False, "remote_host: missing"),
        ({"do_remote_decode": None, "do_remote_prefill": True, "remote_host": "a"}, False, "remote_port: missing"),
        *(
            (
                {"do_remote_decode": None, "do_remote_prefill": True, "remote_host": host, "remote_port": port},
                True,
                text,
            )
            for host, port, text in (
                ("10.0.0.1", 8006, "remote_host: '10.0.0.1:8006' is not an allowed peer"),
                ("192.168.0.1", 8005, "remote_host: '192.168.0.1:8005' is not an allowed peer"),
                ("http://a/b", 8005, "remote_host: and remote_port are not the address"),
                ("10.0.0.1", 2**63 - 1, "remote_host: and remote_port are not the address"),
            )
        ),
    ],
)
def test_wrong_objects_are_refused(changes, is_stream, message):
    with pytest.raises(ApiError, match=f"^kv_transfer_params.{message}"):
        source(remote_prefill(), REQUEST | changes, is_stream)


def test_a_pod_that_serves_no_blocks_is_no_prefill_pod():
    with pytest.raises(ApiError, match="does not serve its KV blocks"):
        source(remote_prefill(None), REQUEST)
    with pytest.raises(ApiError, match="does not know its address; set the variable POD_IP"):
        source(remote_prefill(address=""), REQUEST)
