# SPDX-License-Identifier: Apache-2.0
"""Pod templates across an upgrade of the operator: which are kept, which are replaced, and which changes are rejected.

The pods before the upgrade have the arguments that the operator rendered before pod.json.
"""

import copy

import pytest
from support.planning import llm_service
from support.rendering import GPU, RENDER_CONTEXT, only_of_kind, plan_of_service, server_container

from quire_operator.controller.apply.child_objects import LiveObjects, build_child_objects
from quire_operator.controller.compressed_json import compress, decompress
from quire_operator.controller.template_revision import PODS_ANNOTATION, TemplateRevision
from quire_operator.plan.plan import Origin, PlannedValue
from quire_spec.documents.download_result import KEPT_FOLDERS_VARIABLE
from quire_spec.errors import ConfigError

OLD_ARGUMENTS = ["--engine=/etc/quire/engine/engine.json", "--served-name=s", "--run-dir=/run/quire"]
PINNED = f"{GPU}cache: {{mode: EmptyDir}}\nruntime: {{image: quire:old}}\n"
FREE = f"{GPU}cache: {{mode: EmptyDir}}\n"


def with_image(plan, image):
    return plan.__class__(
        **{name: getattr(plan, name) for name in plan.__slots__} | {"image": PlannedValue(image, Origin.COMPUTED, "")}
    )


def build(service, digest, image, deployment=None):
    plan = with_image(plan_of_service(service), image)
    live_objects = LiveObjects(workload=deployment)
    children = build_child_objects(service, digest, plan, RENDER_CONTEXT, live_objects)
    return children, {(m["kind"], m["metadata"]["name"]): m for m in children.manifests}


def old_deployment(spec, image="quire:old"):
    """Return the Deployment that the operator applied before pod.json."""
    service = llm_service(spec)
    _, objects = build(service, "digest", image)
    manifests = [copy.deepcopy(manifest) for manifest in objects.values()]
    _, container = server_container(manifests)
    container["args"] = OLD_ARGUMENTS
    plan = plan_of_service(service)
    revision = TemplateRevision.from_manifests("digest", plan, manifests)
    applied = {(m["kind"], m["metadata"]["name"]): m for m in revision.apply_to(manifests, service, plan, 1)}
    return only_of_kind(applied, "Deployment")


def template_of(deployment):
    return deployment["spec"]["template"]


AUTO = "rollout: {updatePolicy: Auto}\n"


@pytest.mark.parametrize(
    ("spec", "changed", "image", "expected", "outdated"),
    [
        (FREE, False, "quire:old", "kept", ""),
        (PINNED, False, "quire:old", "kept", "quire:old"),
        # Pods that are rendered again get an image of the release.
        (FREE, True, "quire:new", "replaced", ""),
        (FREE + AUTO, False, "quire:new", "replaced", ""),
        # An image that cannot read pod.json never gets a template of this release.
        (PINNED, True, "quire:old", "rejected", None),
        (FREE, True, "quire:old", "rejected", None),
        (PINNED + AUTO, False, "quire:old", "kept", "quire:old"),
        (PINNED + AUTO, True, "quire:old", "rejected", None),
    ],
)
def test_an_upgrade(spec, changed, image, expected, outdated):
    before = old_deployment(spec)
    service, digest = llm_service(spec), "changed" if changed else "digest"
    if expected == "rejected":
        field = "spec.runtime.image" if "image" in spec else "the image in the chart's values"
        with pytest.raises(ConfigError, match=f"{field}: 'quire:old' is older than the operator and cannot read pod"):
            build(service, digest, image, before)
        return
    children, objects = build(service, digest, image, before)
    after = template_of(only_of_kind(objects, "Deployment"))
    assert (after == template_of(before)) == (expected == "kept")
    assert children.outdated_image == outdated
    container = next(c for c in after["spec"]["containers"] if c["name"] == "server")
    assert container["image"] == ("quire:old" if expected == "kept" else "quire:new")
    assert (container["args"] == OLD_ARGUMENTS) == (expected == "kept")


@pytest.mark.parametrize("auto", ["", AUTO])
def test_a_change_of_labels_reaches_the_objects_at_once_and_the_pods_at_their_next_replacement(auto):
    _, objects = build(llm_service(FREE + auto + "labels: {team: a}"), "digest", "quire:1")
    deployment, service = only_of_kind(objects, "Deployment"), llm_service(FREE + auto + "labels: {team: b}")
    for digest, pod_label in (("digest", "a"), ("changed", "b")):
        _, objects = build(service, digest, "quire:1", deployment)
        labels = {manifest["metadata"]["labels"]["team"] for manifest in objects.values()}
        assert labels == {"b"}
        assert template_of(only_of_kind(objects, "Deployment"))["metadata"]["labels"]["team"] == pod_label


def test_a_container_that_a_webhook_adds_to_the_download_job_is_ignored():
    service = llm_service(GPU)
    plan = plan_of_service(service)

    def job_of(live_objects):
        children = build_child_objects(service, "digest", plan, RENDER_CONTEXT, live_objects)
        return next(m for m in children.manifests if m["kind"] == "Job")

    job = job_of(LiveObjects(used_folders=["a", "b"]))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert {"name": KEPT_FOLDERS_VARIABLE, "value": "a,b"} in container["env"]
    live_job = copy.deepcopy(job)
    sidecar = {"name": "proxy", "env": [{"name": KEPT_FOLDERS_VARIABLE, "value": "theirs"}]}
    live_job["spec"]["template"]["spec"]["containers"].insert(0, sidecar)
    jobs = {job["metadata"]["name"]: {**live_job, "status": {}}}
    assert job_of(LiveObjects(download_jobs=jobs, used_folders=["c"])) == job


def test_a_pinned_image_that_reads_pod_json_is_not_outdated():
    service = llm_service(PINNED)
    _, objects = build(service, "digest", "quire:old")
    children, _ = build(service, "changed", "quire:old", only_of_kind(objects, "Deployment"))
    assert children.outdated_image == ""


def test_a_document_that_decompresses_to_too_much_is_invalid():
    assert decompress(compress({"a": "b" * 1_000_000}))
    with pytest.raises(ValueError, match="more than 4194304 bytes"):
        decompress(compress({"a": "b" * 5_000_000}))
    with pytest.raises(ValueError, match="is not compressed JSON"):
        decompress(compress({"a": "b"})[:-12])


def test_the_template_survives_the_annotation_of_both_releases():
    """The annotation has the same keys as before, so that the operator of either release reads it."""
    deployment = old_deployment(FREE)
    annotation = deployment["metadata"]["annotations"][PODS_ANNOTATION]
    assert set(decompress(annotation)) == {"spec", "plan", "template", "engine"}
    revision = TemplateRevision.from_workload(deployment)
    assert revision is not None and not revision.reads_pod_config
    assert revision.inputs[0] == "digest" and revision.template == template_of(deployment)
    assert TemplateRevision.from_workload({"metadata": {"annotations": {"quire.dev/pods": "x"}}}) is None
