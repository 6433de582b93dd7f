# SPDX-License-Identifier: Apache-2.0
"""Names, labels and folders of a service's objects. A name depends only on its inputs, so that the operator can find an
object by its name.

The CRD limits service names to 48 characters. With the longest suffix of this module, a name has at most 63
characters.
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
"""Label of a download Job. Its value is a digest of the claim and the folders. Jobs with the same value download the
same files, even if they use different releases of Quire or run on different nodes."""
PLAN_ANNOTATION = f"{spec_names.API_GROUP}/plan"
"""Annotation of a Deployment. It contains the inputsHash of the plan from which the pods were rendered."""
ROLE_LABEL = "llm-d.ai/role"
"""Label of pods that have a role. llm-d's router finds the pods of each role by it."""
SERVER, DOWNLOAD = "server", "model-download"
WORKER = "worker"
"""Component of the pods of a group except the first one, which is a server like the pods of a Deployment. Selectors of
servers therefore select the pods with worker-index 0 of a LeaderWorkerSet and, while it replaces a Deployment, the pods
of both."""
LWS_PREFIX = "leaderworkerset.sigs.k8s.io/"
LWS_NAME, LWS_GROUP, LWS_WORKER = f"{LWS_PREFIX}name", f"{LWS_PREFIX}group-index", f"{LWS_PREFIX}worker-index"
"""Labels that the LeaderWorkerSet controller sets on pods."""
TEMPLATE_LABEL = f"{spec_names.API_GROUP}/template"
"""Label of the pods of a LeaderWorkerSet. It identifies the templates from which the pods of a group were made."""
OPENAI_PORT_NAME = "openai"
"""Name of the port of the OpenAI API. Pods that an older release rendered do not have this port."""

RUN_DIR = "/run/quire"
CACHE_DIR = "/var/cache/quire"
HOME_DIR = "/var/lib/quire"
MODEL_DIR = "/mnt/model"
CLAIMS_DIR = "/mnt/claims"
IMAGES_DIR = "/mnt/images"
KV_BLOCKS_DIR = "/mnt/kv-blocks"
ENGINE_DIR = "/etc/quire/engine"
ADAPTER_CATALOG_DIR = "/etc/quire/adapters"
ADMIN_DIR = "/etc/quire/admin"
SECRETS_DIR = "/etc/quire/secrets"
API_KEYS_DIR = "/etc/quire/api-keys"
TLS_DIR = "/etc/quire/tls"
CHAT_TEMPLATE_DIR = "/etc/quire/chat-template"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
ADMIN_KEY_FIELD = "key"
RANK_KEY_FIELD = "rank-key"
"""Field of the same Secret: the key with which the pods of a group prove to each other that they belong together."""
KV_TRANSFER_KEY_FIELD = "kv-transfer-key"
"""Field of the same Secret: the key with which pods prove to each other that they belong together."""


def headless_service(service: LLMService) -> str:
    """Return the name of the headless Service, which has the address of each pod."""
    return f"{service.name}-pods"


def nodes_service(service: LLMService) -> str:
    """Return the name of the headless Service that has the address of each pod of all groups, also of workers. Each
    role has one."""
    return f"{of_role(service)}-nodes"


def of_role(service: LLMService) -> str:
    """Return the name of an object of which each role has one; the service's name if there are no roles."""
    return service.name if service.role is None else f"{service.name}-{service.role}"


def engine_configmap(service: LLMService, content: str) -> str:
    """Return the name of the ConfigMap of pod.json. The name contains a digest of the content. If the content
    changes, the name changes too, and the pods are replaced."""
    return f"{of_role(service)}-engine-{digest(content)}"


def adapter_configmap(service_name: str) -> str:
    """Return the name of the ConfigMap of adapters.json. The name does not depend on the content, so new content does
    not replace the pods."""
    return f"{service_name}-adapters"


def admin_secret(service_name: str) -> str:
    """Return the name of the Secret that contains the key for the admin port of the pods."""
    return f"{service_name}-admin"


def credentials_secret(service_name: str) -> str:
    """Return the name of the Secret that contains copies of the Secrets to which sources refer."""
    return f"{service_name}-credentials"


def model_claim(service_name: str) -> str:
    """Return the name of the PersistentVolumeClaim for downloaded models."""
    return f"{service_name}-models"


def download_job(service: LLMService, content: str) -> str:
    """Return the name of the Job that downloads the model. The name contains a digest, because a Job is immutable."""
    return f"{service.name}-model-{digest(content)}"


def selector_labels(service: LLMService, component: str) -> dict[str, str]:
    """Return the labels that select pods: those of one role if the service is the one of a role. The selector of a
    Deployment is immutable."""
    role = {} if service.role is None or component != SERVER else {ROLE_LABEL: service.role.value}
    return {"app.kubernetes.io/name": "quire", INSTANCE: service.name, COMPONENT: component, **role}


def group_labels(service: LLMService) -> dict[str, str]:
    """Return the labels that select all pods of the LeaderWorkerSet, or of that of a role, whose name only its
    controller knows."""
    own = {LWS_NAME: service.name} if service.role is None else {ROLE_LABEL: service.role.value}
    return {"app.kubernetes.io/name": "quire", INSTANCE: service.name, **own}


def labels(service: LLMService, component: str) -> dict[str, str]:
    """Return the labels of an object."""
    return {**selector_labels(service, component), MANAGED_BY: MANAGER}


def digest(content: Any) -> str:
    """Return a digest of seven characters. A service name of 48 characters, the longest suffix and the digest have 63
    characters in total."""
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:7]
