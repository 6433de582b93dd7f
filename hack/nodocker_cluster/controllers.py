# SPDX-License-Identifier: Apache-2.0
"""Programs of other projects, built from Go modules, which tests run as processes: controllers with a kubeconfig, and
the OpenTelemetry Collector, and servers of files.

Each has a module of its own in go/, because they need different releases of Kubernetes' libraries. `make cluster-tools`
builds the endpoint picker, LeaderWorkerSet, CoreDNS, the collector and the servers of files, and `make
test-controllers` the others.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from nodocker_cluster import binaries
from nodocker_cluster.binaries import ProgressCallback
from nodocker_cluster.go_module import MODULES, GoModule


@dataclass(frozen=True, slots=True)
class Controller:
    """The programs of one Go module."""

    name: str
    """Folder of the module in go/."""
    project: str
    """Import path of the project whose version counts."""
    needed_bytes: int
    """Space for the sources, the compiled packages and the programs."""

    @property
    def module(self) -> GoModule:
        """The module that pins the project."""
        return GoModule(MODULES / self.name)

    @property
    def version(self) -> str:
        """The version that go.mod pins."""
        return self.module.version(self.project)

    @property
    def folder(self) -> Path:
        """The folder in the cache that contains the programs after they are built."""
        return binaries.cache_folder() / f"{self.name}-{self.version}"

    def find_or_build(self, report_progress: ProgressCallback) -> Path:
        """Return the folder of the programs. The first call builds them.

        Raises:
            Unavailable: Go is missing, a download failed, or there is too little space.
        """
        if not self.folder.exists():
            with tempfile.TemporaryDirectory(dir=binaries.make_cache_folder(), prefix="partial-") as temporary:
                out = Path(temporary) / "out"
                binaries.require_space(out.parent, self.needed_bytes, f"building {self.name}")
                self.module.build(out, {}, report_progress)
                binaries.publish_to_cache(out, self.folder.name)
        return self.folder

    def source(self) -> Path:
        """Return the project's source, which contains its CRDs.

        Raises:
            Unavailable: Go is missing, or the download failed.
        """
        return self.module.source(self.project)


PICKER = Controller("picker", "sigs.k8s.io/gateway-api-inference-extension", 3 * 2**30)
"""The endpoint picker `epp` of the Gateway API's inference extension (2 minutes on two idle cores)."""
LWS = Controller("lws", "sigs.k8s.io/lws", 3 * 2**30)
"""The controller `cmd` of LeaderWorkerSet (2 minutes on two idle cores)."""
DNS = Controller("dns", "github.com/coredns/coredns", 2 * 2**30)
"""CoreDNS, with the plugins that a cluster with one node needs (a minute on two idle cores)."""
COLLECTOR = Controller("collector", "go.opentelemetry.io/collector/otelcol", 3 * 2**30)
"""The OpenTelemetry Collector `otelcol`, with OTLP only (2 minutes on two idle cores)."""
STORES = Controller("stores", "github.com/fsouza/fake-gcs-server", 3 * 2**30)
"""The emulator of Google Cloud Storage `fake-gcs-server`, the S3 server `versitygw`, and the `registry` of the CNCF's
Distribution (2 minutes on two idle cores)."""
KEDA = Controller("keda", "github.com/kedacore/keda/v2", 6 * 2**30)
"""KEDA's `operator` and metrics `adapter` (8 minutes on two idle cores)."""
KUEUE = Controller("kueue", "sigs.k8s.io/kueue", 4 * 2**30)
"""Kueue (4 minutes on two idle cores)."""
