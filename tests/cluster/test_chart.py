# SPDX-License-Identifier: Apache-2.0
"""The chart on a real API server: installed, upgraded and uninstalled by Helm, with the definition living on."""

import shutil

import pytest
import yaml
from support.chart import ALL_VALUES, CHART, DISABLED_VALUES, helm, parse_documents, render_chart
from support.cluster import running_cluster
from support.engine_processes import wait_for

CRD = "llmservices.quire.dev"
SYSTEM = "quire-system"
API = "quire.dev/v1alpha1"
TALES = {"device": "CPU", "model": {"source": {"pvc": {"claimName": "c"}}}}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A cluster of its own: the one that other tests share has the definition already."""
    with running_cluster(tmp_path_factory.mktemp("chart-cluster")) as cluster:
        yield cluster


class Release:
    """The release `quire` on a cluster."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder = cluster, folder

    def helm(self, command, chart=None, values=None, check=True, name="quire", more=()):
        where = ["-n", SYSTEM, "--kubeconfig", self.cluster.kubeconfig]
        if chart is not None:
            file = self.folder / "values.yaml"
            file.write_text(yaml.safe_dump(values or {}))
            where += ["-f", file]
        return helm(command, name, *([chart] if chart else []), *where, *more, check=check)

    def definition(self):
        return self.cluster.get("apiextensions.k8s.io/v1", "CustomResourceDefinition", CRD)


@pytest.fixture(scope="module")
def release(bare, tmp_path_factory):
    """Installed once for all tests here, which run in order."""
    made = Release(bare, tmp_path_factory.mktemp("release"))
    made.helm("install", CHART, more=["--create-namespace"])
    wait_for(lambda: bare.is_served(CRD), 120, "the definition is served")
    return made


def service(cluster, name="tales", **spec):
    body = {"apiVersion": API, "kind": "LLMService", "metadata": {"name": name}, "spec": TALES | spec}
    return cluster.apply(body, "default")


def test_installing_creates_every_object(release, bare):
    made = parse_documents(helm("template", "quire", CHART, "-n", SYSTEM).stdout)
    assert len(made) > 8
    for thing in made:
        meta = thing["metadata"]
        found = bare.get(thing["apiVersion"], thing["kind"], meta["name"], meta.get("namespace", SYSTEM))
        assert found, (thing["kind"], meta["name"])
    stored = release.definition()
    assert stored["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert service(bare)["spec"]["replicas"] == 1


@pytest.mark.parametrize("values", [ALL_VALUES, DISABLED_VALUES], ids=["named", "off"])
def test_objects_of_other_values_are_accepted(release, bare, tmp_path, values):
    """As a dry run: namespaces that are watched are made for it."""
    for namespace in values.get("watchNamespaces", ()):
        bare.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    for thing in render_chart(tmp_path, values):
        if thing["kind"] not in ("PodMonitor", "CustomResourceDefinition"):
            namespace = thing["metadata"].get("namespace")
            assert bare.apply(thing, namespace, dry_run=True)["metadata"]["name"] == thing["metadata"]["name"]


def test_a_new_field_survives_an_upgrade(release, bare, tmp_path):
    newer = tmp_path / "quire"
    shutil.copytree(CHART, newer)
    definition = yaml.safe_load((newer / "files/llmservices.yaml").read_text())
    spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"]["future"] = {"type": "string", "maxLength": 9}
    (newer / "files/llmservices.yaml").write_text(yaml.safe_dump(definition))
    chart = yaml.safe_load((newer / "Chart.yaml").read_text())
    (newer / "Chart.yaml").write_text(yaml.safe_dump(chart | {"version": "0.2.0"}))
    release.helm("upgrade", newer)
    wait_for(lambda: service(bare, future="here")["spec"].get("future") == "here", 120, "the new field")
    # And back: what the older definition does not know goes when the resource is next written; nothing else is lost.
    release.helm("upgrade", CHART)
    wait_for(
        lambda: (
            "future"
            not in bare.merge(API, "LLMService", "tales", {"metadata": {"labels": {"a": "b"}}}, "default")["spec"]
        ),
        30,
        "the older definition",
    )
    assert bare.get(API, "LLMService", "tales", "default")["spec"]["device"] == "CPU"


def test_uninstalling_keeps_definition_and_services(release, bare):
    release.helm("uninstall")
    assert bare.get("apps/v1", "Deployment", "quire", SYSTEM) is None
    assert bare.get("rbac.authorization.k8s.io/v1", "ClusterRole", "quire") is None
    assert release.definition()["metadata"].get("deletionTimestamp") is None
    assert bare.get(API, "LLMService", "tales", "default")["spec"]["device"] == "CPU"
    release.helm("install", CHART)
    assert bare.get(API, "LLMService", "tales", "default")


def test_another_release_can_adopt_the_crd(release, bare):
    """As docs/upgrade.md says."""
    release.helm("uninstall")
    refused = release.helm("install", CHART, name="other", check=False)
    assert refused.returncode and CRD in refused.stderr
    bare.kubectl("label", "crd", CRD, "app.kubernetes.io/managed-by=Helm", "--overwrite")
    names = ["meta.helm.sh/release-name=other", f"meta.helm.sh/release-namespace={SYSTEM}"]
    bare.kubectl("annotate", "crd", CRD, *names, "--overwrite")
    release.helm("install", CHART, name="other")
    assert release.definition()["metadata"]["labels"]["app.kubernetes.io/instance"] == "other"
    release.helm("uninstall", name="other")
    release.helm("install", CHART, name="third", more=["--take-ownership", "--force-conflicts"])
    assert release.definition()["metadata"]["labels"]["app.kubernetes.io/instance"] == "third"
    release.helm("uninstall", name="third")


def test_two_releases_of_one_name_and_an_upgrade_that_renames_roles(bare, tmp_path):
    def install(command, chart, team):
        values = tmp_path / "values.yaml"
        values.write_text(yaml.safe_dump({"watchNamespaces": [team], "crds": {"install": False}}))
        helm(command, "quire", chart, "-n", team, "-f", values, "--kubeconfig", bare.kubeconfig)

    def role(name):
        return bare.get("rbac.authorization.k8s.io/v1", "ClusterRole", name)

    for team in ("team-a", "team-b"):
        bare.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": team}})
    # The names that an earlier chart gave to the roles.
    earlier = tmp_path / "quire"
    shutil.copytree(CHART, earlier)
    rbac = earlier / "templates/rbac.yaml"
    rbac.write_text(rbac.read_text().replace("$clusterName }}-", "$name }}-"))
    install("install", earlier, "team-a")
    assert role("quire-nodes")
    install("upgrade", CHART, "team-a")
    assert role("quire-nodes") is None and role("quire-team-a-nodes"), "renamed, not left behind"
    install("install", CHART, "team-b")
    for team in ("team-a", "team-b"):
        binding = bare.get("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", f"quire-{team}-nodes")
        assert [subject["namespace"] for subject in binding["subjects"]] == [team]
        helm("uninstall", "quire", "-n", team, "--kubeconfig", bare.kubeconfig)
        assert role(f"quire-{team}-nodes") is None
