# SPDX-License-Identifier: Apache-2.0
"""Who pods run as, and what they may do: the same for those that serve and those that read a model."""

from typing import Any

from quire_operator.api.llmservice import LLMService


def pod_security_context(service: LLMService) -> dict[str, Any]:
    """securityContext of a pod."""
    security = service.spec.security
    return {
        "runAsNonRoot": True,
        "runAsUser": security.runAsUser,
        "runAsGroup": security.fsGroup,
        "fsGroup": security.fsGroup,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security_context(read_only_root_filesystem: bool) -> dict[str, Any]:
    """securityContext of a container; `read_only`: its root file system is."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
        "readOnlyRootFilesystem": read_only_root_filesystem,
    }
