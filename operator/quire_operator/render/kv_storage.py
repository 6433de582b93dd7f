# SPDX-License-Identifier: Apache-2.0
"""Storage for KV blocks that spec.engine.kvCacheOffloading.secondary keeps in files. Called by pod_template.py,
pod_config.py and objects.py."""

from quire_operator.api.llmservice import LLMService
from quire_operator.plan.host_memory import kv_volume_bytes
from quire_operator.plan.plan import to_quantity
from quire_operator.render import model_storage, object_names
from quire_operator.render.manifests import Manifest
from quire_spec.errors import ConfigError

_VOLUME = "kv-blocks"


def validate(service: LLMService) -> None:
    """Check that nothing else is on the claim of the folder.

    Raises:
        ConfigError: the claim also holds a model or adapters, which pods mount read-only, or downloaded models, among
            which a download removes every folder that no pod uses.
    """
    tier = service.kv_tier
    if tier is None or tier.folder.pvc is None:
        return
    name = tier.folder.pvc.claimName
    if name in model_storage.claim_names(service) or name == object_names.model_claim(service.name):
        raise ConfigError(
            f"spec.engine.kvCacheOffloading.secondary[0].folder.pvc.claimName: {name!r} is also the claim of a model "
            "or an adapter; use another claim"
        )


def folder(service: LLMService) -> str | None:
    """Return the path of the folder in a pod; None if the spec sets no folder."""
    tier = service.kv_tier
    if tier is None:
        return None
    path = "" if tier.folder.pvc is None else tier.folder.pvc.path
    return f"{object_names.KV_BLOCKS_DIR}/{path}".rstrip("/")


def volumes(service: LLMService) -> list[Manifest]:
    """Return the volume of the folder, if there is one."""
    tier = service.kv_tier
    if tier is None:
        return []
    if tier.folder.pvc is not None:
        return [{"name": _VOLUME, "persistentVolumeClaim": {"claimName": tier.folder.pvc.claimName}}]
    return [{"name": _VOLUME, "emptyDir": {"sizeLimit": _volume_size(service)}}]


def volume_mounts(service: LLMService) -> list[Manifest]:
    """Return the mount of the volume, if there is one."""
    return [] if service.kv_tier is None else [{"name": _VOLUME, "mountPath": object_names.KV_BLOCKS_DIR}]


def _volume_size(service: LLMService) -> str:
    offloading = service.spec.engine.kvCacheOffloading
    return to_quantity(0 if offloading is None else kv_volume_bytes(offloading))
