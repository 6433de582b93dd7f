# SPDX-License-Identifier: Apache-2.0
"""The operator's pods and those that it makes pass Kubernetes' Pod Security Standard `restricted`.

The rules are those of https://kubernetes.io/docs/concepts/security/pod-security-standards/, written down here because
the API servers that tests can have are older than the admission plugin.
"""

import pytest
import yaml
from support.chart import ROOT, parse_documents, render_chart

VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
GOLDEN = sorted((ROOT / "tests/operator/golden").glob("*.yaml"))


def faults(spec):
    """What the standard forbids in a PodSpec."""
    found = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    found += [f"volume {v['name']}" for v in spec.get("volumes", ()) if not (set(v) - {"name"}) <= VOLUMES]
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
        found += [f"{container['name']}: {name}" for name, wrong in checks.items() if wrong]
    return found


def test_the_operator_is_restricted(tmp_path):
    (deployment,) = [o for o in render_chart(tmp_path) if o["kind"] == "Deployment"]
    assert faults(deployment["spec"]["template"]["spec"]) == []


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.stem)
def test_pods_that_it_makes_are_restricted(file):
    specs = {
        (thing["kind"], thing["metadata"]["name"]): thing["spec"]["template"]["spec"]
        for thing in parse_documents(file.read_text())
        if thing["kind"] in ("Deployment", "Job")
    }
    assert specs
    for key, spec in specs.items():
        # A side-car of spec.podTemplate is as its author has it.
        own = {**spec, "containers": [c for c in spec["containers"] if c["name"] != "side"]}
        assert faults(own) == [], key


def test_faults_are_found():
    bare = yaml.safe_load("{hostNetwork: true, volumes: [{name: v, hostPath: {path: /}}], containers: [{name: c}]}")
    assert faults(bare) == [
        *("hostNetwork", "volume v", "c: allowPrivilegeEscalation", "c: capabilities", "c: runAsNonRoot"),
        "c: seccompProfile",
    ]
