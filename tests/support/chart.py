# SPDX-License-Identifier: Apache-2.0
"""The Helm chart, rendered to objects."""

import functools
import subprocess
from pathlib import Path
from typing import Any

import nodocker_cluster.helm
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts/quire"
NO_HELM_REASON = "no Helm on this machine: run make cluster-tools (minutes, once)"

ALL_VALUES: dict[str, Any] = {
    "image": {
        "registry": "registry.example/team/",
        "pullPolicy": "Always",
        "operator": {"repository": "manager", "tag": "1.2", "digest": f"sha256:{'1' * 64}"},
        "gpu": {"repository": "server-gpu", "tag": "1.3", "digest": f"sha256:{'2' * 64}"},
        "cpu": {"repository": "server-cpu", "tag": "1.4", "digest": f"sha256:{'3' * 64}"},
    },
    "imagePullSecrets": [{"name": "pull"}],
    "watchNamespaces": ["team-a", "team-b"],
    "crds": {"install": False, "keep": False},
    "defaults": {
        "runtime": {"env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3129"}]},
        "labels": {"team": "all"},
    },
    "sources": {"allowedCIDRs": ["10.11.12.0/24", "fd00::/8"]},
    "rbac": {"create": True, "readNodes": False, "aggregateRoles": False},
    "serviceAccount": {"create": True, "name": "of-mine", "annotations": {"role-arn": "arn:aws:iam::1:role/x"}},
    "operator": {
        "logFormat": "text",
        "logLevel": "debug",
        "workers": 29,
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "extraVolumes": [{"name": "ca", "configMap": {"name": "company-ca"}}],
        "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ssl/certs"}],
    },
    "resources": {"requests": {"cpu": "777m", "memory": "222Mi"}, "limits": {"memory": "333Mi"}},
    "securityContext": {"runAsUser": 4441, "runAsGroup": 4442, "fsGroup": 4443},
    "podLabels": {"label-x": "label-y"},
    "podAnnotations": {"note-n": "note-m"},
    "nodeSelector": {"pool-p": "pool-q"},
    "tolerations": [{"key": "taint-k", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "priorityClassName": "system-cluster-critical",
    "terminationGracePeriodSeconds": 17,
    "networkPolicy": {"enabled": True, "ingressFrom": [{"namespaceSelector": {"matchLabels": {"watcher": "yes"}}}]},
    "metrics": {
        "podMonitor": {"enabled": True, "interval": "1m", "labels": {"release": "monitoring"}},
        "dashboard": {"enabled": True, "labels": {"folder": "x"}, "annotations": {"grafana_folder": "Models"}},
    },
}
"""All values of the chart, each different from its default."""
DISABLED_VALUES: dict[str, Any] = {
    "crds": {"keep": False},
    "rbac": {"create": False},
    "serviceAccount": {"create": False},
    "networkPolicy": {"enabled": False},
}


_helm_program = functools.cache(nodocker_cluster.helm.find)


def helm(*arguments: str | Path, check: bool = True, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a Helm command; skips the test if there is no Helm."""
    program = _helm_program()
    if program is None:
        pytest.skip(NO_HELM_REASON)
    done = subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def render_chart(folder: Path, values: dict[str, Any] | None = None, name: str = "quire") -> list[dict[str, Any]]:
    """Render all objects of the chart with these values, for the namespace quire-system."""
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values or {}))
    return parse_documents(helm("template", name, CHART, "-n", "quire-system", "-f", file).stdout)


def parse_documents(text: str) -> list[dict[str, Any]]:
    """Parse objects with libyaml: the CRD alone takes the Python parser a second."""
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


def only_of_kind(objects: list[dict[str, Any]], kind: str, name: str | None = None) -> dict[str, Any]:
    """Return the only object of a kind."""
    (matching,) = [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    return matching
