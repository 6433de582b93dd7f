# SPDX-License-Identifier: Apache-2.0
"""Names, labels and folders of the objects that are made for a service. Deterministic, so that nothing has to be found.

Service names have at most 48 characters (the CRD says so); with the longest suffix here they stay within 63.
"""

import hashlib
import json
from typing import Any

from quire_operator.api.llmservice import LLMService
from quire_spec import constants as spec_names

MANAGED_BY, MANAGER = "app.kubernetes.io/managed-by", "quire-operator"
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
DOWNLOAD_TARGET_LABEL = f"{spec_names.API_GROUP}/brings"
"""Label of a download Job: what it brings, and where to. Jobs of two releases, or with other placement, that have the
same value do the same."""
PLAN_ANNOTATION = f"{spec_names.API_GROUP}/plan"
"""Annotation of a Deployment: inputsHash of the plan that its pods run by."""
SERVER, DOWNLOAD = "server", "model-download"

RUN_DIR = "/run/quire"
CACHE_DIR = "/var/cache/quire"
HOME_DIR = "/var/lib/quire"
MODEL_DIR = "/mnt/model"
CLAIMS_DIR = "/mnt/claims"
ENGINE_DIR = "/etc/quire/engine"
ADAPTER_CATALOG_DIR = "/etc/quire/adapters"
ADMIN_DIR = "/etc/quire/admin"
SECRETS_DIR = "/etc/quire/secrets"
ADMIN_KEY_FIELD = "key"


def headless_service(service: LLMService) -> str:
    """The headless Service, by which each pod is reached."""
    return f"{service.name}-pods"


def engine_configmap(service: LLMService, content: str) -> str:
    """The ConfigMap of engine.json: named by its content, so that a change of it is a change of the pods."""
    return f"{service.name}-engine-{digest(content)}"


def adapter_configmap(service_name: str) -> str:
    """The ConfigMap of adapters.json, by the service's name: its content changes, the pods stay."""
    return f"{service_name}-adapters"


def admin_secret(service_name: str) -> str:
    """The Secret with the key of the pods' admin port, by the service's name."""
    return f"{service_name}-admin"


def credentials_secret(service_name: str) -> str:
    """The Secret with copies of the Secrets that sources name, by the service's name."""
    return f"{service_name}-credentials"


def model_claim(service_name: str) -> str:
    """The PersistentVolumeClaim of downloaded models, by the service's name."""
    return f"{service_name}-models"


def download_job(service: LLMService, content: str) -> str:
    """The Job that downloads the model; its template is immutable, so another one is another Job."""
    return f"{service.name}-model-{digest(content)}"


def selector_labels(service: LLMService, component: str) -> dict[str, str]:
    """Labels by which pods are found; a Deployment's can never change."""
    return {"app.kubernetes.io/name": "quire", INSTANCE: service.name, COMPONENT: component}


def labels(service: LLMService, component: str) -> dict[str, str]:
    """Labels of an object."""
    return {**selector_labels(service, component), MANAGED_BY: MANAGER}


def object_meta(service: LLMService, name: str, component: str = SERVER) -> dict[str, Any]:
    """metadata of an object; the owner is added by desired.py."""
    namespace = {"namespace": service.namespace} if service.namespace else {}
    return {"name": name, **namespace, "labels": labels(service, component)}


def digest(content: Any) -> str:
    """Seven characters that change with the content: what a name of 48 and the longest suffix leave of 63."""
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:7]
