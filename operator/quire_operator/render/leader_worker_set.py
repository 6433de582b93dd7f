# SPDX-License-Identifier: Apache-2.0
"""LeaderWorkerSet of a service whose replicas are groups of pods on several nodes. Pure.

The first pod of a group, its leader, is the pod that a Deployment would have. The others, its workers, have the same
image, volumes and resources, but run only ranks. Only fields of LeaderWorkerSet 0.8 are used, because an API server
rejects unknown ones. Called by objects.py and the controller.
"""

import copy
from typing import Any

from quire_operator.api import llmservice
from quire_operator.api.llmservice import LLMService
from quire_operator.plan.plan import Plan
from quire_operator.render import object_names
from quire_operator.render.manifests import Manifest, new_manifest

API_VERSION, KIND = "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"
WORKER_COMMAND = ("tini", "--", "python3", "-m", "quire_server.rank")
"""Takes the arguments of the supervisor."""
QUEUE_LABEL = llmservice.QUEUE_LABEL


def manifest(
    service: LLMService,
    plan: Plan,
    leader: Manifest,
    worker: Manifest,
    size: int,
    replicas: int,
    surges: bool = True,
) -> Manifest:
    """Return the LeaderWorkerSet of a service; see `spec`."""
    return new_manifest(
        API_VERSION,
        KIND,
        service,
        service.name,
        labels=queue_labels(service),
        annotations={object_names.PLAN_ANNOTATION: plan.inputsHash},
        spec=spec(service, leader, worker, size, replicas, surges),
    )


def queue_labels(service: LLMService) -> dict[str, str]:
    """Return the label of a set that Kueue admits, if the LLMService has it."""
    return {QUEUE_LABEL: service.queue} if service.queue else {}


def group_templates(template: Manifest, size: int) -> tuple[Manifest, Manifest]:
    """Return the pod templates of the leader and of the workers of groups with `size` pods. `template` is that of a
    Deployment.

    Both have a label with a digest of both. The status of a LeaderWorkerSet 0.8 does not tell which generation it
    belongs to, so the pods themselves must show whether they are up to date. Neither has the label of a queue: Kueue
    never starts a pod that has one and belongs to a set with a queue.
    """
    worker = _worker_template(template)
    label = {object_names.TEMPLATE_LABEL: object_names.digest([template, worker, size])}
    return _with_labels(template, label), _with_labels(worker, label)


def spec(
    service: LLMService, leader: Manifest, worker: Manifest, size: int, replicas: int, surges: bool = True
) -> Manifest:
    """Return the spec of a LeaderWorkerSet of `replicas` groups, each of a leader and `size` - 1 workers. Without
    `surges`, it never has more groups."""
    return {
        "replicas": replicas,
        "leaderWorkerTemplate": {
            "size": size,
            "leaderTemplate": leader,
            "workerTemplate": worker,
            "restartPolicy": "RecreateGroupOnPodRestart",
        },
        "startupPolicy": "LeaderCreated",
        # Each group gets a headless Service with the name of its leader. Otherwise, there would be one with the name of
        # the set, which the Service of the clients has.
        "networkConfig": {"subdomainPolicy": "UniquePerReplica"},
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": _rolling_update(service, replicas, surges),
        },
    }


def _rolling_update(service: LLMService, replicas: int, surges: bool) -> Manifest:
    rollout = service.spec.rollout
    surge, unavailable = rollout.maxSurge if surges else 0, rollout.maxUnavailable
    if not scaled(surge, replicas, rounds_up=True) and not scaled(unavailable, replicas, rounds_up=False):
        # A Deployment does the same. The webhook of LeaderWorkerSet rejects the values.
        unavailable = 1
    return {"maxSurge": surge, "maxUnavailable": unavailable, "partition": 0}


def scaled(value: int | str, replicas: int, rounds_up: bool) -> int:
    """Return the number of replicas that maxSurge or maxUnavailable stands for."""
    if isinstance(value, int):
        return value
    product = replicas * int(value.removesuffix("%"))
    return -(-product // 100) if rounds_up else product // 100


def _worker_template(template: Manifest) -> Manifest:
    worker = copy.deepcopy(template)
    worker["metadata"]["labels"][object_names.COMPONENT] = object_names.WORKER
    container: dict[str, Any] = next(c for c in worker["spec"]["containers"] if c["name"] == object_names.SERVER)
    container["command"] = list(WORKER_COMMAND)
    # Clients connect only to the leader.
    container["ports"] = [port for port in container["ports"] if port.get("name") == "health"]
    return worker


def _with_labels(template: Manifest, labels: dict[str, str]) -> Manifest:
    meta = template["metadata"]
    labels = {name: value for name, value in (meta["labels"] | labels).items() if name != QUEUE_LABEL}
    return {**template, "metadata": {**meta, "labels": labels}}
