# SPDX-License-Identifier: Apache-2.0
"""All Kubernetes objects of a service, rendered from its spec, its plan and facts about the cluster.

Pure: no clock, no random numbers, no files. The same inputs give the same objects in the same order. Called by the
controller and `quire render`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire_operator.api.llmservice import LLMService
from quire_operator.plan.plan import Plan
from quire_operator.render import configmaps, download_job, model_storage, network, pod_template, workload
from quire_operator.render.context import RenderContext
from quire_operator.render.engine_config import engine_arguments
from quire_spec import constants as spec_names

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RenderedObjects:
    """The objects of a service."""

    manifests: tuple[Manifest, ...]
    """Objects in the order in which they are applied: referenced objects first."""
    unavailable_kinds: tuple[str, ...]
    """Kinds that the spec requires and the cluster does not have."""


def render_objects(service: LLMService, plan: Plan, context: RenderContext) -> RenderedObjects:
    """Return the objects of a service.

    Raises:
        ConfigError: pods cannot read a source or share a claim, or the adapter catalog is too large.
        UnsupportedByEngine: the engine does not support a value of the spec.
    """
    model_storage.validate(service)
    optional = dict(_optional_objects(service, plan))
    manifests = [
        *_required_objects(service, plan, context),
        *(m for kind, m in optional.items() if kind in context.available_kinds),
    ]
    manifests_with_owner = tuple(_with_owner(service, manifest, context) for manifest in manifests)
    return RenderedObjects(
        manifests_with_owner, tuple(kind for kind in optional if kind not in context.available_kinds)
    )


def _required_objects(service: LLMService, plan: Plan, context: RenderContext) -> Iterator[Manifest]:
    """Yield the objects of kinds that every cluster has."""
    spec = service.spec
    engine_configmap = configmaps.engine_configmap(
        service, engine_arguments(service, model_storage.folder(service), plan=plan)
    )
    template = pod_template.template(service, plan, engine_configmap["metadata"]["name"])
    yield configmaps.service_account(service)
    yield configmaps.admin_secret(service, context)
    if credentials := configmaps.credentials_secret(service, context):
        yield credentials
    yield engine_configmap
    yield configmaps.adapter_configmap(service)
    if spec.networking.networkPolicy.enabled:
        yield network.server_network_policy(service, context)
    if model_storage.cache_mode(service) == "PVC":
        if spec.networking.networkPolicy.enabled:
            yield network.download_network_policy(service, context)
        yield model_storage.claim(service, plan)
        yield download_job.job(service, plan, template["spec"])
    yield network.client_service(service)
    yield network.headless_service(service)
    yield workload.deployment(service, plan, template)
    if budget := workload.disruption_budget(service):
        yield budget
    if spec.autoscaling and spec.autoscaling.kind == "HorizontalPodAutoscaler":
        yield workload.autoscaler(service, plan, spec.autoscaling)


def _optional_objects(service: LLMService, plan: Plan) -> Iterator[tuple[str, Manifest]]:
    """Yield the objects of OPTIONAL_KINDS that the spec requires, with their kind."""
    spec = service.spec
    if spec.observability.podMonitor == "Auto":
        yield "PodMonitor", network.pod_monitor(service)
    if spec.autoscaling and spec.autoscaling.kind == "ScaledObject":
        yield "ScaledObject", workload.scaled_object(service, plan, spec.autoscaling)
    if spec.networking.inferencePool:
        yield "InferencePool", network.inference_pool(service)


def _with_owner(service: LLMService, manifest: Manifest, context: RenderContext) -> Manifest:
    """Return the manifest with the service as its owner, so that both are deleted together, except retained claims."""
    is_retained = manifest["kind"] == "PersistentVolumeClaim" and service.spec.cache.deletionPolicy == "Retain"
    if context.owner_uid is None or is_retained:
        return manifest
    owner = {
        "apiVersion": f"{spec_names.API_GROUP}/{spec_names.API_VERSION}",
        "kind": spec_names.KIND,
        "name": service.name,
        "uid": context.owner_uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [owner]}}
