# SPDX-License-Identifier: Apache-2.0
"""The observed state of a service does not depend on the order of events."""

import random
from types import SimpleNamespace

from quire_operator.controller.apply.applier import ApplyResult
from quire_operator.controller.object_cache import ObjectCache
from quire_operator.controller.observe.pod_warnings import PodWarnings
from quire_operator.controller.parsed_service import ParsedService
from quire_operator.controller.state_observer import StateObserver
from quire_operator.kube import resources
from quire_operator.render import object_names

LABELS = {
    object_names.MANAGED_BY: object_names.MANAGER,
    object_names.INSTANCE: "tales",
    object_names.COMPONENT: object_names.SERVER,
}


def pod(name):
    meta = {"namespace": "team", "name": name, "uid": name, "resourceVersion": "1", "labels": LABELS}
    return {"metadata": meta, "spec": {}, "status": {}}


async def test_pods_have_an_order_of_their_own():
    """A status names the first of several unready pods, so another order would be another status."""
    pods, rng = [f"tales-{number}" for number in range(9)], random.Random(1)
    for _ in range(5):
        cache = ObjectCache()
        for name in rng.sample(pods, len(pods)):
            cache.upsert(resources.POD, pod(name))
        parts = SimpleNamespace(cache=cache, pod_warnings=PodWarnings(None))
        desired = ParsedService(("team", "tales"), "u", 1, None, "", "x")
        observer = StateObserver(parts)
        seen = observer.observe(desired, await observer.observe_pods(desired), None, 1, ApplyResult())
        assert [each.name for each in seen.pods] == pods
