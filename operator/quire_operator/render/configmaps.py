# SPDX-License-Identifier: Apache-2.0
"""ConfigMaps, Secrets and the ServiceAccount of a service. Called by objects.py."""

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from quire_operator.api.llmservice import LLMService
from quire_operator.render import object_names
from quire_operator.render.context import RenderContext
from quire_operator.render.manifests import Manifest, new_manifest
from quire_spec import constants
from quire_spec.dataclass_json import drop_nulls
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.documents.sources import SecretRef
from quire_spec.errors import ConfigError

MAX_CONFIGMAP_BYTES = 1_000_000
"""Maximum number of bytes of the content. Kubernetes limits a ConfigMap to 1 MiB, including its metadata."""


def engine_configmap(service: LLMService, document: Mapping[str, Any]) -> Manifest:
    """Return the ConfigMap that contains `document` as pod.json. If the spec contains the text of a chat template, the
    ConfigMap contains it too.

    For one release, it also contains engine.json, which images before pod.json read.
    """
    files = {constants.CONFIG_FILE: document, constants.ENGINE_FILE: document["engine"]}
    data = {name: json.dumps(content, indent=2, sort_keys=True) for name, content in files.items()}
    template = service.spec.openai.chatTemplate
    if template is not None and template.text is not None:
        data[object_names.CHAT_TEMPLATE_FILE] = template.text
    name = object_names.engine_configmap(service, "".join(data.values()))
    return new_manifest("v1", "ConfigMap", service, name, immutable=True, data=data)


def adapter_configmap(service: LLMService, catalog: AdapterCatalog) -> Manifest:
    """Return the ConfigMap that contains adapters.json. A pod reads it when it starts. The operator pushes later
    changes to the running pods.

    Raises:
        ConfigError: the content is too large for a ConfigMap.
    """
    content = json.dumps(drop_nulls(catalog.to_json()), separators=(",", ":"))
    if (size := len(content.encode())) > MAX_CONFIGMAP_BYTES:
        raise ConfigError(
            f"spec.adapters: {len(service.spec.adapters)} adapters with their sources need {size} bytes, but a "
            f"ConfigMap can have {MAX_CONFIGMAP_BYTES}; shorten the sources, or split the service"
        )
    name = object_names.adapter_configmap(service.name)
    return new_manifest("v1", "ConfigMap", service, name, data={constants.CATALOG_FILE: content})


def admin_secret(service: LLMService, context: RenderContext) -> Manifest:
    """Return the Secret that contains the key for the admin port of the pods, the key with which they read KV blocks
    from each other, and the key with which the pods of a group meet. The other keys follow from the first one, so that
    all are replaced together.

    All keys are always there: while a change of the spec replaces pods, containers of old pods can start again.
    """
    values = {
        object_names.ADMIN_KEY_FIELD: context.admin_key,
        object_names.KV_TRANSFER_KEY_FIELD: _derived_key(context, b"quire kv transfer"),
        object_names.RANK_KEY_FIELD: _derived_key(context, b"quire ranks"),
    }
    return _secret_manifest(service, object_names.admin_secret(service.name), values)


def _derived_key(context: RenderContext, purpose: bytes) -> str:
    return hmac.new(context.admin_key.encode(), purpose, hashlib.sha256).hexdigest()


def credentials_secret(service: LLMService, context: RenderContext) -> Manifest | None:
    """Return one Secret that contains copies of all Secrets to which the sources refer; None if they refer to no
    Secret.

    Each copy is a JSON object. The pods mount only this Secret. If they mounted the original Secrets, a new adapter
    with another Secret would change the pod template, and this would restart the pods.
    """
    referenced = {ref.name for ref in secret_refs(service, context.catalog)}
    contents = {name: json.dumps(dict(values)) for name, values in context.credentials.items() if name in referenced}
    return _secret_manifest(service, object_names.credentials_secret(service.name), contents) if contents else None


def service_account(service: LLMService) -> Manifest:
    """Return the ServiceAccount of the pods. It has no permissions in Kubernetes, but a cloud provider can give it
    access to buckets."""
    return new_manifest("v1", "ServiceAccount", service, service.name, automountServiceAccountToken=False)


def secret_refs(service: LLMService, catalog: AdapterCatalog | None = None) -> list[SecretRef]:
    """Return the SecretRefs of all sources. `catalog` contains the adapters; None: those of the spec. The key of a
    SecretRef is None if the source uses all keys of the Secret."""
    catalog = catalog or service.build_catalog()
    places = (*catalog.content_sources, *(prefix.source for prefix in catalog.sources))
    sources = (*service.model_sources.values(), *places)
    return [ref for source in sources for ref in source.secret_keys]


def _secret_manifest(service: LLMService, name: str, values: Mapping[str, str]) -> Manifest:
    data = {key: base64.b64encode(value.encode()).decode() for key, value in sorted(values.items())}
    return new_manifest("v1", "Secret", service, name, type="Opaque", data=data)
