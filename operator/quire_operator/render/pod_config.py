# SPDX-License-Identifier: Apache-2.0
"""Converts an LLMService and its plan to pod.json.

The operator and `quire serve` use the same function, so that both configure a pod in the same way. Pure. Called by
objects.py and cli/serve.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from quire_operator.api.llmservice import LLMService
from quire_operator.api.quantity import to_bytes
from quire_operator.plan.plan import Plan
from quire_operator.render import kv_storage, model_storage, object_names
from quire_operator.render.engine_config import KVPeers, ModelLocation, engine_arguments
from quire_spec import constants
from quire_spec.documents.pod_config import (
    DEFAULT_MAX_BODY_BYTES,
    LimitsConfig,
    OpenAIConfig,
    OpenAIOptions,
    PodConfig,
    ServerConfig,
    SourcesConfig,
)
from quire_spec.documents.server_arguments import parse_server_arguments
from quire_spec.engine.config import EngineConfig
from quire_spec.net.addresses import ANY_ADDRESS

TLS_CERTIFICATE, TLS_KEY = "tls.crt", "tls.key"
"""Files of a Secret of type kubernetes.io/tls."""


@dataclass(frozen=True, slots=True)
class PodFiles:
    """Where the files are that pod.json refers to."""

    adapters: Path
    """adapters.json"""
    admin_key: Path | None = None
    secrets: Path | None = None
    """Folder of the Secrets of the sources."""
    claims: Mapping[str, Path] = field(default_factory=dict)
    """Folder of each PersistentVolumeClaim."""
    api_keys: Path | None = None
    """Folder of the Secret of spec.openai.apiKeysSecretRef; None: clients do not need a key."""
    tls: Path | None = None
    """Folder of the Secret of spec.openai.tlsSecretRef; None: HTTP without TLS."""
    models: Path | None = None
    """Folder of spec.runtime.models."""


def pod_config(service: LLMService, engine: EngineConfig, files: PodFiles, host: str) -> PodConfig:
    """Return the configuration of a pod that listens on `host`.

    Raises:
        ConfigError: spec.runtime.serverArgs is wrong.
    """
    runtime = service.spec.runtime
    parse_server_arguments(runtime.serverArgs, "spec.runtime.serverArgs")
    return PodConfig(
        servedName=service.served_name,
        engine=engine,
        adapters=files.adapters,
        host=host,
        ports=runtime.ports,
        adminKeyFile=files.admin_key,
        server=ServerConfig(
            expose=tuple(name for name in constants.SERVER_PROTOCOLS if name in runtime.expose),
            serverArgs=runtime.serverArgs,
            modelRepository=files.models,
            modelEnv=() if files.models is None else tuple(variable.name for variable in runtime.env),
        ),
        openai=_openai_config(service, files),
        sources=SourcesConfig(secretsDir=files.secrets, claims=files.claims),
        limits=LimitsConfig(drainSeconds=service.spec.rollout.drainSeconds),
        trust=service.spec.trust,
    )


def _openai_config(service: LLMService, files: PodFiles) -> OpenAIConfig | None:
    openai, port = service.spec.openai, service.openai_port
    if port is None:
        return None
    size = openai.limits.maxBodySize
    return OpenAIConfig(
        **{option.name: getattr(openai, option.name) for option in fields(OpenAIOptions)},
        port=port,
        apiKeysDir=files.api_keys,
        sslCertfile=files.tls and files.tls / TLS_CERTIFICATE,
        sslKeyfile=files.tls and files.tls / TLS_KEY,
        maxBodyBytes=DEFAULT_MAX_BODY_BYTES if size is None else to_bytes(size),
    )


def cluster_document(service: LLMService, plan: Plan) -> dict[str, Any]:
    """Return the content of pod.json for the pods of a cluster.

    Raises:
        ConfigError: spec.runtime.serverArgs is wrong.
        UnsupportedByEngine: the engine does not support a value of the spec.
    """
    draft = service.draft_source
    peer_names = [object_names.headless_service(service)]
    if service.num_nodes > 1:
        owners = map(service.for_role, service.roles) if service.roles else (service,)
        peer_names += map(object_names.nodes_service, owners)
    arguments = engine_arguments(
        service,
        ModelLocation(model_storage.folder(service.spec.model.source)),
        plan,
        chat_template_path(service),
        None if draft is None else ModelLocation(model_storage.folder(draft)),
        kv_storage.folder(service),
        KVPeers(
            f"{object_names.ADMIN_DIR}/{object_names.KV_TRANSFER_KEY_FIELD}",
            tuple(peer_names),
        ),
        f"{object_names.ADMIN_DIR}/{object_names.RANK_KEY_FIELD}",
    )
    config = pod_config(service, EngineConfig.from_json(arguments), _cluster_files(service), ANY_ADDRESS)
    return config.to_json(explicit=arguments.keys())


def _cluster_files(service: LLMService) -> PodFiles:
    openai, models, claims = service.spec.openai, service.spec.runtime.models, Path(object_names.CLAIMS_DIR)
    if models is None:
        folder = None
    else:
        folder = Path(models.path or "") if models.pvc is None else claims / models.pvc.claimName / models.pvc.path
    return PodFiles(
        adapters=Path(object_names.ADAPTER_CATALOG_DIR, constants.CATALOG_FILE),
        admin_key=Path(object_names.ADMIN_DIR, object_names.ADMIN_KEY_FIELD),
        secrets=Path(object_names.SECRETS_DIR),
        claims={name: claims / name for name in model_storage.claim_names(service)},
        api_keys=None if openai.apiKeysSecretRef is None else Path(object_names.API_KEYS_DIR),
        tls=None if openai.tlsSecretRef is None else Path(object_names.TLS_DIR),
        models=folder,
    )


def chat_template_path(service: LLMService) -> str | None:
    """Return the path of the chat template in a pod. If it is None, the engine uses the template of the checkpoint."""
    template = service.spec.openai.chatTemplate
    if template is None:
        return None
    folder = object_names.ENGINE_DIR if template.text is not None else object_names.CHAT_TEMPLATE_DIR
    return f"{folder}/{object_names.CHAT_TEMPLATE_FILE}"
