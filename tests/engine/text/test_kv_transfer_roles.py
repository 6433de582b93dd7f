# SPDX-License-Identifier: Apache-2.0
"""The object kv_transfer_params: the response of a prefill pod is the request of a decode pod, and wrong objects are
refused by the name of the field."""

import asyncio
from typing import Any

import msgspec
import pytest

from quire_engine.text.admission.kv_transfer_roles import KVTransferRoles
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.kv_transfer_config import KVTransferConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import InvalidArgument
from quire_spec.protocol.kv_transfer_params import KVTransferParams, PromptKeys
from quire_spec.protocol.messages import GenerateRequest

REQUEST = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
"""What llm-d's sidecar and vllm-router send to a prefill pod."""
KEYS = PromptKeys("0" * 64, 48, "f" * 64)


def roles(
    allowed: tuple[str, ...] | None = ("10.0.0.0/8:8005", "[fd00::/8]:8005"), address: str = "10.0.0.1", **fields: Any
) -> KVTransferRoles:
    transfer = None if allowed is None else KVTransferConfig("key", allowed_peers=allowed)
    return KVTransferRoles(EngineConfig("", kv_transfer=transfer, **fields), "m", address)


def generate(document: dict[str, Any], stream: bool = False) -> GenerateRequest:
    params = msgspec.convert(document, KVTransferParams)
    return GenerateRequest(1, "m", "x", None, SamplingParams(), stream, kv_transfer_params=params)


def with_source(end: KVTransferRoles, document: dict[str, Any], stream: bool = False) -> GenerateRequest:
    return asyncio.run(end.with_source(generate(document, stream)))


@pytest.mark.parametrize(("address", "expected"), [("10.0.0.1", "10.0.0.1:8005"), ("fd00::1", "[fd00::1]:8005")])
def test_the_response_of_a_prefill_pod_names_its_blocks(address: str, expected: str) -> None:
    end = roles(address=address)
    assert with_source(end, REQUEST) == generate(REQUEST)
    document = end.response(generate(REQUEST), "cmpl-1", KEYS)
    assert document is not None and document["remote_request_id"] == "cmpl-1" and document["do_remote_prefill"]
    # Routers add fields, and the object passes through JSON.
    copied = msgspec.json.decode(msgspec.json.encode(document | {"other": {"a": 1}}))
    for policy in ("recompute", "fail"):
        request = with_source(roles(kv_load_failure_policy=policy), copied, stream=True)
        assert (request.kv_source, request.kv_source_required) == (expected, policy == "fail")
        assert request.kv_transfer_params is not None and request.kv_transfer_params.quire == KEYS
    assert roles().response(generate(copied), "x", None) is None
    assert with_source(roles(None), copied).kv_source == "", "a pod without peers computes the prompt"


@pytest.mark.parametrize(
    ("changes", "stream", "message"),
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
def test_wrong_objects_are_refused(changes: dict[str, Any], stream: bool, message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^kv_transfer_params.{message}"):
        with_source(roles(), REQUEST | changes, stream)


def test_a_pod_that_serves_no_blocks_is_no_prefill_pod() -> None:
    with pytest.raises(InvalidArgument, match="does not serve its KV blocks"):
        with_source(roles(None), REQUEST)
    with pytest.raises(InvalidArgument, match="does not know its address; set the variable POD_IP"):
        with_source(roles(address=""), REQUEST)
