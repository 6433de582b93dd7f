# SPDX-License-Identifier: Apache-2.0
"""The Jobs of a service: their resources, placement and network settings."""

import json

import kubernetes_validate
import pytest
from support.planning import llm_service
from support.rendering import only_of_kind, rendered_objects

from quire_operator.render import model_reader_job
from quire_operator.render.jobs import POD_FIELDS
from quire_spec.documents.sources import PvcSource, Source

GPU = "gpu: {product: NVIDIA-L4, nodeSelector: {pool: gpu}, tolerations: [{key: gpu, operator: Exists}]}\n"
READER_RESOURCES = {"requests": {"cpu": "100m", "memory": "128Mi"}}
DOWNLOAD_RESOURCES = {"requests": {"cpu": "500m", "memory": "512Mi"}}
POD_TEMPLATE = """
podTemplate:
  spec:
    affinity: {podAffinity: {}}
    dnsConfig: {nameservers: [10.0.0.10], options: [{name: ndots, value: "1"}]}
    dnsPolicy: None
    hostAliases: [{ip: 10.0.0.7, hostnames: [mirror.example]}]
    hostUsers: false
    imagePullSecrets: [{name: pull}]
    nodeSelector: {zone: a}
    preemptionPolicy: Never
    priorityClassName: low
    schedulerName: other
    securityContext: {supplementalGroups: [5]}
    tolerations: [{operator: Exists}]
    hostNetwork: true
    runtimeClassName: nvidia
    topologySpreadConstraints: []
"""


def jobs(text):
    """Return the pod specs of the download Job and of the model reader Job."""
    service = llm_service(GPU + text)
    reader = model_reader_job.job(service, Source(pvc=PvcSource("c")), "i:1")
    download = only_of_kind(rendered_objects(service), "Job")
    return [job["spec"]["template"]["spec"] for job in (download, reader)]


def test_by_default_the_jobs_run_where_the_server_runs():
    download, reader = jobs("")
    assert download["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-L4", "pool": "gpu"}
    assert reader["nodeSelector"] == {"pool": "gpu"}
    assert download["tolerations"] == reader["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    for pod, resources in ((download, DOWNLOAD_RESOURCES), (reader, READER_RESOURCES)):
        assert [container["resources"] for container in pod["containers"]] == [resources]


def test_spec_jobs_replaces_placement_and_completes_resources():
    affinity = "{nodeAffinity: {}}"
    text = f"{POD_TEMPLATE}jobs: {{nodeSelector: {{}}, tolerations: [{{key: cpu}}], affinity: {affinity}, resources: "
    for pod in jobs(f"{text}{{requests: {{cpu: '2', ephemeral-storage: 1Gi}}, limits: {{memory: 2Gi}}}}}}"):
        assert "nodeSelector" not in pod, "any node"
        assert pod["tolerations"] == [{"key": "cpu"}]
        assert pod["affinity"] == {"nodeAffinity": {}}
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == {"memory": "2Gi"}
        requests = container["resources"]["requests"]
        assert (requests["cpu"], requests["ephemeral-storage"]) == ("2", "1Gi") and "memory" in requests


def test_the_jobs_use_the_pod_level_fields_of_the_pod_template():
    for pod in jobs(POD_TEMPLATE):
        assert set(POD_FIELDS) <= set(pod)
        assert pod["hostAliases"] == [{"ip": "10.0.0.7", "hostnames": ["mirror.example"]}]
        assert pod["dnsConfig"]["nameservers"] == ["10.0.0.10"]
        assert pod["nodeSelector"]["zone"] == "a"
        assert pod["securityContext"]["supplementalGroups"] == [5] and pod["securityContext"]["runAsUser"] == 1000
        # A Job on a node of the server would need the server's ports, and may run on nodes without a GPU.
        assert not {"hostNetwork", "runtimeClassName"} & set(pod)


def test_labels_of_the_jobs_take_precedence_and_are_on_no_server_pod():
    text = "labels: {a: all, b: all}\npodTemplate: {metadata: {labels: {b: pods, inject: 'true'}}}\n"
    text += "jobs: {labels: {a: jobs, inject: 'false', queue: q}, annotations: {note: x}}"
    service = llm_service(GPU + text)
    objects = rendered_objects(service)
    for job in (only_of_kind(objects, "Job"), model_reader_job.job(service, Source(pvc=PvcSource("c")), "i:1")):
        labels, pod_labels = job["metadata"]["labels"], job["spec"]["template"]["metadata"]["labels"]
        assert labels.items() >= {"a": "jobs", "b": "all", "queue": "q"}.items()
        assert pod_labels.items() >= {"a": "jobs", "b": "pods", "inject": "false", "queue": "q"}.items()
        assert job["metadata"]["annotations"]["note"] == "x"
        assert job["spec"]["template"]["metadata"]["annotations"]["note"] == "x"
    server = only_of_kind(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert (server["a"], server["b"], server["inject"]) == ("all", "pods", "true") and "queue" not in server


@pytest.mark.parametrize("text", ["jobs: {nodeSelector: {a: b}}", "jobs: {resources: {limits: {cpu: '1'}}}"])
def test_a_setting_gives_a_new_name_because_a_job_is_immutable(text):
    (old, new) = (
        {m["metadata"]["name"] for (kind, _), m in rendered_objects(llm_service(GPU + t)).items() if kind == "Job"}
        for t in ("", text)
    )
    assert old != new


def test_a_model_in_an_image_is_mounted_by_its_pods_and_by_the_job_that_reads_it():
    image = "{reference: registry.example.com/llama:1, pullPolicy: Always, path: models/a}"
    service = llm_service(
        f"{GPU}model: {{source: {{image: {image}}}}}\nruntime: {{imagePullSecrets: [{{name: pull}}]}}"
    )
    objects = rendered_objects(service)
    assert not {"Job", "PersistentVolumeClaim"} & {kind for kind, _ in objects}
    reader = model_reader_job.job(service, service.spec.model.source, "i:1")
    for workload in (objects["Deployment", "s"], reader):
        pod = workload["spec"]["template"]["spec"]
        kubernetes_validate.validate(workload, "1.37", strict=True)
        (volume,) = [volume for volume in pod["volumes"] if "image" in volume]
        assert volume["image"] == {"reference": "registry.example.com/llama:1", "pullPolicy": "Always"}
        (container,) = pod["containers"]
        (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == volume["name"]]
        assert mount["readOnly"] and pod["imagePullSecrets"] == [{"name": "pull"}]
        arguments = json.dumps([container.get("args"), [*objects.values()]])
        assert f"{mount['mountPath']}/models/a" in arguments
