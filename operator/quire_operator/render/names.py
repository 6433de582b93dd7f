# SPDX-License-Identifier: Apache-2.0
"""Names, labels and folders of the objects that are made for a service. Deterministic, so that nothing has to be found.

Service names have at most 48 characters (the CRD says so); with the longest suffix here they stay within 63.
"""

import hashlib
import json
from typing import Any

from quire_operator.service import LLMService
from quire_spec import names as spec_names

MANAGER = "quire-operator"
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
BRINGS = f"{spec_names.API_GROUP}/brings"
"""Label of a download Job: what it brings, and where to. Jobs of two releases, or with other placement, that have the
same value do the same."""
SERVER, DOWNLOAD = "server", "model-download"

RUN_DIR = "/run/quire"
CACHE_DIR = "/var/cache/quire"
HOME_DIR = "/var/lib/quire"
MODEL_DIR = "/mnt/model"
CLAIMS_DIR = "/mnt/claims"
ENGINE_DIR = "/etc/quire/engine"
CATALOGUE_DIR = "/etc/quire/adapters"
ADMIN_DIR = "/etc/quire/admin"
SECRETS_DIR = "/etc/quire/secrets"
ADMIN_KEY = "key"


def pods(service: LLMService) -> str:
    """The headless Service, by which each pod is reached."""
    return f"{service.name}-pods"


def engine(service: LLMService, content: str) -> str:
    """The ConfigMap of engine.json: named by its content, so that a change of it is a change of the pods."""
    return f"{service.name}-engine-{digest(content)}"


def catalogue(service: LLMService) -> str:
    """The ConfigMap of adapters.json: its content changes, the pods stay."""
    return catalogue_of(service.name)


def admin_key(service: LLMService) -> str:
    """The Secret with the key of the admin port."""
    return admin_key_of(service.name)


def admin_key_of(service: str) -> str:
    """The same by the service's name."""
    return f"{service}-admin"


def credentials(service: LLMService) -> str:
    """The Secret with copies of the Secrets that sources name."""
    return credentials_of(service.name)


def credentials_of(service: str) -> str:
    """The same by the service's name."""
    return f"{service}-credentials"


def catalogue_of(service: str) -> str:
    """The ConfigMap of adapters.json by the service's name."""
    return f"{service}-adapters"


def model_claim(service: LLMService) -> str:
    """The PersistentVolumeClaim of downloaded models."""
    return model_claim_of(service.name)


def model_claim_of(service: str) -> str:
    """The same by the service's name."""
    return f"{service}-models"


def download(service: LLMService, content: str) -> str:
    """The Job that downloads the model; its template is immutable, so another one is another Job."""
    return f"{service.name}-model-{digest(content)}"


def selector(service: LLMService, component: str) -> dict[str, str]:
    """Labels by which pods are found; a Deployment's can never change."""
    return {"app.kubernetes.io/name": "quire", INSTANCE: service.name, COMPONENT: component}


def labels(service: LLMService, component: str) -> dict[str, str]:
    """Labels of an object."""
    return {**selector(service, component), "app.kubernetes.io/managed-by": MANAGER}


def meta(service: LLMService, name: str, component: str = SERVER) -> dict[str, Any]:
    """metadata of an object; the owner is added by desired.py."""
    namespace = {"namespace": service.namespace} if service.namespace else {}
    return {"name": name, **namespace, "labels": labels(service, component)}


def digest(content: Any) -> str:
    """Seven characters that change with the content: what a name of 48 and the longest suffix leave of 63."""
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:7]
