# SPDX-License-Identifier: Apache-2.0
"""Misspelt fields of spec.podTemplate.spec, which no schema of ours lists. Pure; called by validate.py.

An API server leaves such a field out, and the resource's condition says so (FieldsLeftOut). Without a cluster it cannot
be known which fields it has: so a name is a mistake only where it is nearly one of these, and those of later releases
pass.
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from quire_operator.errors import ABSENT, FieldPath, Problem

POD = (
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
CONTAINER = (
    "args", "command", "env", "envFrom", "image", "imagePullPolicy", "lifecycle", "livenessProbe", "name", "ports",
    "readinessProbe", "resizePolicy", "resources", "restartPolicy", "restartPolicyRules", "securityContext",
    "startupProbe", "stdin", "stdinOnce", "terminationMessagePath", "terminationMessagePolicy", "tty", "volumeDevices",
    "volumeMounts", "workingDir",
)  # fmt: skip
_ALIKE = 0.88
"""How alike a misspelt name is at least; of the fields that Kubernetes 1.26 to 1.37 added here, none was so like one
that there was."""
_LISTS = ("containers", "initContainers", "ephemeralContainers")


def problems(body: Any) -> Iterator[Problem]:
    """What is misspelt in the pod template of an LLMService, whatever else is wrong with it."""
    path: FieldPath = ("spec", "podTemplate", "spec")
    for key in path:
        body = body.get(key) if isinstance(body, Mapping) else None
    yield from _misspelt(body, POD, path)
    for name in _LISTS:
        entries = body.get(name) if isinstance(body, Mapping) else None
        for i, entry in enumerate(entries if isinstance(entries, list) else ()):
            yield from _misspelt(entry, CONTAINER, (*path, name, i))


def _misspelt(fields: Any, known: tuple[str, ...], path: FieldPath) -> Iterator[Problem]:
    folded = {name.lower(): name for name in known}
    for name in fields if isinstance(fields, Mapping) else ():
        if name in known or not isinstance(name, str):
            continue
        if close := difflib.get_close_matches(name.lower(), folded, n=1, cutoff=_ALIKE):
            yield Problem((*path, name), ABSENT, "no field that pods are known to have", f"write {folded[close[0]]}")
