# SPDX-License-Identifier: Apache-2.0
"""Template revision, which is the pod template that was rendered for a Deployment, or the two of a LeaderWorkerSet.

It is stored with that object. Pure.

A new release of the operator can render pods differently. So that an upgrade does not restart pods, the operator keeps
the stored template until the spec or the plan changes. The compressed template is stored in an annotation of
about 2 KB. The live template cannot be used for this. It also contains defaults of the API server, and manual changes
that the operator must undo.

pods_digest() covers the fields of the spec that replace pods (api/field_effects.py).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire_operator.api import crd, openapi_schema
from quire_operator.api.disaggregation_spec import Role
from quire_operator.api.field_effects import (
    POD_CACHE_FIELDS,
    POD_FIELDS,
    POD_KV_EVENTS_FIELDS,
    POD_ROLE_FIELDS,
    POD_ROLLOUT_FIELDS,
)
from quire_operator.api.llmservice import LLMService
from quire_operator.controller.compressed_json import compress, decompress
from quire_operator.plan.plan import Plan
from quire_operator.render import disaggregated_set, leader_worker_set, object_names
from quire_operator.render.disaggregated_set import RoleTemplates
from quire_operator.render.manifests import Manifest, container_ports
from quire_operator.render.objects import PodManifests
from quire_operator.render.pod_template import CONFIG_OPTION
from quire_operator.render.workload import deployment
from quire_spec import constants as spec_names

WORKLOAD_KINDS = ("Deployment", leader_worker_set.KIND, disaggregated_set.KIND)
PODS_ANNOTATION = f"{spec_names.API_GROUP}/pods"


@dataclass(frozen=True, slots=True)
class TemplateRevision:
    """The inputs from which the pods of a workload were rendered, and the result."""

    pods_digest: str
    """Result of pods_digest() for the service."""
    inputs_hash: str
    """Plan.inputsHash."""
    template: Manifest
    """Template of the pods that serve: those of a Deployment, the leaders of groups, or pods of the role decode."""
    engine_configmap: Manifest
    """ConfigMap that contains pod.json. Of its metadata, only the name is used."""
    worker_template: Manifest | None = None
    """Template of the other pods of a group. None: a replica is one pod."""
    group_size: int = 1
    """Number of pods of a group."""
    prefill: PodManifests | None = None
    """Template and ConfigMap of the role prefill. None: there are no roles."""

    @classmethod
    def from_manifests(cls, pods_digest: str, plan: Plan, manifests: Iterable[Manifest]) -> Self:
        """Build a revision from manifests that were rendered."""
        by_kind: dict[str, list[Manifest]] = {}
        for manifest in manifests:
            by_kind.setdefault(manifest["kind"], []).append(manifest)
        (workload,) = [manifest for kind in WORKLOAD_KINDS for manifest in by_kind.get(kind, ())]

        def mounted_configmap(template: Manifest) -> Manifest:
            mounted = mounted_configmaps(template["spec"])
            engine = next(m for m in by_kind["ConfigMap"] if m.get("immutable") and m["metadata"]["name"] in mounted)
            return {**engine, "metadata": {"name": engine["metadata"]["name"]}}

        template, group = workload_template(workload["spec"]), workload["spec"].get("leaderWorkerTemplate") or {}
        prefill = None
        if workload["kind"] == disaggregated_set.KIND:
            of_prefill = RoleTemplates.from_set(workload, Role.PREFILL)
            prefill = PodManifests(of_prefill.leader, mounted_configmap(of_prefill.leader), of_prefill.worker)
            of_decode = RoleTemplates.from_set(workload, Role.DECODE)
            group = {"workerTemplate": of_decode.worker, "size": of_decode.size}
        workers = group.get("workerTemplate"), group.get("size", 1)
        return cls(pods_digest, plan.inputsHash, template, mounted_configmap(template), *workers, prefill)

    @property
    def inputs(self) -> tuple[str, str]:
        """Return pods_digest and inputs_hash. Together, they identify the inputs from which the pods were rendered."""
        return self.pods_digest, self.inputs_hash

    @property
    def pods(self) -> dict[Role | None, PodManifests]:
        """Template and ConfigMap of each role, or of the pods that serve if there are no roles."""
        own = PodManifests(self.template, self.engine_configmap)
        return {None: own} if self.prefill is None else {Role.PREFILL: self.prefill, Role.DECODE: own}

    @property
    def serves_openai(self) -> bool:
        """Whether the pods have a port for the OpenAI API. Pods that an older release rendered do not have it."""
        return object_names.OPENAI_PORT_NAME in container_ports(self.template)

    @property
    def server_container(self) -> Mapping[str, Any]:
        """The container of the supervisor."""
        containers = self.template["spec"].get("containers") or ()
        return next((c for c in containers if c.get("name") == object_names.SERVER), {})

    @property
    def reads_pod_config(self) -> bool:
        """Whether the pods read pod.json. Pods that an older release rendered do not read it."""
        return any(str(argument).startswith(CONFIG_OPTION) for argument in self.server_container.get("args") or ())

    @classmethod
    def from_workload(cls, workload: Mapping[str, Any] | None) -> Self | None:
        """Read the revision from a workload. Return None if the revision does not exist or is invalid."""
        text = (workload or {}).get("metadata", {}).get("annotations", {}).get(PODS_ANNOTATION)
        if not text:
            return None
        try:
            body = decompress(text)
            group = body.get("group") or {}
            workers = group.get("template"), group.get("size", 1)
            other = body.get("prefill")
            prefill = None if other is None else PodManifests(other["template"], other["engine"], other.get("worker"))
            return cls(body["spec"], body["plan"], body["template"], body["engine"], *workers, prefill)
        except (ValueError, KeyError, TypeError, AttributeError):
            # A user changed the annotation, so the pods are rendered again.
            return None

    @property
    def annotation_value(self) -> str:
        """Return the value of the annotation. Equal revisions always have equal values."""
        inputs = {"spec": self.pods_digest, "plan": self.inputs_hash}
        group = {"group": {"template": self.worker_template, "size": self.group_size}} if self.worker_template else {}
        other = self.prefill
        prefill = {}
        if other is not None:
            worker = {"worker": other.worker_template} if other.worker_template else {}
            prefill = {"prefill": {"template": other.template, "engine": other.engine_configmap, **worker}}
        return compress({**inputs, "template": self.template, "engine": self.engine_configmap, **group, **prefill})

    def apply_to(
        self, manifests: Iterable[Manifest], service: LLMService, plan: Plan, replicas: int, surges: bool = True
    ) -> list[Manifest]:
        """Return a copy of the manifests that contains the workload of this revision, with `replicas`, and its
        ConfigMap. The workload that `manifests` contain can be of another kind. Without `surges`, a LeaderWorkerSet
        has no maxSurge."""
        result = []
        for manifest in manifests:
            meta = manifest["metadata"]
            if manifest["kind"] in WORKLOAD_KINDS:
                manifest = self._workload(meta, service, plan, replicas, surges)
            elif manifest["kind"] == "ConfigMap" and manifest.get("immutable"):
                role = meta["labels"].get(object_names.ROLE_LABEL)
                engine = self.pods[None if self.prefill is None else Role(role)].engine_configmap
                manifest = {**engine, "metadata": {**meta, "name": engine["metadata"]["name"]}}
            result.append(manifest)
        return result

    def _workload(self, meta: Manifest, service: LLMService, plan: Plan, replicas: int, surges: bool) -> Manifest:
        own = {object_names.PLAN_ANNOTATION: self.inputs_hash, PODS_ANNOTATION: self.annotation_value}
        if self.prefill is not None:
            templates_of_roles = {
                Role.PREFILL: RoleTemplates(self.prefill.template, self.prefill.worker_template, self.group_size),
                Role.DECODE: RoleTemplates(self.template, self.worker_template, self.group_size),
            }
            manifest = disaggregated_set.manifest(service, plan, templates_of_roles, has_pods=replicas > 0)
        elif self.worker_template is None:
            manifest = deployment(service, plan, self.template)
            manifest["spec"]["replicas"] = replicas
        else:
            templates = self.template, self.worker_template
            manifest = leader_worker_set.manifest(service, plan, *templates, self.group_size, replicas, surges)
        return {**manifest, "metadata": {**meta, "annotations": {**meta.get("annotations", {}), **own}}}


def has_replicas(workload: Mapping[str, Any] | None) -> bool:
    """Whether a workload exists and has pods, according to its spec."""
    if workload is None:
        return False
    parts = [role["spec"] for role in workload["spec"].get("roles", ())] or [workload["spec"]]
    return any(part.get("replicas", 1) > 0 for part in parts)


def workload_template(spec: Mapping[str, Any]) -> Manifest:
    """Return the template of the pods that serve, from the spec of a Deployment, ReplicaSet, LeaderWorkerSet or
    DisaggregatedSet."""
    if "roles" in spec:
        return RoleTemplates.from_set({"spec": spec}, Role.DECODE).leader
    group = spec.get("leaderWorkerTemplate")
    template: Manifest | None = spec.get("template") if group is None else group.get("leaderTemplate")
    return template or {}


def pods_digest(body: Mapping[str, Any], service: LLMService) -> str:
    """Return the digest of those fields of the spec that affect the pods.

    `body` contains the defaults that crd.validate adds.

    Values that are equal to the schema's default are not part of the digest. Therefore, it does not change if a later
    release adds a field.
    """
    fields = crd.load_schema()["properties"]["spec"]
    spec = openapi_schema.without_defaults(fields, body["spec"])
    sources = [*service.model_sources.values(), *service.adapter_places.values()]
    pod_fields = {name: spec[name] for name in POD_FIELDS if name in spec}
    pod_fields["cache"] = {k: v for k, v in spec.get("cache", {}).items() if k in POD_CACHE_FIELDS}
    pod_fields |= {k: v for k, v in spec.get("rollout", {}).items() if k in POD_ROLLOUT_FIELDS}
    if (roles := spec.get("disaggregation")) is not None:
        pod_fields["disaggregation"] = {
            name: {k: v for k, v in own.items() if k in POD_ROLE_FIELDS} if isinstance(own, Mapping) else own
            for name, own in roles.items()
        }
    if (events := spec.get("networking", {}).get("kvEvents")) is not None:
        # The list is not empty even if all fields have their defaults.
        pod_fields["kvEvents"] = [{k: v for k, v in events.items() if k in POD_KV_EVENTS_FIELDS}]
    pod_fields["claims"] = sorted({source.pvc.claimName for source in sources if source.pvc})
    text = json.dumps({k: v for k, v in pod_fields.items() if v}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def mounted_configmaps(pod_spec: Mapping[str, Any]) -> set[str]:
    """Return the names of the ConfigMaps that a pod mounts."""
    volumes = pod_spec.get("volumes") or ()
    return {volume["configMap"]["name"] for volume in volumes if "configMap" in volume}
