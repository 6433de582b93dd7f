# SPDX-License-Identifier: Apache-2.0
"""Who pods run as, and what they may do: the same for those that serve and those that read a model."""

from typing import Any

from quire_operator.service import LLMService


def of_pod(service: LLMService) -> dict[str, Any]:
    """securityContext of a pod."""
    wanted = service.spec.security
    return {
        "runAsNonRoot": True,
        "runAsUser": wanted.runAsUser,
        "runAsGroup": wanted.fsGroup,
        "fsGroup": wanted.fsGroup,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def of_container(read_only: bool) -> dict[str, Any]:
    """securityContext of a container; `read_only`: its root file system is."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
        "readOnlyRootFilesystem": read_only,
    }
