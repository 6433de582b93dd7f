# SPDX-License-Identifier: Apache-2.0
"""The operator's pod and the pods that it creates meet Kubernetes' Pod Security Standard `restricted`.

The rules of https://kubernetes.io/docs/concepts/security/pod-security-standards/ are implemented here, because the API
servers of the tests can be older than the admission plugin.
"""

import pytest
from support.chart import ROOT, parse_documents, render_chart

VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
GOLDEN = sorted((ROOT / "tests/operator/golden").glob("*.yaml"))


def violations(spec):
    """Return the violations of the standard in a PodSpec."""
    names = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    names += [f"volume {v['name']}" for v in spec.get("volumes", ()) if not (set(v) - {"name"}) <= VOLUMES]
    pod = spec.get("securityContext", {})
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        own = container.get("securityContext", {})
        seccomp = (own.get("seccompProfile") or pod.get("seccompProfile") or {}).get("type")
        checks = {
            "privileged": own.get("privileged"),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is not False,
            "capabilities": "ALL" not in own.get("capabilities", {}).get("drop", ()) or own["capabilities"].get("add"),
            "runAsNonRoot": not own.get("runAsNonRoot", pod.get("runAsNonRoot")),
            "runAsUser": own.get("runAsUser", pod.get("runAsUser")) == 0,
            "seccompProfile": seccomp not in ("RuntimeDefault", "Localhost"),
            "hostPort": any(port.get("hostPort") for port in container.get("ports", ())),
        }
        names += [f"{container['name']}: {name}" for name, wrong in checks.items() if wrong]
    return names


def test_operator_pod_meets_the_restricted_standard(tmp_path):
    (deployment,) = [o for o in render_chart(tmp_path) if o["kind"] == "Deployment"]
    assert violations(deployment["spec"]["template"]["spec"]) == []


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.stem)
def test_server_pods_meet_the_restricted_standard(file):
    specs = {
        (thing["kind"], thing["metadata"]["name"]): thing["spec"]["template"]["spec"]
        for thing in parse_documents(file.read_text())
        if thing["kind"] in ("Deployment", "Job")
    }
    assert specs
    for key, spec in specs.items():
        # A sidecar in spec.podTemplate is not changed by the operator.
        own = {**spec, "containers": [c for c in spec["containers"] if c["name"] != "side"]}
        assert violations(own) == [], key
