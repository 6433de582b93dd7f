# SPDX-License-Identifier: Apache-2.0
"""Planning: reads what a plan needs where it is, and says what comes of it: a plan, or why there is none.

A plan that was made is kept as long as spec, model and GPU are the same; then nothing is read either, so that neither
a hub that is away nor a restart of the operator holds anything up.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from quire_operator.kube import kinds
from quire_operator.kube.client import Client
from quire_operator.kube.errors import Forbidden
from quire_operator.plan.errors import Unplannable, Why
from quire_operator.plan.gpu import Gpu, resolve
from quire_operator.plan.inputs import Inputs
from quire_operator.plan.memory import MIB
from quire_operator.plan.plan import VERSION, Plan
from quire_operator.plan.planner import keep_or_make
from quire_operator.reconcile.models import Models, Secrets, Waiting
from quire_operator.reconcile.observed import Verdict
from quire_operator.reconcile.pinned import Pinned
from quire_operator.render import model
from quire_operator.service import Device, LLMService
from quire_spec.documents.download_result import DownloadReason
from quire_spec.errors import AccessDenied, ConfigError, NotFound, Unavailable

log = logging.getLogger(__name__)

_NODES_S = 60.0
"""How long labels of nodes are believed."""


class Planning:
    """Plans for services."""

    def __init__(self, client: Client, models: Models, images: Mapping[str, str]) -> None:
        """`images` are those of pods for GPU and CPU, of this release."""
        self._client, self._models, self._images = client, models, images
        self._nodes: list[Mapping[str, str]] = []
        self._nodes_at = float("-inf")
        self._lock = asyncio.Lock()

    async def judge(
        self,
        service: LLMService,
        uid: str,
        digest: str,
        stored: Plan | None,
        pinned: Pinned | None,
        secrets: Secrets,
    ) -> Verdict:
        """What planning says; `digest` is the service's spec_digest, `pinned` what its Deployment was made for.

        Raises:
            ApiError: the API server does not answer.
        """
        try:
            model.check(service)
        except ConfigError as error:
            return Verdict(plan=stored, invalid=str(error))
        same = stored is not None and pinned is not None and (pinned.spec, pinned.plan) == (digest, stored.inputsHash)
        try:
            gpu = await self._gpu(service)
        except Unplannable as error:
            # Nodes that were scaled away take their labels with them.
            if same and error.why is Why.GPU_UNKNOWN and self._current(service, stored):
                return Verdict(plan=stored)
            return Verdict(plan=stored, unplannable=error)
        if same and _fits(stored, gpu) and self._current(service, stored):
            return Verdict(plan=stored)
        image = service.spec.runtime.image or self._images["CPU" if gpu is None else "GPU"]
        try:
            checkpoint = await self._models.of(service, uid, secrets, image)
            inputs = Inputs.of(service, checkpoint, gpu)
            return Verdict(plan=keep_or_make(stored, inputs, _replan(service), self._images))
        except Waiting as error:
            return Verdict(plan=stored, pending=str(error))
        except Unplannable as error:
            return Verdict(plan=stored, unplannable=error)
        except ConfigError as error:
            return Verdict(plan=stored, invalid=str(error))
        except (Unavailable, NotFound) as error:
            return Verdict(plan=stored, pending=str(error), unread=_unread(error), retry=True)

    def _current(self, service: LLMService, stored: Plan | None) -> bool:
        """Whether this release would leave the plan alone."""
        if stored is None or not _replan(service):
            return stored is not None
        known = (service.spec.runtime.image, *self._images.values())
        return stored.plannerVersion == VERSION and stored.image.value in known

    async def _gpu(self, service: LLMService) -> Gpu | None:
        if service.spec.device is Device.CPU:
            return None
        wanted = service.spec.gpu
        nodes = [] if wanted and wanted.memory else await self._labels()
        return resolve(wanted, nodes)

    async def _labels(self) -> list[Mapping[str, str]]:
        now = asyncio.get_running_loop().time()
        async with self._lock:
            if now - self._nodes_at > _NODES_S:
                try:
                    found = await self._client.list(kinds.NODE, metadata_only=True)
                    self._nodes = [item["metadata"].get("labels") or {} for item in found.items]
                except Forbidden as error:
                    log.info("nodes are not read error=%s", error)
                    self._nodes = []
                self._nodes_at = now
        return self._nodes


def stored_plan(status: Mapping[str, Any]) -> Plan | None:
    """The plan of a status; None when there is none that can be read."""
    if "plan" not in status:
        return None
    try:
        return Plan.from_json(status["plan"])
    except ConfigError as error:
        log.warning("stored plan is not used error=%s", error)
        return None


def _fits(stored: Plan | None, gpu: Gpu | None) -> bool:
    """Whether a plan was made for a GPU that is still there, and for no more memory than the smallest has."""
    if stored is None or stored.gpu is None or gpu is None:
        return stored is not None and stored.gpu is None and gpu is None
    return stored.gpu.product in (gpu.product, *gpu.others) and stored.gpu.visibleMiB <= gpu.visible_bytes // MIB


def _unread(error: Unavailable | NotFound) -> DownloadReason:
    """The same reasons as of a download: it would fail in the same way."""
    if isinstance(error, AccessDenied):
        return DownloadReason.AUTH_FAILED
    return DownloadReason.NOT_FOUND if isinstance(error, NotFound) else DownloadReason.UNREACHABLE


def _replan(service: LLMService) -> bool:
    return service.spec.rollout.updatePolicy == "Auto"
