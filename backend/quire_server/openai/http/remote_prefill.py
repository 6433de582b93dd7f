# SPDX-License-Identifier: Apache-2.0
"""Prompts that another pod computes (prefill), because a request names it in the header x-prefiller-host-port.

This pod sends it the request with kv_transfer_params (kv_transfer_params.py), as a router would do, and then handles
its own request with the object in the response.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from quire_server.openai.errors import ApiError
from quire_server.openai.http.message import HttpRequest
from quire_server.openai.http.prefillers import PrefillError, Prefillers
from quire_server.openai.settings import FrontSettings
from quire_server.openai.text_client import TextClient
from quire_spec.engine.kv_transfer_config import PeerAddress
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import InvalidArgument, QuireError
from quire_spec.protocol.allowed_peers import AllowedPeers
from quire_spec.protocol.kv_transfer_params import FIELD, KVTransferParams
from quire_spec.protocol.messages import GenerateRequest
from quire_spec.protocol.results import UncachedPrompt

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


class RemotePrefill:
    """The prefill pods that requests name."""

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
        if pod is None or document.get(FIELD) is not None or params.prompt_logprobs is not None:
            return None
        headers = {
            name: request.headers[name.encode()].decode(errors="replace")
            for name in _FORWARDED_HEADERS
            if name.encode() in request.headers
        }
        headers |= {"content-type": "application/json", "x-request-id": request.request_id}
        return RemotePrompt(self, pod, path, headers, document)

    async def compute(self, prompt: "RemotePrompt", timeout_s: float) -> KVTransferParams:
        """Have a prefill pod compute a prompt, and return the object in its response.

        Raises:
            PrefillError: the pod did not compute it.
        """
        fields = {name: value for name, value in prompt.document.items() if name not in _OUTPUT_FIELDS}
        role = {"do_remote_decode": True, "do_remote_prefill": False}
        body = msgspec.json.encode(fields | {"max_tokens": 1, "stream": False, FIELD: role})
        answer = await self._prefillers.post(prompt.pod, prompt.path, prompt.headers, body, timeout_s)
        try:
            params = msgspec.convert(answer.get(FIELD), KVTransferParams)
            params.check_role()
            if (peer := params.source()) is not None:
                await self._allowed_peers.allow(peer, f"{FIELD}.remote_host")
                return params
        except (msgspec.ValidationError, InvalidArgument) as error:
            raise PrefillError("invalid", str(error)[:300]) from error
        raise PrefillError("invalid", f"the answer has no {FIELD} for a decode pod")

    @property
    def is_required(self) -> bool:
        """Whether a request fails if the prefill pod of its prompt fails."""
        return self._settings.engine.kv_load_failure_policy == "fail"

    @property
    def num_local_tokens(self) -> int:
        """A prompt of which at most this many tokens are not cached is computed here."""
        return self._settings.engine.prefill_local_tokens


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

    async def compute(self, client: TextClient, requests: Sequence[GenerateRequest]) -> KVTransferParams | None:
        """Have the prefill pod compute the prompts of `requests`, and return the object in its response. None if this
        pod computes them, because they are short, or because the prefill pod failed.

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
            return None
        if num_tokens <= num_local:
            client.report_prefill("local")
            return None
        timeout_s = max(_MIN_TIMEOUT_S, _TIMEOUT_FACTOR * compute_s)
        try:
            params = await self._owner.compute(self, timeout_s)
        except PrefillError as error:
            client.report_prefill(error.result)
            if self.is_required:
                problem = f"x-prefiller-host-port: {self.pod} did not compute the prompt ({error.result}); try again"
                raise ApiError(503, problem, retry_after_s=1.0) from error
            return None
        client.report_prefill("used")
        return params
