# SPDX-License-Identifier: Apache-2.0
"""desired(): every Kubernetes object of a service, from its spec, its plan and its surroundings. Pure: no clock, no
random numbers, no files; the same inputs give the same objects in the same order."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire_operator.engine_config import engine_arguments
from quire_operator.plan.plan import Plan
from quire_operator.render import config, download, model, network, pod, scaling
from quire_operator.render.cluster import Cluster
from quire_operator.service import LLMService
from quire_spec import constants as spec_names

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Desired:
    """The objects of a service."""

    manifests: tuple[Manifest, ...]
    """In the order in which they are applied: what others refer to first."""
    left_out: tuple[str, ...]
    """Kinds that the spec asks for and the cluster does not have."""


def desired(service: LLMService, plan: Plan, cluster: Cluster) -> Desired:
    """The objects of a service.

    Raises:
        ConfigError: a source that no pod can read, a claim that pods cannot share, or a catalogue that is too large.
        EngineRefuses: the engine cannot do what the spec pins.
    """
    model.check(service)
    asked = dict(_optional(service, plan))
    manifests = [*_core(service, plan, cluster), *(m for kind, m in asked.items() if kind in cluster.offers)]
    owned = tuple(_owned(service, manifest, cluster) for manifest in manifests)
    return Desired(owned, tuple(kind for kind in asked if kind not in cluster.offers))


def _core(service: LLMService, plan: Plan, cluster: Cluster) -> Iterator[Manifest]:
    """What every cluster has the kinds for."""
    spec = service.spec
    engine = config.engine_map(service, engine_arguments(service, model.folder(service), plan=plan))
    template = pod.template(service, plan, engine["metadata"]["name"])
    yield config.service_account(service)
    yield config.admin_secret(service, cluster)
    if credentials := config.credentials_secret(service, cluster):
        yield credentials
    yield engine
    yield config.catalogue_map(service)
    if spec.networking.networkPolicy.enabled:
        yield network.server_policy(service, cluster)
    if model.mode(service) == "PVC":
        if spec.networking.networkPolicy.enabled:
            yield network.download_policy(service, cluster)
        yield model.claim(service, plan)
        yield download.job(service, plan, template["spec"])
    yield network.service(service)
    yield network.pods_service(service)
    yield scaling.deployment(service, plan, template)
    if budget := scaling.disruption_budget(service):
        yield budget
    if spec.autoscaling and spec.autoscaling.kind == "HorizontalPodAutoscaler":
        yield scaling.autoscaler(service, plan, spec.autoscaling)


def _optional(service: LLMService, plan: Plan) -> Iterator[tuple[str, Manifest]]:
    """What only some clusters have the kinds for, as far as the spec asks for it."""
    spec = service.spec
    if spec.observability.podMonitor == "Auto":
        yield "PodMonitor", network.pod_monitor(service)
    if spec.autoscaling and spec.autoscaling.kind == "ScaledObject":
        yield "ScaledObject", scaling.scaled_object(service, plan, spec.autoscaling)
    if spec.networking.inferencePool:
        yield "InferencePool", network.inference_pool(service)


def _owned(service: LLMService, manifest: Manifest, cluster: Cluster) -> Manifest:
    """With the service as its owner, so that it goes when the service goes; a claim that is to be kept has none."""
    kept = manifest["kind"] == "PersistentVolumeClaim" and service.spec.cache.deletionPolicy == "Retain"
    if cluster.owner_uid is None or kept:
        return manifest
    owner = {
        "apiVersion": f"{spec_names.API_GROUP}/{spec_names.API_VERSION}",
        "kind": spec_names.KIND,
        "name": service.name,
        "uid": cluster.owner_uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [owner]}}
