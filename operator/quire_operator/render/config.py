# SPDX-License-Identifier: Apache-2.0
"""ConfigMaps, Secrets and the ServiceAccount of a service: what its pods read, and who they are."""

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any

from quire_operator.render import names
from quire_operator.render.cluster import Cluster
from quire_operator.service import LLMService
from quire_spec.dataclass_json import drop_nulls
from quire_spec.documents.adapter_catalog import SecretRef, Source
from quire_spec.errors import ConfigError

MAX_MAP_BYTES = 1_000_000
"""A ConfigMap ends at 1 MiB, its metadata included."""
S3_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def engine_map(service: LLMService, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The ConfigMap of engine.json.

    It has what was decided and no defaults: those of a new release would change it, and restart the pods.
    """
    content = json.dumps(dict(arguments), indent=2, sort_keys=True)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": names.meta(service, names.engine(service, content)),
        "immutable": True,
        "data": {"engine.json": content},
    }


def catalogue_map(service: LLMService) -> dict[str, Any]:
    """The ConfigMap of adapters.json, for pods that start; running ones are told by the operator.

    Raises:
        ConfigError: it would be larger than a ConfigMap can be.
    """
    content = json.dumps(drop_nulls(service.catalogue().to_json()), separators=(",", ":"))
    if (size := len(content.encode())) > MAX_MAP_BYTES:
        raise ConfigError(
            f"spec.adapters: {len(service.spec.adapters)} adapters with their sources take {size} bytes, and "
            f"{MAX_MAP_BYTES} are possible; shorten the sources, or split the service"
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": names.meta(service, names.catalogue(service.name)),
        "data": {"adapters.json": content},
    }


def admin_secret(service: LLMService, cluster: Cluster) -> dict[str, Any]:
    """The Secret with the key of the pods' admin port."""
    return _secret(service, names.admin_key(service.name), {names.ADMIN_KEY: cluster.admin_key})


def credentials_secret(service: LLMService, cluster: Cluster) -> dict[str, Any] | None:
    """Copies of the Secrets that sources name, one JSON object for each; None when there are none.

    Copies, because mounting each by itself would make the pods' template depend on the adapters: adding one with a
    Secret of its own would restart the pods.
    """
    wanted = {ref.name for ref in secret_refs(service)}
    found = {name: json.dumps(dict(values)) for name, values in cluster.credentials.items() if name in wanted}
    return _secret(service, names.credentials(service.name), found) if found else None


def service_account(service: LLMService) -> dict[str, Any]:
    """The pods' identity: nothing is granted to it, but clouds may give it access to buckets."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": names.meta(service, service.name),
        "automountServiceAccountToken": False,
    }


def secret_refs(service: LLMService) -> list[SecretRef]:
    """Every Secret that a source names, with the key it uses; None: all keys."""
    catalogue = service.catalogue()
    return [
        ref for source in (service.spec.model.source, *(a.source for a in catalogue.adapters)) for ref in _refs(source)
    ]


def _refs(source: Source) -> Iterator[SecretRef]:
    if source.huggingFace is not None and source.huggingFace.tokenSecretRef is not None:
        yield source.huggingFace.tokenSecretRef
    if source.s3 is not None and source.s3.credentialsSecretRef is not None:
        yield from (SecretRef(source.s3.credentialsSecretRef.name, key) for key in S3_KEYS)
    if source.http is not None and source.http.headersSecretRef is not None:
        yield source.http.headersSecretRef


def _secret(service: LLMService, name: str, values: Mapping[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": names.meta(service, name),
        "type": "Opaque",
        "data": {key: base64.b64encode(value.encode()).decode() for key, value in sorted(values.items())},
    }
