# SPDX-License-Identifier: Apache-2.0
"""`kv_transfer_params`: one pod computes the prompt (prefill), and another one generates the output (decode).

A router sends a request to a prefill pod, and copies the object in its response to the request for a decode pod. The
fields have vLLM's names, so that llm-d's sidecar and vllm-router drive both calls. Blocks have keys of their content
(docs/kv-peers.md), so the object contains only where the blocks are.
"""

from typing import Any

import msgspec

from quire_server.openai.errors import ApiError
from quire_server.openai.http.allowed_peers import AllowedPeers
from quire_server.openai.settings import FrontSettings
from quire_spec.engine.kv_transfer_config import PeerAddress

_FIELD = "kv_transfer_params"


class KVTransferParams(msgspec.Struct, kw_only=True):
    """The object of a request. Fields that are not read here are those that routers copy."""

    do_remote_decode: bool | None = None
    """The request is for a prefill pod."""
    do_remote_prefill: bool | None = None
    """The request is for a decode pod, which reads the blocks of the prompt from a prefill pod."""
    remote_host: str | None = None
    remote_port: int | None = None
    """Where the prefill pod serves its KV blocks."""
    remote_engine_id: Any = None
    remote_request_id: Any = None
    remote_block_ids: Any = None
    tp_size: Any = None


class RemotePrefill:
    """Both ends of a prefill that is apart from the decode."""

    def __init__(self, settings: FrontSettings, allowed_peers: AllowedPeers) -> None:
        self._settings = settings
        self._allowed_peers = allowed_peers

    async def source(self, params: KVTransferParams | None, is_stream: bool) -> str:
        """Return the pod from which the blocks of the prompt are read, as HOST:PORT; empty if the object names none, or
        if this pod reads from no others.

        Raises:
            ApiError: the object is contradictory or incomplete, names a pod that is not allowed, or this pod does not
                serve its blocks.
        """
        if params is None:
            return ""
        if params.do_remote_decode and params.do_remote_prefill:
            raise _error("do_remote_decode", "is true, and so is do_remote_prefill; a request has one of the two roles")
        if params.do_remote_decode:
            if self._settings.engine.kv_transfer is None:
                raise _error("do_remote_decode", "this server does not serve its KV blocks; set kv_transfer")
            if not self._settings.advertised_host:
                raise _error("do_remote_decode", "this server does not know its address; set the variable POD_IP")
            if is_stream:
                raise _error("do_remote_decode", "is true, so stream must be false: the object is in the response")
        if not params.do_remote_prefill:
            return ""
        for name in ("remote_host", "remote_port"):
            if getattr(params, name) is None:
                raise _error(name, "missing, but do_remote_prefill is true; copy the object of the prefill response")
        host = f"[{params.remote_host}]" if ":" in str(params.remote_host) else params.remote_host
        if (peer := PeerAddress.parse(f"{host}:{params.remote_port}")) is None:
            raise _error("remote_host", "and remote_port are not the address of a server")
        return await self._allowed_peers.allow(peer, f"{_FIELD}.remote_host")

    def response(self, params: KVTransferParams | None, request_id: str) -> dict[str, Any] | None:
        """Return the object for the request to a decode pod; None if the request is not for a prefill pod.
        `request_id` is the id of the response."""
        transfer = self._settings.engine.kv_transfer
        if params is None or not params.do_remote_decode or transfer is None:
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._settings.served_name,
            "remote_request_id": request_id,
            # The decode pod asks for keys, not for numbers of blocks.
            "remote_block_ids": [],
            "remote_host": self._settings.advertised_host,
            "remote_port": transfer.port,
            "tp_size": self._settings.engine.tensor_parallel_size,
        }


def _error(name: str, problem: str) -> ApiError:
    return ApiError(400, f"{_FIELD}.{name}: {problem}", _FIELD)
