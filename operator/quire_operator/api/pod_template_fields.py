# SPDX-License-Identifier: Apache-2.0
"""Misspelt fields of spec.podTemplate.spec, which no schema of ours lists. Pure; called by validate.py.

An API server leaves such a field out, and the resource's condition says so (FieldsLeftOut). Without a cluster it cannot
be known which fields it has: so a name is a mistake only where it is nearly one of these, and those of later releases
pass.
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from quire_operator.api.validation_errors import ABSENT, FieldPath, Problem

POD_SPEC_FIELDS = (
    "activeDeadlineSeconds", "affinity", "automountServiceAccountToken", "containers", "dnsConfig", "dnsPolicy",
    "enableServiceLinks", "ephemeralContainers", "evictionResponders", "hostAliases", "hostIPC", "hostNetwork",
    "hostPID", "hostUsers", "hostname", "hostnameOverride", "imagePullSecrets", "initContainers", "nodeName",
    "nodeSelector", "os", "overhead", "preemptionPolicy", "priority", "priorityClassName", "readinessGates",
    "resourceClaims", "resources", "restartPolicy", "runtimeClassName", "schedulerName", "schedulingGates",
    "schedulingGroup", "securityContext", "serviceAccount", "serviceAccountName", "setHostnameAsFQDN",
    "shareProcessNamespace", "subdomain", "terminationGracePeriodSeconds", "tolerations", "topologySpreadConstraints",
    "volumes",
)  # fmt: skip
"""Of Kubernetes 1.37."""
CONTAINER_FIELDS = (
    "args", "command", "env", "envFrom", "image", "imagePullPolicy", "lifecycle", "livenessProbe", "name", "ports",
    "readinessProbe", "resizePolicy", "resources", "restartPolicy", "restartPolicyRules", "securityContext",
    "startupProbe", "stdin", "stdinOnce", "terminationMessagePath", "terminationMessagePolicy", "tty", "volumeDevices",
    "volumeMounts", "workingDir",
)  # fmt: skip
_MIN_SIMILARITY = 0.88
"""How alike a misspelt name is at least; of the fields that Kubernetes 1.26 to 1.37 added here, none was so like one
that there was."""
_CONTAINER_LISTS = ("containers", "initContainers", "ephemeralContainers")


def iter_problems(body: Any) -> Iterator[Problem]:
    """What is misspelt in the pod template of an LLMService, whatever else is wrong with it."""
    path: FieldPath = ("spec", "podTemplate", "spec")
    for key in path:
        body = body.get(key) if isinstance(body, Mapping) else None
    yield from _misspelled_fields(body, POD_SPEC_FIELDS, path)
    for name in _CONTAINER_LISTS:
        entries = body.get(name) if isinstance(body, Mapping) else None
        for i, entry in enumerate(entries if isinstance(entries, list) else ()):
            yield from _misspelled_fields(entry, CONTAINER_FIELDS, (*path, name, i))


def _misspelled_fields(fields: Any, known_fields: tuple[str, ...], path: FieldPath) -> Iterator[Problem]:
    by_lower = {name.lower(): name for name in known_fields}
    for name in fields if isinstance(fields, Mapping) else ():
        if name in known_fields or not isinstance(name, str):
            continue
        if matches := difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=_MIN_SIMILARITY):
            yield Problem(
                (*path, name), ABSENT, "no field that pods are known to have", f"write {by_lower[matches[0]]}"
            )
