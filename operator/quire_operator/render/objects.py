# SPDX-License-Identifier: Apache-2.0
"""All Kubernetes objects of a service, rendered from its spec, its plan and facts about the cluster.

The functions are pure: they use no clock, no random numbers and no files. Therefore, the same inputs always result in
the same objects in the same order. Called by the controller and `quire render`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from quire_operator.api.disaggregation_spec import Role
from quire_operator.api.llmservice import LLMService
from quire_operator.plan.plan import Plan
from quire_operator.render import (
    configmaps,
    disaggregated_set,
    download_job,
    kv_storage,
    leader_worker_set,
    model_storage,
    network,
    pod_template,
    workload,
)
from quire_operator.render.context import RenderContext
from quire_operator.render.disaggregated_set import RoleTemplates
from quire_operator.render.manifests import Manifest, new_manifest, owner_reference
from quire_operator.render.pod_config import cluster_document


@dataclass(frozen=True, slots=True)
class RenderedObjects:
    """The objects of a service."""

    manifests: tuple[Manifest, ...]
    """The objects in the order in which they must be applied. An object comes after the objects that it refers to."""
    unavailable_kinds: tuple[str, ...]
    """Kinds of objects that the spec requires but the cluster does not support."""


@dataclass(frozen=True, slots=True)
class PodManifests:
    """What the pods of a service, or of one of its roles, are made from."""

    template: Manifest
    """The pod template."""
    engine_configmap: Manifest
    """The ConfigMap with pod.json."""
    worker_template: Manifest | None = None
    """The template of the other pods of a group, if the pods run in groups already."""


def render_objects(service: LLMService, plan: Plan, context: RenderContext) -> RenderedObjects:
    """Return the objects of a service.

    Raises:
        ConfigError: pods cannot read a source, or the adapter catalog is too large.
        UnsupportedByEngine: the engine does not support a value of the spec.
    """
    model_storage.validate(service)
    for own in service.pods:
        kv_storage.validate(own)
    on_one_node = model_storage.is_on_one_node(service, context.claim_access_modes)
    pods = {own.role: _render_pods(own, plan.for_role(own.role), on_one_node) for own in service.pods}
    of_clients = pods[service.pods_of_clients.role]
    manifests = [
        *_objects_for_pods(service, context, pods),
        *_download_objects(service, plan, context, of_clients.template, on_one_node),
        *_objects_around_pods(service, plan, pods),
    ]
    return _select_objects(service, plan, context, manifests)


def _render_pods(service: LLMService, plan: Plan, on_one_node: bool) -> PodManifests:
    engine_configmap = configmaps.engine_configmap(service, cluster_document(service, plan))
    template = pod_template.template(service, plan, engine_configmap["metadata"]["name"], on_one_node)
    return PodManifests(template, engine_configmap)


def render_running_objects(
    service: LLMService, plan: Plan, context: RenderContext, pods: Mapping[Role | None, PodManifests]
) -> RenderedObjects:
    """Return the objects of a service whose pods must stay as they are, without those that download a model.

    `plan` and `pods` are those of the running pods. The other objects follow the spec.

    Raises:
        ConfigError: the adapter catalog is too large.
    """
    running = {
        role: _with_metadata(service if role is None else service.for_role(role), own) for role, own in pods.items()
    }
    manifests = [
        *_objects_for_pods(service, context, running),
        *_objects_around_pods(service, plan, running),
    ]
    return _select_objects(service, plan, context, manifests)


def _with_metadata(service: LLMService, pods: PodManifests) -> PodManifests:
    """Return the manifests, in which the ConfigMap has the metadata of the service's objects."""
    meta = new_manifest("v1", "ConfigMap", service, pods.engine_configmap["metadata"]["name"])["metadata"]
    return replace(pods, engine_configmap={**pods.engine_configmap, "metadata": meta})


def _select_objects(
    service: LLMService, plan: Plan, context: RenderContext, manifests: list[Manifest]
) -> RenderedObjects:
    """Add the objects of optional kinds that the cluster supports, and the owner of all objects."""
    unavailable_kinds = []
    for manifest in _optional_objects(service, plan):
        if manifest["kind"] in context.available_kinds:
            manifests.append(manifest)
        else:
            unavailable_kinds.append(manifest["kind"])
    if context.owner_uid is not None:
        for manifest in manifests:
            _set_owner(service, manifest, context.owner_uid)
    return RenderedObjects(tuple(manifests), tuple(unavailable_kinds))


def _objects_for_pods(
    service: LLMService, context: RenderContext, pods: Mapping[Role | None, PodManifests]
) -> Iterator[Manifest]:
    """Yield the objects that must exist before pods start."""
    yield configmaps.service_account(service)
    yield configmaps.admin_secret(service, context)
    if credentials := configmaps.credentials_secret(service, context):
        yield credentials
    yield from (own.engine_configmap for own in pods.values())
    yield configmaps.adapter_configmap(service, context.catalog or service.build_catalog())
    if service.spec.networking.networkPolicy.enabled:
        yield network.server_network_policy(service, context)
        if service.num_nodes > 1:
            yield from (network.group_network_policy(own, context) for own in service.pods)


def _download_objects(
    service: LLMService, plan: Plan, context: RenderContext, template: Manifest, on_one_node: bool
) -> Iterator[Manifest]:
    """Yield the claim and the Job that downloads the model to it."""
    if model_storage.cache_mode(service) == "PVC":
        if service.spec.networking.networkPolicy.enabled:
            yield network.download_network_policy(service, context)
        yield model_storage.claim(service, plan)
        yield download_job.job(service, plan, template["spec"], on_one_node)


def _objects_around_pods(
    service: LLMService, plan: Plan, pods: Mapping[Role | None, PodManifests]
) -> Iterator[Manifest]:
    """Yield the Services, the object that makes the pods, and what scales and protects them."""
    spec = service.spec
    yield network.client_service(service)
    yield network.headless_service(service)
    if service.num_nodes > 1 and service.kv_transfer is not None:
        yield from map(network.nodes_service, service.pods)
    templates = {role: own.template for role, own in pods.items()}
    if service.roles:
        size = service.num_nodes
        of_roles = {role: RoleTemplates.from_template(templates[role], size) for role in service.roles}
        yield disaggregated_set.manifest(service, plan, of_roles)
    elif service.num_nodes == 1:
        yield workload.deployment(service, plan, templates[None])
    else:
        groups = leader_worker_set.group_templates(templates[None], service.num_nodes)
        yield leader_worker_set.manifest(service, plan, *groups, service.num_nodes, spec.replicas)
    yield from filter(None, map(workload.disruption_budget, service.pods))
    if spec.autoscaling and spec.autoscaling.kind == "HorizontalPodAutoscaler":
        yield workload.autoscaler(service, plan, spec.autoscaling)


def _optional_objects(service: LLMService, plan: Plan) -> Iterator[Manifest]:
    """Yield the objects that the spec requires and whose kinds are in OPTIONAL_KINDS."""
    spec = service.spec
    if spec.observability.podMonitor == "Auto":
        yield network.pod_monitor(service)
    if spec.autoscaling and spec.autoscaling.kind == "ScaledObject":
        yield workload.scaled_object(service, plan, spec.autoscaling)
    if spec.networking.inferencePool:
        yield network.inference_pool(service)
    if spec.networking.httpRoute:
        yield network.http_route(service, spec.networking.httpRoute)


def _set_owner(service: LLMService, manifest: Manifest, uid: str) -> None:
    """Make the service the owner of an object, so that Kubernetes deletes the object together with the service. If a
    claim must be retained, it does not get an owner."""
    if manifest["kind"] != "PersistentVolumeClaim" or service.spec.cache.deletionPolicy != "Retain":
        owner = {**owner_reference(service.name, uid), "blockOwnerDeletion": True}
        manifest["metadata"]["ownerReferences"] = [owner]
