# SPDX-License-Identifier: Apache-2.0
"""The chart, rendered by Helm without a cluster: its objects, and values that its schema rejects."""

import re
import shutil

import kubernetes_validate
import pytest
import yaml
from support.chart import (
    ALL_VALUES,
    CHART,
    DISABLED_VALUES,
    ROOT,
    helm,
    only_of_kind,
    parse_documents,
    render_chart,
)
from support.openapi import CRD

from quire_operator.api import crd
from quire_operator.api.spec_defaults import ALLOWED_FIELDS, SpecDefaults
from quire_operator.render import object_names
from quire_sources.http.borders import PRIVATE_NETWORKS

MATRIX = {"defaults": {}, "named": ALL_VALUES, "off": DISABLED_VALUES}
OPTIONAL = {"PodMonitor"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("chart")


@pytest.fixture(scope="module")
def objects(folder):
    return render_chart(folder)


@pytest.fixture(scope="module")
def custom(folder):
    return render_chart(folder, ALL_VALUES, "demo")


def container(objects):
    (only,) = only_of_kind(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    return only


def option(objects, name):
    return [a.partition("=")[2] for a in container(objects)["args"] if a.startswith(f"--{name}=")]


def rules(role):
    """Return every (group, resource, verb) of a role."""
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_helm_lint_strict():
    helm("lint", CHART, "--strict")


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_objects_match_the_schemas_of_kubernetes(folder, values):
    objects = render_chart(folder, values)
    seen = set()
    for thing in objects:
        key = (thing["kind"], thing["metadata"].get("namespace"), thing["metadata"]["name"])
        assert key not in seen
        seen.add(key)
        if thing["kind"] not in OPTIONAL:
            kubernetes_validate.validate(thing, "1.37", strict=True)
        labels = thing["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "quire"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"


def test_every_value_reaches_an_object(folder):
    """Driven by values.yaml: all values are changed together, and each change must appear in an object."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    text = "\n".join(map(str, render_chart(folder, ALL_VALUES)))
    for path in leaves(defaults):
        value = value_at(ALL_VALUES, path)
        assert value is not None, f"{'.'.join(path)}: NAMED has no other value for it"
        if path[-1] != "tag":  # a digest goes before
            assert all(str(word) in text for word in words(value)), f"{'.'.join(path)}: changes nothing"


def test_switches_add_and_remove_objects(folder):
    kinds = {"crds": "CustomResourceDefinition", "rbac": "ClusterRole", "serviceAccount": "ServiceAccount"}
    kinds |= {"networkPolicy": "NetworkPolicy"}
    on = [o["kind"] for o in render_chart(folder)]
    off = [o["kind"] for o in render_chart(folder, DISABLED_VALUES | {"crds": {"install": False}})]
    for value, kind in kinds.items():
        assert kind in on, value
        assert kind not in off, value


def value_at(values, path):
    for part in path:
        values = values.get(part) if isinstance(values, dict) else None
    return values


def words(value):
    """Return every string and number in a value, and the keys of maps."""
    if isinstance(value, dict):
        return [word for key, inner in value.items() for word in (key, *words(inner))]
    if isinstance(value, list):
        return [word for inner in value for word in words(inner)]
    return [] if isinstance(value, bool) else [value]


def leaves(values, path=()):
    for key, value in values.items():
        if isinstance(value, dict) and value and key not in ("labels", "annotations"):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


@pytest.mark.parametrize(
    ("values", "path", "message"),
    [
        ({"replicaCount": 2}, "", "replicaCount"),
        ({"operator": {"logLevel": "chatty"}}, "operator.logLevel", "warning"),
        ({"watchNamespaces": ["Team A"]}, "watchNamespaces.0", "pattern"),
        ({"image": {"operator": {"digest": "abc"}}}, "image.operator.digest", "pattern"),
        ({"metrics": {"podMonitor": {"interval": "often"}}}, "metrics.podMonitor.interval", "pattern"),
        ({"operator": {"env": [{"name": "A", "value": 1}]}}, "operator.env.0.value", "string"),
    ],
)
def test_rejects_invalid_values_with_their_path(folder, values, path, message):
    file = folder / "wrong.yaml"
    file.write_text(yaml.safe_dump(values))
    result = helm("template", "quire", CHART, "-f", file, check=False)
    assert result.returncode != 0
    # The path is operator.workers in Helm 3 and '/operator/workers' in Helm 4.
    assert path in result.stderr or path.replace(".", "/") in result.stderr
    assert message in result.stderr


def test_crd_is_the_one_of_the_repository_and_is_kept(folder, objects):
    assert (CHART / "files/llmservices.yaml").resolve() == ROOT / "crds/llmservices.yaml"
    definition = only_of_kind(objects, "CustomResourceDefinition")
    assert definition["spec"] == CRD["spec"]
    assert definition["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert not only_of_kind(render_chart(folder, DISABLED_VALUES), "CustomResourceDefinition")["metadata"].get(
        "annotations"
    )
    assert not (CHART / "crds").exists(), "Helm never upgrades that folder"


def test_deployment_has_one_replica_with_limits(objects):
    deployment = only_of_kind(objects, "Deployment")["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    assert {mount["name"] for mount in container(objects)["volumeMounts"]} == {"tmp"}
    assert container(objects)["resources"] == {
        "requests": {"cpu": "100m", "memory": "192Mi"},
        "limits": {"memory": "512Mi"},
    }


def test_default_images_have_the_version_of_the_release(folder, objects, custom):
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert version == re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert container(objects)["image"] == f"quire-operator:{version}"
    assert option(objects, "gpu-image") == [f"quire:{version}-gpu"]
    assert option(objects, "cpu-image") == [f"quire:{version}-cpu"]
    assert container(custom)["image"] == f"registry.example/team/manager@sha256:{'1' * 64}"
    tagged = render_chart(folder, {"image": {"registry": "registry.example", "cpu": {"tag": "edge"}}})
    assert option(tagged, "cpu-image") == ["registry.example/quire:edge"]


def test_rbac_rules_are_explicit(objects):
    roles = [o for o in objects if o["kind"] in ("ClusterRole", "Role")]
    for group, resource, verb in set().union(*map(rules, roles)):
        assert "*" not in (group, resource, verb)
        assert resource not in ("pods/exec", "pods/log", "roles", "rolebindings", "clusterroles", "*")
    granted = rules(only_of_kind(objects, "ClusterRole", "quire"))
    assert {verb for _, resource, verb in granted if resource == "llmservices"} == {"list", "watch"}
    assert {verb for _, resource, verb in granted if resource == "pods"} == {"list", "watch"}
    assert {verb for _, resource, verb in granted if resource == "secrets"} == {"get", "create", "patch", "delete"}
    assert rules(only_of_kind(objects, "ClusterRole", "quire-nodes")) == {("", "nodes", "list")}
    binding = only_of_kind(objects, "ClusterRoleBinding", "quire")
    account = only_of_kind(objects, "ServiceAccount")["metadata"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
    ]
    assert binding["roleRef"]["name"] == "quire"


def test_watch_namespaces_get_roles_instead_of_a_cluster_role(custom, objects):
    roles = [o for o in custom if o["kind"] == "Role"]
    bindings = [o for o in custom if o["kind"] == "RoleBinding"]
    assert [o["metadata"]["namespace"] for o in roles] == ["team-a", "team-b"]
    assert {o["metadata"]["namespace"] for o in bindings} == {"team-a", "team-b"}
    assert {o["subjects"][0]["name"] for o in bindings} == {"of-mine"}
    assert not [o for o in custom if o["kind"].startswith("Cluster")]
    assert option(custom, "namespace") == ["team-a", "team-b"]
    for role in roles:
        assert rules(role) == rules(only_of_kind(objects, "ClusterRole", "quire"))


def cluster_scoped(objects):
    return {
        (o["kind"], o["metadata"]["name"])
        for o in objects
        if o["kind"] in ("ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition")
    }


def test_two_releases_of_one_name_share_no_object_of_the_cluster(folder):
    file = folder / "team.yaml"
    names = []
    for team in ("team-a", "team-b"):
        file.write_text(yaml.safe_dump({"watchNamespaces": [team], "crds": {"install": False}}))
        names.append(cluster_scoped(parse_documents(helm("template", "quire", CHART, "-n", team, "-f", file).stdout)))
    for_the_cluster = cluster_scoped(render_chart(folder))
    assert len(names[0]) == len(names[1]) == 4
    assert not names[0] & names[1] and not for_the_cluster & (names[0] | names[1])
    assert {name for _, name in for_the_cluster} >= {"quire", "quire-nodes", "quire-view", "quire-edit"}


def test_ids_can_be_left_to_the_cluster(folder):
    def security(values):
        objects = render_chart(folder, {"securityContext": values})
        return only_of_kind(objects, "Deployment")["spec"]["template"]["spec"]["securityContext"]

    always = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    ids = {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000}
    assert security({}) == ids | always
    assert security(dict.fromkeys(ids)) == always
    assert security({"runAsUser": 1000700000})["runAsUser"] == 1000700000


def test_the_default_networks_of_sources_are_those_of_the_operator(folder, objects):
    assert option(objects, "source-networks") == [",".join(PRIVATE_NETWORKS)]
    assert option(render_chart(folder, {"sources": {"allowedCIDRs": []}}), "source-networks") == [""]


def test_the_operator_restarts_with_other_defaults_and_reads_them(folder):
    def pod(values):
        objects = render_chart(folder, values)
        return objects, only_of_kind(objects, "Deployment")["spec"]["template"]

    none, plain = pod({})
    assert not [o for o in none if o["kind"] == "ConfigMap"] and not option(none, "defaults")
    objects, template = pod({"defaults": ALL_VALUES["defaults"]})
    _, other = pod({"defaults": {"labels": {"team": "b"}}})
    assert len({str(t["metadata"]["annotations"]) for t in (plain, template, other)}) == 3
    (mount,) = [m for m in container(objects)["volumeMounts"] if m["name"] == "defaults"]
    folder_path, _, file = option(objects, "defaults")[0].rpartition("/")
    assert folder_path == mount["mountPath"]
    content = only_of_kind(objects, "ConfigMap")["data"][file]
    assert SpecDefaults.parse(yaml.safe_load(content)).spec == ALL_VALUES["defaults"]
    allowed = {path.partition(".")[0] for path in ALLOWED_FIELDS}
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())["properties"]["defaults"]
    assert set(schema["properties"]) == allowed


def test_values_of_an_older_chart_give_the_same_operator(folder, objects):
    """helm upgrade --reuse-values uses the values of the old chart, which lack what is new."""
    older = folder / "older"
    shutil.copytree(CHART, older)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for name in ("sources", "securityContext", "defaults"):
        del values[name]
    (older / "values.yaml").write_text(yaml.safe_dump(values))
    found = parse_documents(helm("template", "quire", older, "-n", "quire-system").stdout)
    assert option(found, "source-networks") == [], "the operator's own default is the same"
    left, right = (only_of_kind(chart, "Deployment")["spec"]["template"]["spec"] for chart in (found, objects))
    assert left["securityContext"] == right["securityContext"]


def test_view_and_edit_roles_include_llmservices(objects):
    view, edit = (only_of_kind(objects, "ClusterRole", f"quire-{role}") for role in ("view", "edit"))
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert {verb for *_, verb in rules(view)} == {"get", "list", "watch"}
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    assert ("quire.dev", "llmservices/scale", "patch") in rules(edit)
    assert not {rule for rule in rules(edit) if rule[1] == "llmservices/status"}, "only the operator writes the status"


def test_selectors_match_the_operator_pod(objects):
    labels = only_of_kind(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    for selector in (
        only_of_kind(objects, "Deployment")["spec"]["selector"]["matchLabels"],
        only_of_kind(objects, "Service")["spec"]["selector"],
        only_of_kind(objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
        assert selector.items() >= {"app.kubernetes.io/name": object_names.MANAGER}.items()
    ports = {port["name"] for port in container(objects)["ports"]}
    assert {port["targetPort"] for port in only_of_kind(objects, "Service")["spec"]["ports"]} <= ports


def test_network_policy_allows_only_prometheus(objects, custom):
    (ingress,) = only_of_kind(objects, "NetworkPolicy")["spec"]["ingress"]
    assert ingress["from"] == [
        {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}}
    ]
    (ingress,) = only_of_kind(custom, "NetworkPolicy")["spec"]["ingress"]
    assert ingress["from"] == ALL_VALUES["networkPolicy"]["ingressFrom"]
    assert only_of_kind(custom, "NetworkPolicy")["spec"]["policyTypes"] == ["Ingress"]


def test_notes_contain_a_valid_llmservice(folder):
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump({"watchNamespaces": ["team-a"], "rbac": {"readNodes": False}}))
    notes = helm("install", "quire", CHART, "-n", "q", "-f", file, "--dry-run=client").stdout.partition("NOTES:")[2]
    assert "the namespaces team-a" in notes
    assert "spec.gpu.product" in notes
    assert "deployment/quire" in notes
    (text,) = re.findall(r"<<'EOF'\n(.*?)\nEOF\n", notes, re.DOTALL)
    body = yaml.safe_load(text)
    assert not crd.validate(body).problems
    assert body["metadata"]["namespace"] == "team-a"
