# SPDX-License-Identifier: Apache-2.0
"""A real API server for tests, through the official client for Python, which the operator does not use.

running_cluster() uses the cluster that QUIRE_TEST_KUBECONFIG names (never the default kubeconfig), or starts a control
plane with the programs of hack/nodocker_cluster. Nothing is simulated.
"""

import contextlib
import functools
import os
import secrets
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from kubernetes import client, config
from kubernetes.dynamic import DynamicClient, Resource
from kubernetes.dynamic.exceptions import ConflictError, NotFoundError, ResourceNotFoundError
from nodocker_cluster import binaries, control_plane, crd_apiserver
from support.engine_processes import wait_for

ROOT = Path(__file__).resolve().parents[2]
CRD_FILE = ROOT / "crds/llmservices.yaml"
KUBECONFIG_VARIABLE = "QUIRE_TEST_KUBECONFIG"
NO_CLUSTER_REASON = "no Kubernetes on this machine: run make cluster-tools (minutes, once)"
FIELD_MANAGER = "quire-tests"

Manifest = dict[str, Any]


class GroupVersionDiscoverer:
    """Discovers the kinds of one group version at a time: an API server of CRDs alone does not serve /apis."""

    def __init__(self, dynamic: DynamicClient, cache_file: str | None) -> None:
        self._dynamic = dynamic
        self._kinds: dict[str, dict[str, Resource]] = {}

    def get(self, api_version: str, kind: str) -> Resource:
        """Return the resource of a kind; raises ResourceNotFoundError."""
        if kind not in self._kinds.get(api_version, {}):
            self._kinds[api_version] = self._discover(api_version)
        if kind not in self._kinds[api_version]:
            raise ResourceNotFoundError(f"the API server has no {api_version} {kind}")
        return self._kinds[api_version][kind]

    def _discover(self, api_version: str) -> dict[str, Resource]:
        group, _, version = api_version.rpartition("/")
        prefix = "apis" if group else "api"
        try:
            listed = self._dynamic.request("GET", f"/{prefix}/{api_version}").to_dict()["resources"]
        except NotFoundError:
            return {}
        return {
            entry["kind"]: Resource(prefix, group, version, entry["kind"], entry["namespaced"], name=entry["name"])
            for entry in listed
            if "/" not in entry["name"]
        }


@dataclass(repr=False)
class Cluster:
    """An API server, with administrator rights, through the official client for Python."""

    kubeconfig: Path
    """Kubeconfig for programs: kubectl, the operator."""
    folder: Path
    """Folder for files of this session."""
    programs: binaries.KubeBinaries | None = None
    """None: the cluster was given by QUIRE_TEST_KUBECONFIG."""

    def __post_init__(self) -> None:
        configuration = client.Configuration()
        config.load_kube_config(str(self.kubeconfig), client_configuration=configuration)
        configuration.proxy = None
        self.dynamic = DynamicClient(client.ApiClient(configuration), discoverer=GroupVersionDiscoverer)

    @functools.cached_property
    def version(self) -> tuple[int, int]:
        """Version of the API server."""
        document = self.request("GET", "/version")
        return int(document["major"]), int(document["minor"].rstrip("+"))

    def require_version(self, major: int, minor: int, feature: str) -> None:
        """Skip the test if the API server is too old for `feature`."""
        if self.version < (major, minor):
            version = ".".join(map(str, self.version))
            pytest.skip(f"needs Kubernetes {major}.{minor} for {feature}; this one is {version}")

    def require_controllers(self) -> None:
        """Skip the test if there is no controller-manager (KUBEBUILDER_ASSETS alone)."""
        if self.programs and not self.programs.has("kube-controller-manager"):
            pytest.skip(f"needs a controller-manager, and {self.programs.folder} has none; run make cluster-tools")

    # Requests

    def request(self, method: str, path: str, body: Any = None, content_type: str = "", **params: Any) -> Any:
        """Send a request and return the document; raises DynamicApiError for a status of 400 and above."""
        response = self.dynamic.request(
            method,
            path,
            body,
            content_type=content_type,
            query_params=[*params.items()],
            serialize=False,
            _request_timeout=30,
        )
        return orjson.loads(response.data)

    def path(self, api_version: str, kind: str, namespace: str | None = None, name: str = "") -> str:
        """Return the URL path of a kind or of one object; raises ResourceNotFoundError."""
        resource = self.dynamic.resources.get(api_version, kind)
        path: str = resource.path(name or None, (namespace or "default") if resource.namespaced else None)
        return path

    def apply(
        self, manifest: Mapping[str, Any], namespace: str | None = None, dry_run: bool = False, subresource: str = ""
    ) -> Manifest:
        """Apply a manifest as kubectl apply --server-side does, and return the object."""
        meta = manifest["metadata"]
        path = self.path(manifest["apiVersion"], manifest["kind"], meta.get("namespace", namespace), meta["name"])
        params: dict[str, Any] = {"fieldManager": FIELD_MANAGER, "force": "true"}
        if dry_run:
            params["dryRun"] = "All"
        if self.version >= (1, 25):
            params["fieldValidation"] = "Strict"
        path += f"/{subresource}" if subresource else ""
        return dict(self.request("PATCH", path, dict(manifest), "application/apply-patch+yaml", **params))

    def get(self, api_version: str, kind: str, name: str, namespace: str | None = None) -> Manifest | None:
        """Return one object, or None."""
        try:
            return dict(self.request("GET", self.path(api_version, kind, namespace, name)))
        except NotFoundError:
            return None

    def items(self, api_version: str, kind: str, namespace: str | None = None, **params: Any) -> list[Manifest]:
        """Return the objects of a kind; labelSelector and fieldSelector are parameters."""
        return [*self.request("GET", self.path(api_version, kind, namespace), **params)["items"]]

    def merge(
        self,
        api_version: str,
        kind: str,
        name: str,
        patch: Mapping[str, Any],
        namespace: str | None = None,
        subresource: str = "",
    ) -> Manifest:
        """Change an object by a merge patch, as kubectl edit does."""
        path = self.path(api_version, kind, namespace, name) + (f"/{subresource}" if subresource else "")
        return dict(self.request("PATCH", path, dict(patch), "application/merge-patch+json"))

    def delete(self, api_version: str, kind: str, name: str, namespace: str | None = None, **params: Any) -> None:
        """Delete an object if it exists."""
        with contextlib.suppress(NotFoundError):
            self.request("DELETE", self.path(api_version, kind, namespace, name), **params)

    # People and programs

    def kubectl(
        self, *arguments: str, namespace: str = "default", stdin: str | None = None, codes: tuple[int, ...] = (0,)
    ) -> str:
        """Run kubectl and return its output; fails the test for another exit status."""
        program = self.programs.path("kubectl") if self.programs else "kubectl"
        argv = [program, f"--kubeconfig={self.kubeconfig}", f"--namespace={namespace}", *arguments]
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode in codes, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def token_kubeconfig(self, namespace: str, name: str) -> Path:
        """Return the kubeconfig of an existing ServiceAccount, with a new token."""
        path = self.path("v1", "ServiceAccount", namespace, name) + "/token"
        token_request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 3600},
        }
        token = self.request("POST", path, token_request)["status"]["token"]
        document = yaml.safe_load(self.kubeconfig.read_text())
        document["users"] = [{"name": user["name"], "user": {"token": token}} for user in document["users"]]
        file = self.folder / f"{namespace}-{name}.kubeconfig"
        file.write_text(yaml.safe_dump(document))
        return file

    @contextlib.contextmanager
    def namespace(self, prefix: str = "t") -> Iterator[str]:
        """A new namespace, deleted afterwards without waiting."""
        name = f"{prefix}-{secrets.token_hex(4)}"
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        try:
            yield name
        finally:
            self.delete("v1", "Namespace", name)

    def install_crd(self) -> None:
        """Create or update the CRD and wait until its API is served."""
        # Not server-side apply: servers before 1.25 refuse the CEL rules there, and drop them on other writes.
        manifest = yaml.safe_load(CRD_FILE.read_text())
        name = manifest["metadata"]["name"]
        path = self.path(manifest["apiVersion"], manifest["kind"])
        try:
            self.request("POST", path, manifest)
        except ConflictError:
            self.request("PATCH", f"{path}/{name}", {"spec": manifest["spec"]}, "application/merge-patch+json")
        wait_for(lambda: self.is_established(name), 30, f"{name} established")

    def is_established(self, name: str) -> bool:
        """Whether the API server serves the kind of a CRD."""
        crd = self.get("apiextensions.k8s.io/v1", "CustomResourceDefinition", name) or {}
        conditions = {c["type"]: c["status"] for c in crd.get("status", {}).get("conditions") or []}
        return conditions.get("Established") == "True"


def crd_without_schema(plural: str, group: str, version: str, kind: str) -> Manifest:
    """A CRD of a namespaced kind whose objects may contain anything."""
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    served = {"name": version, "served": True, "storage": True, "schema": schema}
    names = {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}", "annotations": {"api-approved.kubernetes.io": "unapproved, a test"}},
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [served]},
    }


def is_available() -> bool:
    """Whether a cluster was given or can be started."""
    return bool(os.environ.get(KUBECONFIG_VARIABLE)) or binaries.find() is not None


@contextlib.contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """The given cluster, or a new control plane; skips the test if there is neither."""
    if kubeconfig := os.environ.get(KUBECONFIG_VARIABLE):
        yield Cluster(Path(kubeconfig), folder)
        return
    programs = binaries.find()
    if programs is None:
        pytest.skip(NO_CLUSTER_REASON)
    plane = control_plane.start(folder / "control-plane", programs, dies_with_us=True)
    try:
        yield Cluster(plane.kubeconfig, folder, programs)
    finally:
        plane.stop()


@contextlib.contextmanager
def current_crd_server(cluster: Cluster, folder: Path) -> Iterator[Cluster]:
    """The cluster itself where it is current, or else an API server of definitions alone; skips the test where there is
    neither. It has custom resources only, in the cluster's namespaces."""
    if cluster.version >= crd_apiserver.MIN_CURRENT_VERSION[:2]:
        yield cluster
        return
    program, programs = crd_apiserver.find(), binaries.find()
    if program is None or programs is None:
        version = ".".join(map(str, cluster.version))
        pytest.skip(f"needs a current Kubernetes, and this one is {version}: run make cluster-tools (minutes, once)")
    plane = control_plane.start_crd_apiserver(folder / "control-plane", programs, program, cluster.kubeconfig)
    try:
        yield Cluster(plane.kubeconfig, folder, programs)
    finally:
        plane.stop()
