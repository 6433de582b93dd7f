# SPDX-License-Identifier: Apache-2.0
"""Admission control: decides which requests the text process accepts, and gives the reason for each rejection.

Policy only: no socket, no clock, no thread. The request manager calls it for every request. A rejection takes only
microseconds.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType

import msgspec

from quire_engine.requests.limits import RequestLimits
from quire_engine.requests.request_adapter import AdapterPart, RequestAdapter
from quire_engine.text.admission.adapter_versions import AdapterVersions, base_name, version_of
from quire_engine.text.admission.api_key_access import ApiKeyAccess
from quire_spec.constants import AdapterDigest, AdapterName
from quire_spec.documents.adapter_catalog import allows_name
from quire_spec.documents.adapter_sum import WeightedAdapter, parse_sum, sum_digest
from quire_spec.errors import InvalidArgument, NotFound, Unavailable
from quire_spec.protocol.messages import GenerateRequest

_MAX_LISTED_NAMES = 10


class AdmissionController:
    """Accepts or rejects requests; owns the table of adapter names. Only its methods change its state."""

    def __init__(
        self,
        limits: RequestLimits,
        served_name: str,
        max_num_queued_reqs: int,
        api_key_access: ApiKeyAccess | None = None,
    ) -> None:
        """`max_num_queued_reqs`: see EngineConfig. Without `api_key_access`, every API key may use every adapter."""
        self.limits = limits
        self.api_key_access = api_key_access or ApiKeyAccess()
        self.max_num_queued_reqs = max_num_queued_reqs
        self.digest_by_name: Mapping[AdapterName, AdapterDigest] | None = None
        """Maps the names of adapters to their digests. The mapping is never changed, but only replaced by a new one.
        None until the supervisor has sent the names."""
        self.chat_template_by_name: Mapping[str, str] = {}
        """Maps the names of adapters to the files of their chat templates. It contains only adapters that have their
        own template."""
        self.loading_names: Set[str] | None = None
        """Adapters that requests can name as soon as they are loaded; None until the supervisor has sent the names."""
        self._parts_by_sum: Mapping[AdapterName, tuple[WeightedAdapter, ...]] = {}
        """The parts of the weighted sums that have a name."""
        self.versions = AdapterVersions()
        self.findable_names: Sequence[str] = ()
        """Patterns of the names that the supervisor can look up in the adapter sources."""
        self.closed_reason = "engine core is starting; try again"
        """Reason why all requests are rejected at the moment; empty while requests are accepted."""
        self.draining = False
        self.served_name = served_name

    def open(self) -> None:
        """Accept requests from now on, because the engine core is connected."""
        self.closed_reason = ""

    def close(self, reason: str) -> None:
        """Reject all requests with `reason` until `open` is called."""
        self.closed_reason = reason

    def start_draining(self) -> None:
        """Reject all requests from now on."""
        self.draining = True

    def set_adapters(
        self,
        digest_by_name: Mapping[AdapterName, AdapterDigest],
        chat_template_by_name: Mapping[str, str],
        findable_names: Sequence[str] = (),
        sum_by_name: Mapping[AdapterName, str] = MappingProxyType({}),
    ) -> None:
        """Replace the adapters that requests can name, the files of their chat templates, and the patterns of further
        names that the supervisor can look up."""
        self.digest_by_name, self.chat_template_by_name = dict(digest_by_name), dict(chat_template_by_name)
        self.findable_names = tuple(findable_names)
        self._parts_by_sum = {name: parse_sum(text) for name, text in sum_by_name.items()}

    def set_loading_adapters(self, names: Set[str]) -> None:
        """Replace the names of adapters that are being loaded."""
        self.loading_names = names

    def choose_version(self, request: GenerateRequest, session: str) -> GenerateRequest:
        """Return a request with the version of its adapter that its session gets. `session` is used if the request has
        none."""
        if not self.api_key_access.allows(request.api_key_name, AdapterName(request.model)):
            return request
        model = self.versions.choose(request.model, request.session or session, self.digest_by_name or {})
        return request if model == request.model else msgspec.structs.replace(request, model=model)

    def admit(self, request: GenerateRequest, queued_by_client: Counter[str]) -> RequestAdapter:
        """Check a new request. Return its adapter; see `resolve_model`.

        `queued_by_client` counts the requests of each client that have not started.

        Raises:
            Unavailable: the server is draining, the engine core is not connected, or max_num_queued_reqs is reached.
            NotFound: the model name is unknown.
            InvalidArgument: a parameter or the prompt is invalid.
        """
        if self.draining:
            raise Unavailable("this server is draining; send the request to another one")
        if self.closed_reason:
            raise Unavailable(self.closed_reason)
        adapter = self.resolve_model(request.model, request.api_key_name)
        self.limits.check(request, bool(adapter.missing_names) or request.model in self.chat_template_by_name)
        self._check_queue(request.client, queued_by_client)
        return adapter

    def _check_queue(self, client: str, queued_by_client: Counter[str]) -> None:
        """Raise Unavailable if the queue is full. A client with less than its share of the queue can then still have
        requests, until the queue is twice as long.
        """
        num_queued, limit = queued_by_client.total(), self.max_num_queued_reqs
        share = limit // (1 + len(queued_by_client))
        if num_queued >= 2 * limit or (num_queued >= limit and queued_by_client[client] >= share):
            raise Unavailable(
                f"{num_queued} requests are waiting and max_num_queued_reqs is {limit}; try again later, or raise "
                "max_num_queued_reqs"
            )

    def visible_adapters(self, api_key_name: str) -> dict[AdapterName, AdapterDigest]:
        """Return the adapters that an API key may use, with their digests. An empty name is a request without a key."""
        access, adapters = self.api_key_access, self.digest_by_name or {}
        return {
            name: digest
            for name, digest in adapters.items()
            if access.allows(api_key_name, AdapterName(base_name(name)))
        }

    def visible_sums(self, api_key_name: str) -> set[AdapterName]:
        """Return the names of weighted sums that an API key may use: it may use the name and each adapter."""
        allows = self.api_key_access.allows
        return {
            name
            for name, parts in self._parts_by_sum.items()
            if all(allows(api_key_name, each) for each in (name, *(part.name for part in parts)))
        }

    def sum_digests(self) -> dict[AdapterName, AdapterDigest]:
        """Return the digests of the weighted sums that have a name and whose adapters are loaded."""
        digests = self.digest_by_name or {}
        return {
            name: sum_digest([(digests[part.name], part.weight) for part in parts])
            for name, parts in self._parts_by_sum.items()
            if all(part.name in digests for part in parts)
        }

    def visible_loading_names(self, api_key_name: str) -> set[AdapterName]:
        """Return the adapters that are being loaded and that an API key may use."""
        names = map(AdapterName, self.loading_names or ())
        return {n for n in names if self.api_key_access.allows(api_key_name, AdapterName(base_name(n)))}

    def resolve_model(self, model: str, api_key_name: str) -> RequestAdapter:
        """Return the adapter that a model name stands for, or the weighted sum of adapters (`a:0.7,b:0.3`). An adapter
        that the supervisor must look up first has no digest. An adapter that the API key may not use does not exist for
        it.

        Raises:
            NotFound: a name is unknown.
            InvalidArgument: the sum of adapters is invalid.
            Unavailable: an adapter is not loaded yet.
        """
        if model == self.served_name:
            return RequestAdapter()
        adapter_name = AdapterName(model)
        if adapter_name in self._parts_by_sum and adapter_name not in self.visible_sums(api_key_name):
            raise self.unknown_model(model, api_key_name)
        if not (adapters := self._parts_by_sum.get(adapter_name) or parse_sum(model)):
            return RequestAdapter(adapter_name, self._resolve_adapter(model, api_key_name))
        names = [adapter.name for adapter in adapters]
        if self.served_name in names:
            raise InvalidArgument(f"adapters {model[:100]!r}: {self.served_name!r} is the base model; remove it")
        if nested := [name for name in names if name in self._parts_by_sum]:
            raise InvalidArgument(f"adapters {model[:100]!r}: {nested[0]!r} is a sum itself; add its adapters")
        parts = (AdapterPart(a.name, self._resolve_adapter(a.name, api_key_name), a.weight) for a in adapters)
        return RequestAdapter.of_sum(adapter_name, tuple(parts))

    def _resolve_adapter(self, model: str, api_key_name: str) -> AdapterDigest | None:
        if self.digest_by_name is None and self.loading_names is None:
            raise Unavailable(f"model {str(model)[:100]!r}: adapter names are not known yet after a restart; try again")
        adapter_name = AdapterName(model)
        if self.api_key_access.allows(api_key_name, AdapterName(base_name(model))):
            if (adapter_digest := (self.digest_by_name or {}).get(adapter_name)) is not None:
                return adapter_digest
            if model in (self.loading_names or ()):
                raise Unavailable(f"model {model!r}: the adapter is not loaded yet; try again")
            if not version_of(model) and any(allows_name(pattern, model) for pattern in self.findable_names):
                return None
        raise self.unknown_model(model, api_key_name)

    def unknown_model(self, model: str, api_key_name: str) -> NotFound:
        """Return the error for a name that is unknown, or that the API key may not use."""
        # The message contains a sentence of vllm_backend, because clients of vllm_backend search for it.
        name, adapter_names = (
            str(model)[:100],
            sorted({*self.visible_adapters(api_key_name), *self.visible_sums(api_key_name)}),
        )
        num_unlisted = len(adapter_names) - _MAX_LISTED_NAMES
        return NotFound(
            f"model {name!r} is not served; the base model is {self.served_name!r}: LoRA {name} is not supported, we "
            f"currently support "
            f"{adapter_names[:_MAX_LISTED_NAMES]}" + (f" and {num_unlisted} more" if num_unlisted > 0 else "")
        )
