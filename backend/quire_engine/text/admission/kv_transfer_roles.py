# SPDX-License-Identifier: Apache-2.0
"""The two roles of a pod for requests with kv_transfer_params: prefill and decode (kv_transfer_params.py).

The request manager calls it, for the requests of all frontends.
"""

from typing import Any

from msgspec.structs import replace

from quire_spec.engine.config import EngineConfig
from quire_spec.protocol import kv_transfer_params
from quire_spec.protocol.allowed_peers import AllowedPeers
from quire_spec.protocol.kv_transfer_params import PromptKeys
from quire_spec.protocol.messages import GenerateRequest


class KVTransferRoles:
    """Finds where a decode pod reads, and makes the object in the response of a prefill pod."""

    def __init__(self, config: EngineConfig, served_name: str, advertised_host: str) -> None:
        """`advertised_host` is the address at which other pods reach this pod; empty if it is not known."""
        self._config = config
        self._served_name = served_name
        self._advertised_host = advertised_host
        self._allowed_peers = AllowedPeers(config.kv_transfer)

    async def with_source(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with the pod from which the blocks of its prompt are read, if its object names one and
        this pod reads from others.

        Raises:
            InvalidArgument: the object is contradictory or incomplete, names a pod that is not allowed, or this pod
                does not serve its blocks.
        """
        if (params := request.kv_transfer_params) is None:
            return request
        params.check_role()
        if params.do_remote_decode:
            self._check_prefill(request)
        if (peer := params.source()) is None:
            return request
        source = await self._allowed_peers.allow(peer, f"{kv_transfer_params.FIELD}.remote_host")
        is_required = bool(source) and self._config.kv_load_failure_policy == "fail"
        return replace(request, kv_source=source or request.kv_source, kv_source_required=is_required)

    def response(self, request: GenerateRequest, request_id: str, keys: PromptKeys | None) -> dict[str, Any] | None:
        """Return the object in the response of a request that `with_source` has accepted; None if it is not for a
        prefill pod."""
        params, transfer = request.kv_transfer_params, self._config.kv_transfer
        if params is None or not params.do_remote_decode or transfer is None:
            return None
        return kv_transfer_params.response(
            self._served_name,
            self._advertised_host,
            transfer.port,
            self._config.tensor_parallel_size,
            request_id,
            keys,
        )

    def _check_prefill(self, request: GenerateRequest) -> None:
        problem = ""
        if self._config.kv_transfer is None:
            problem = "this server does not serve its KV blocks; set kv_transfer"
        elif not self._advertised_host:
            problem = "this server does not know its address; set the variable POD_IP"
        elif request.stream:
            problem = "is true, so stream must be false: the object is in the response"
        if problem:
            raise kv_transfer_params.error("do_remote_decode", problem)
