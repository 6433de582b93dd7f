# SPDX-License-Identifier: Apache-2.0
"""The CRDs of other projects whose objects the operator creates: PodMonitor, ScaledObject, InferencePool, HTTPRoute
and LeaderWorkerSet; those that an endpoint picker reads; and Kueue's Workload, which the operator reads.

The Go module go/crds pins the projects. Their published modules contain the CRDs.
"""

import hashlib
import shutil
import tempfile
from pathlib import Path

from nodocker_cluster import binaries
from nodocker_cluster.binaries import ProgressCallback
from nodocker_cluster.go_module import MODULES, GoModule

_MODULE = GoModule(MODULES / "crds")
_FILES = {
    "PodMonitor": (
        "github.com/prometheus-operator/prometheus-operator",
        "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
    ),
    "ScaledObject": ("github.com/kedacore/keda/v2", "config/crd/bases/keda.sh_scaledobjects.yaml"),
    "InferencePool": (
        "sigs.k8s.io/gateway-api-inference-extension",
        "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml",
    ),
    "InferenceObjective": (
        "sigs.k8s.io/gateway-api-inference-extension",
        "config/crd/bases/inference.networking.x-k8s.io_inferenceobjectives.yaml",
    ),
    "InferenceModelRewrite": (
        "sigs.k8s.io/gateway-api-inference-extension",
        "config/crd/bases/inference.networking.x-k8s.io_inferencemodelrewrites.yaml",
    ),
    "Workload": ("sigs.k8s.io/kueue", "config/components/crd/bases/kueue.x-k8s.io_workloads.yaml"),
    "LeaderWorkerSet": (
        "sigs.k8s.io/lws",
        "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml",
    ),
    "HTTPRoute": (
        "sigs.k8s.io/gateway-api",
        "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
    ),
}
"""For each kind, the module and the path of its CRD in the module."""


def find() -> dict[str, Path] | None:
    """Return the file of each kind's CRD; None if they are not downloaded."""
    return {kind: _cached() / f"{kind}.yaml" for kind in _FILES} if _cached().exists() else None


def find_or_download(report_progress: ProgressCallback) -> dict[str, Path]:
    """Return the file of each kind's CRD. The first call downloads 20 MB.

    Raises:
        Unavailable: Go is missing, or a download failed.
    """
    if not (files := find()):
        report_progress(f"downloading the CRDs of {', '.join(_FILES)}")
        with tempfile.TemporaryDirectory(dir=binaries.make_cache_folder(), prefix="partial-") as temporary:
            out = Path(temporary) / "out"
            out.mkdir()
            for kind, (module, path) in _FILES.items():
                shutil.copyfile(_MODULE.source(module) / path, out / f"{kind}.yaml")
            binaries.publish_to_cache(out, _cached().name)
        files = find()
    assert files is not None, "they were published"
    return files


def _cached() -> Path:
    key = hashlib.sha256(f"{_MODULE.text} {_FILES}".encode()).hexdigest()[:12]
    return binaries.cache_folder() / f"crds-{key}"
