# SPDX-License-Identifier: Apache-2.0
"""Plan service, which reads the inputs of a plan and makes the plan.

If there is no plan, it returns the reason. Called by the reconciler.

As long as the spec and the model do not change, the plan is kept and no source is read. Therefore, a service
is not delayed if the hub is unavailable or the operator restarts.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping
from typing import Any

from quire_operator.api.disaggregation_spec import Role
from quire_operator.api.llmservice import Device, LLMService
from quire_operator.controller.observe.checkpoint_store import CheckpointStore, NotReadYet, SecretValues
from quire_operator.controller.parsed_service import ParsedService
from quire_operator.controller.status.observed_state import PlanningResult
from quire_operator.controller.template_revision import TemplateRevision, has_replicas
from quire_operator.kube import resources
from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.errors import Forbidden
from quire_operator.kube.resources import DISAGGREGATED_SET, LEADER_WORKER_SET
from quire_operator.plan.device_memory import MIB
from quire_operator.plan.errors import Unplannable, UnplannableReason
from quire_operator.plan.gpu import PRODUCT_LABEL, GpuInfo, resolve_gpu
from quire_operator.plan.inputs import PlannerInputs
from quire_operator.plan.nodes import Node, node_capacity, usable_node_labels
from quire_operator.plan.plan import VERSION, Plan
from quire_operator.plan.planner import reuse_or_make_plan
from quire_operator.render import kv_storage, model_storage
from quire_spec.documents.download_result import DownloadReason
from quire_spec.errors import AccessDenied, ConfigError, NotFound, Unavailable

logger = logging.getLogger(__name__)

_NODES_TTL_S = 60.0
"""The nodes are cached for this many seconds."""


class PlanService:
    """Plans for services."""

    def __init__(self, client: ApiClient, checkpoints: CheckpointStore, images: Mapping[str, str]) -> None:
        """`images` are the images that this release uses by default for GPU and CPU."""
        self._client, self._checkpoints, self._images = client, checkpoints, images
        self._nodes: list[Node] = []
        self._nodes_read_at = float("-inf")
        self._lock = asyncio.Lock()

    async def plan_for(
        self,
        desired: ParsedService,
        previous_plan: Plan | None,
        workload: Mapping[str, Any] | None,
        secrets: SecretValues,
        available_kinds: Collection[str] = (),
    ) -> PlanningResult:
        """Plan a service that has a valid spec.

        `workload` is the service's Deployment or LeaderWorkerSet, if it exists. While its pods run, nodes that join,
        leave or change do not change their plan. `available_kinds` are the kinds in
        DISCOVERED_RESOURCES that the API server serves.

        Raises:
            ApiError: the API server does not respond.
        """
        service = desired.service
        assert service is not None, "the spec is valid"
        try:
            model_storage.validate(service)
            for pods in service.pods:
                kv_storage.validate(pods)
        except ConfigError as error:
            return PlanningResult(plan=previous_plan, spec_error=str(error))
        if service.num_nodes > 1 and not service.roles and LEADER_WORKER_SET.kind not in available_kinds:
            return PlanningResult(plan=previous_plan, unplannable=_no_leader_worker_set())
        if service.roles and DISAGGREGATED_SET.kind not in available_kinds:
            return PlanningResult(plan=previous_plan, unplannable=_no_disaggregated_set())
        revision = TemplateRevision.from_workload(workload)
        keeps_pods = (
            previous_plan is not None
            and revision is not None
            and revision.inputs == (desired.pods_digest, previous_plan.inputsHash)
        )
        is_current = keeps_pods and previous_plan is not None and self._would_keep(service, previous_plan)
        if is_current and previous_plan is not None and has_replicas(workload):
            return PlanningResult(plan=previous_plan, note=await self._describe_other_nodes(service, previous_plan))
        try:
            gpus = {pods.role: await self._resolve_gpu(pods) for pods in service.pods}
        except Unplannable as error:
            # The autoscaler may have removed the nodes, and the labels that describe the GPU disappeared with them.
            is_kept = is_current and error.reason is UnplannableReason.GPU_UNKNOWN
            return PlanningResult(plan=previous_plan, unplannable=None if is_kept else error)
        if is_current and previous_plan is not None and _fit_gpus(previous_plan, gpus):
            return PlanningResult(plan=previous_plan)
        image = service.spec.runtime.image or self._images["CPU" if service.spec.device is Device.CPU else "GPU"]
        try:
            checkpoint = await self._checkpoints.get(service, desired.uid, secrets, image)
            draft = await self._checkpoints.get_draft(service, desired.uid, secrets, image, checkpoint)

            def inputs_of(pods: LLMService) -> PlannerInputs:
                gpu = gpus[pods.role]
                node = node_capacity(pods, self._nodes, gpu)
                return PlannerInputs.from_service(pods, checkpoint, gpu, draft, node)

            inputs = PlannerInputs.of_all_pods(service, inputs_of)
            # Pods that are rendered again also get the image of this release, because an older image may not support
            # what this release renders.
            replan = _may_replan(service) or not keeps_pods
            return PlanningResult(plan=reuse_or_make_plan(previous_plan, inputs, replan, self._images))
        except NotReadYet as error:
            return PlanningResult(plan=previous_plan, waiting_for=str(error), needs_backoff=error.needs_backoff)
        except Unplannable as error:
            return PlanningResult(plan=previous_plan, unplannable=error)
        except ConfigError as error:
            return PlanningResult(plan=previous_plan, spec_error=str(error))
        except (Unavailable, NotFound) as error:
            read_error = _to_read_error(error)
            return PlanningResult(previous_plan, waiting_for=str(error), read_error=read_error, needs_backoff=True)

    async def _describe_other_nodes(self, service: LLMService, plan: Plan) -> str:
        """Return a text if a plan would be another one with the nodes that the cluster has now."""
        try:
            gpus = {pods.role: await self._resolve_gpu(pods) for pods in service.pods}
        except Unplannable as error:
            # An autoscaler may have removed the nodes.
            other = "" if error.reason is UnplannableReason.GPU_UNKNOWN else f"now, there could be no plan: {error}"
        else:
            other = "" if _fit_gpus(plan, gpus) else f"the smallest GPU for new pods is now {_describe_gpus(gpus)}"
        if not other:
            return ""
        return (
            f"the pods keep their plan, but {other}; to keep pods off other GPUs, set spec.gpu.product or "
            "spec.gpu.nodeSelector; to plan again, scale to 0 and back"
        )

    def _would_keep(self, service: LLMService, plan: Plan) -> bool:
        """Whether this release would keep a plan if its inputs have not changed."""
        if not _may_replan(service):
            return True
        known_images = (service.spec.runtime.image, *self._images.values())
        return plan.plannerVersion == VERSION and plan.image.value in known_images

    async def _resolve_gpu(self, service: LLMService) -> GpuInfo | None:
        if service.spec.device is Device.CPU:
            return None
        gpu_spec = service.spec.gpu
        nodes = [] if gpu_spec and gpu_spec.memory else await self._list_nodes()
        return resolve_gpu(gpu_spec, usable_node_labels(service, nodes))

    async def _list_nodes(self) -> list[Node]:
        now = asyncio.get_running_loop().time()
        async with self._lock:
            if now - self._nodes_read_at > _NODES_TTL_S:
                try:
                    # The other nodes have no GPU that is known.
                    nodes = await self._client.list(resources.NODE, label_selector=PRODUCT_LABEL)
                    self._nodes = list(map(Node.from_body, nodes.items))
                except Forbidden as error:
                    logger.info("could not list nodes error=%s", error)
                    self._nodes = []
                self._nodes_read_at = now
        return self._nodes


def stored_plan(status: Mapping[str, Any]) -> Plan | None:
    """Return the plan that a status contains, or None if it is missing or invalid."""
    if "plan" not in status:
        return None
    try:
        return Plan.from_json(status["plan"])
    except ConfigError as error:
        logger.warning("stored plan is invalid error=%s", error)
        return None


def _no_leader_worker_set() -> Unplannable:
    return Unplannable(
        UnplannableReason.NO_LEADER_WORKER_SET,
        "spec.engine.pipelineParallelSize: groups of pods need LeaderWorkerSet, but the API server does not serve it "
        "(leaderworkerset.x-k8s.io/v1); install LeaderWorkerSet 0.8 or later, or remove the field",
    )


def _no_disaggregated_set() -> Unplannable:
    return Unplannable(
        UnplannableReason.NO_DISAGGREGATED_SET,
        "spec.disaggregation: pods with roles need DisaggregatedSet, but the API server does not serve it "
        "(disaggregatedset.x-k8s.io/v1); install LeaderWorkerSet 1.0 or later, or remove the field",
    )


def _fit_gpus(plan: Plan, gpus: Mapping[Role | None, GpuInfo | None]) -> bool:
    return all(_fits_gpu(plan.for_role(role), gpu) for role, gpu in gpus.items())


def _describe_gpus(gpus: Mapping[Role | None, GpuInfo | None]) -> str:
    names = {
        role: "unknown" if gpu is None else f"{gpu.name} with {gpu.visible_bytes // MIB} MiB"
        for role, gpu in gpus.items()
    }
    return ", ".join(name if role is None else f"{name} in role {role}" for role, name in names.items())


def _fits_gpu(plan: Plan | None, gpu: GpuInfo | None) -> bool:
    """Whether the plan can still be used on the GPUs of the cluster.

    The cluster must have the GPU of the plan, and the smallest GPU must have the memory that the plan uses.
    """
    if plan is None or plan.gpu is None or gpu is None:
        return plan is not None and plan.gpu is None and gpu is None
    return plan.gpu.product in (gpu.product, *gpu.larger_products) and plan.gpu.visibleMiB <= gpu.visible_bytes // MIB


def _to_read_error(error: Unavailable | NotFound) -> DownloadReason:
    """Return the DownloadReason that corresponds to an error. A download would fail with the same error."""
    if isinstance(error, AccessDenied):
        return DownloadReason.AUTH_FAILED
    return DownloadReason.NOT_FOUND if isinstance(error, NotFound) else DownloadReason.UNREACHABLE


def _may_replan(service: LLMService) -> bool:
    return service.spec.rollout.updatePolicy == "Auto"
