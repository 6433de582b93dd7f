# SPDX-License-Identifier: Apache-2.0
"""Security contexts of server pods and model reader pods. Called by pod_template.py and model_reader_job.py."""

from typing import Any

from quire_operator.api.llmservice import LLMService


def pod_security_context(service: LLMService) -> dict[str, Any]:
    """Return the securityContext of a pod."""
    security = service.spec.security
    ids = {"runAsUser": security.runAsUser, "runAsGroup": security.fsGroup, "fsGroup": security.fsGroup}
    return {
        "runAsNonRoot": True,
        **(ids if security.ids == "Fixed" else {}),
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security_context(read_only_root_filesystem: bool) -> dict[str, Any]:
    """Return the securityContext of a container."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
        "readOnlyRootFilesystem": read_only_root_filesystem,
    }
