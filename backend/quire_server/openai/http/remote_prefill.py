# SPDX-License-Identifier: Apache-2.0
"""`kv_transfer_params`: one pod computes the prompt (prefill), and another one generates the output (decode).

A router sends a request to a prefill pod, and copies the object in its response to the request for a decode pod. The
fields have vLLM's names, so that llm-d's sidecar and vllm-router drive both calls. Blocks have keys of their content
(docs/kv-peers.md), so the object contains only where the blocks are. If a request names a prefill pod in the header
x-prefiller-host-port, the decode pod itself sends the first of the two requests (docs/kv-peers.md).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from quire_server.openai.errors import ApiError
from quire_server.openai.http.allowed_peers import AllowedPeers
from quire_server.openai.http.message import HttpRequest
from quire_server.openai.http.prefillers import PrefillError, Prefillers
from quire_server.openai.settings import FrontSettings
from quire_server.openai.text_client import TextClient
from quire_spec.engine.kv_transfer_config import PeerAddress
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import QuireError
from quire_spec.protocol.messages import GenerateRequest
from quire_spec.protocol.results import UncachedPrompt

_FIELD = "kv_transfer_params"
_MIN_TIMEOUT_S = 5.0
_TIMEOUT_FACTOR = 4.0
"""A prefill pod has this many times as long as this pod would need to compute the prompt, and at least _MIN_TIMEOUT_S
seconds, because it can have other prompts in its queue."""
_OUTPUT_FIELDS = frozenset(
    {
        *("stream", "stream_options", "max_completion_tokens", "min_tokens", "n", "best_of", "echo", "logprobs"),
        *("top_logprobs", "use_beam_search", "length_penalty", "early_stopping", "return_token_ids", "logit_bias"),
        *("response_format", "structured_outputs", "thinking_token_budget"),
    }
)
"""Fields that change only the output. A prefill pod does not get them: they would cost time, or forbid one token."""
_FORWARDED_HEADERS = ("authorization", "x-api-key", "x-session-id", "traceparent")
"""Headers of the client that a prefill pod gets. It has the same API keys, and computes the prompt for the same client,
so that the blocks have the same salt in both pods. The headers that name pods are not among them: a prefill pod must
not ask further pods."""


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
        self._prefillers = Prefillers(
            None if settings.openai.sslCertfile is None else Path(settings.openai.sslCertfile)
        )

    async def close(self) -> None:
        """Close the connections to prefill pods."""
        await self._prefillers.close()

    def prompt(
        self, request: HttpRequest, path: str, document: Mapping[str, Any], params: SamplingParams
    ) -> "RemotePrompt | None":
        """Return the prompt of a request if another pod can compute it. `document` is the body of the request, as
        `path` accepts it; if it has kv_transfer_params, a router has already decided. A request for the log
        probabilities of its prompt needs the hidden states of all tokens, which are not sent."""
        pod = PeerAddress.parse(request.prefiller)
        if pod is None or document.get(_FIELD) is not None or params.prompt_logprobs is not None:
            return None
        headers = {
            name: request.headers[name.encode()].decode(errors="replace")
            for name in _FORWARDED_HEADERS
            if name.encode() in request.headers
        }
        headers |= {"content-type": "application/json", "x-request-id": request.request_id}
        return RemotePrompt(self, pod, path, headers, document)

    async def compute(self, prompt: "RemotePrompt", timeout_s: float) -> str:
        """Have a prefill pod compute a prompt, and return where its blocks are, as HOST:PORT.

        Raises:
            PrefillError: the pod did not compute it.
        """
        fields = {name: value for name, value in prompt.document.items() if name not in _OUTPUT_FIELDS}
        role = {"do_remote_decode": True, "do_remote_prefill": False}
        body = msgspec.json.encode(fields | {"max_tokens": 1, "stream": False, _FIELD: role})
        answer = await self._prefillers.post(prompt.pod, prompt.path, prompt.headers, body, timeout_s)
        try:
            params = msgspec.convert(answer.get(_FIELD), KVTransferParams)
            if source := await self.source(params, False):
                return source
        except (msgspec.ValidationError, ApiError) as error:
            raise PrefillError("invalid", str(error)[:300]) from error
        raise PrefillError("invalid", f"the answer has no {_FIELD} for a decode pod")

    @property
    def is_required(self) -> bool:
        """Whether a request fails if the prefill pod of its prompt fails."""
        return self._settings.engine.kv_load_failure_policy == "fail"

    @property
    def num_local_tokens(self) -> int:
        """A prompt of which at most this many tokens are not cached is computed here."""
        return self._settings.engine.prefill_local_tokens

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


class RemotePrompt:
    """The prompt of a request that names a prefill pod."""

    def __init__(
        self, owner: RemotePrefill, pod: PeerAddress, path: str, headers: Mapping[str, str], document: Mapping[str, Any]
    ) -> None:
        """`headers` and `document` are those of the request to the prefill pod, except what changes the output."""
        self._owner = owner
        self.is_required = owner.is_required
        self.pod = pod
        self.path = path
        self.headers = headers
        self.document = document

    async def compute(self, client: TextClient, requests: Sequence[GenerateRequest]) -> str:
        """Have the prefill pod compute the prompts of `requests`, and return where their blocks are, as HOST:PORT.
        Empty if this pod computes them, because they are short, or because the prefill pod failed.

        Raises:
            ApiError: the prefill pod failed, and kv_load_failure_policy is fail.
        """
        num_local, num_tokens, compute_s = self._owner.num_local_tokens, 0, 0.0
        try:
            for request in requests:
                args = {"request": request, "num_local_tokens": num_local}
                uncached = await client.call("uncached_prompt", UncachedPrompt, args)
                num_tokens += uncached.num_tokens
                compute_s += uncached.compute_s
        except QuireError:
            # The request itself ends with this error.
            return ""
        if num_tokens <= num_local:
            client.report_prefill("local")
            return ""
        timeout_s = max(_MIN_TIMEOUT_S, _TIMEOUT_FACTOR * compute_s)
        try:
            source = await self._owner.compute(self, timeout_s)
        except PrefillError as error:
            client.report_prefill(error.result)
            if self.is_required:
                problem = f"x-prefiller-host-port: {self.pod} did not compute the prompt ({error.result}); try again"
                raise ApiError(503, problem, retry_after_s=1.0) from error
            return ""
        client.report_prefill("used")
        return source


def _error(name: str, problem: str) -> ApiError:
    return ApiError(400, f"{_FIELD}.{name}: {problem}", _FIELD)
