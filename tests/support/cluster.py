# SPDX-License-Identifier: Apache-2.0
"""A real API server for tests, through the official client for Python, which the operator does not use.

running_cluster() uses the cluster that QUIRE_TEST_KUBECONFIG names (never the default kubeconfig), or starts a control
plane with the programs of hack/nodocker_cluster. Nothing is simulated.
"""

import contextlib
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
from kubernetes.dynamic.exceptions import NotFoundError, ResourceNotFoundError
from nodocker_cluster import binaries, control_plane, crds
from support.engine_processes import wait_for

ROOT = Path(__file__).resolve().parents[2]
CRD_FILE = ROOT / "crds/llmservices.yaml"
KUBECONFIG_VARIABLE = "QUIRE_TEST_KUBECONFIG"
NO_CLUSTER_REASON = "no Kubernetes on this machine: run make cluster-tools (minutes, once)"
FIELD_MANAGER = "quire-tests"

Manifest = dict[str, Any]
CRD = ("apiextensions.k8s.io/v1", "CustomResourceDefinition")


class GroupVersionDiscoverer:
    """Discovers the kinds of one group version at a time, and asks again for a kind that it does not know."""

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
        params: dict[str, Any] = {"fieldManager": FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"}
        if dry_run:
            params["dryRun"] = "All"
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
        """Apply the CRD of LLMService and wait until its API is served."""
        self.apply_crd(yaml.safe_load(CRD_FILE.read_text()))

    def apply_crd(self, manifest: Manifest) -> None:
        """Apply a CRD and wait until its API is served."""
        self.apply(manifest)
        name = manifest["metadata"]["name"]
        wait_for(lambda: self.is_served(name), 30, f"{name} is served")

    def delete_crd(self, name: str) -> None:
        """Delete a CRD, and wait until its API is not served any more."""
        self.delete(*CRD, name)
        wait_for(lambda: self.get(*CRD, name) is None, 30, f"{name} is deleted")

    @contextlib.contextmanager
    def optional_kind(self, kind: str) -> Iterator[str]:
        """Install the CRD of a kind of another project, unless the cluster has it; yield the name of the CRD."""
        manifest = optional_crd(kind)
        name = manifest["metadata"]["name"]
        existed = self.get(*CRD, name) is not None
        if not existed:
            self.apply_crd(manifest)
        try:
            yield name
        finally:
            if not existed:
                self.delete_crd(name)

    def is_served(self, crd_name: str) -> bool:
        """Whether the API server serves the kind of a CRD, and lists it in its discovery documents.

        A CRD is Established some time before clients that use discovery find its kind.
        """
        crd = self.get(*CRD, crd_name) or {}
        conditions = {c["type"]: c["status"] for c in crd.get("status", {}).get("conditions") or []}
        if conditions.get("Established") != "True":
            return False
        group, plural = crd["spec"]["group"], crd["spec"]["names"]["plural"]
        versions = {version["name"] for version in crd["spec"]["versions"] if version["served"]}
        groups = {found["name"]: found["versions"] for found in self.request("GET", "/apis")["groups"]}
        if not versions <= {version["version"] for version in groups.get(group, ())}:
            return False
        try:
            listed = [self.request("GET", f"/apis/{group}/{version}")["resources"] for version in versions]
        except NotFoundError:
            return False
        return all(plural in {entry["name"] for entry in resources} for resources in listed)


def optional_crd(kind: str) -> Manifest:
    """The CRD of a kind of another project (PodMonitor, ScaledObject, InferencePool); skips the test if it was not
    downloaded."""
    files = crds.find()
    if files is None:
        pytest.skip(f"no CRD of {kind} on this machine: run make cluster-tools (needs Go)")
    manifest: Manifest = yaml.safe_load(files[kind].read_text())
    return manifest


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
