# SPDX-License-Identifier: Apache-2.0
"""What is seen of a service does not depend on the order in which it was heard of."""

import random
from types import SimpleNamespace

from quire_operator.kube import kinds
from quire_operator.reconcile.apply import Outcome
from quire_operator.reconcile.cache import Cache
from quire_operator.reconcile.observer import Observer
from quire_operator.reconcile.pod_events import PodEvents
from quire_operator.reconcile.wanted import Wanted
from quire_operator.render import names

LABELS = {names.MANAGED_BY: names.MANAGER, names.INSTANCE: "tales", names.COMPONENT: names.SERVER}


def pod(name):
    meta = {"namespace": "team", "name": name, "uid": name, "resourceVersion": "1", "labels": LABELS}
    return {"metadata": meta, "spec": {}, "status": {}}


async def test_pods_have_an_order_of_their_own():
    """A status names the first of several that are not well: two operators would correct each other for ever."""
    pods, rng = [f"tales-{number}" for number in range(9)], random.Random(1)
    for _ in range(5):
        cache = Cache()
        for name in rng.sample(pods, len(pods)):
            cache.put(kinds.POD, pod(name))
        parts = SimpleNamespace(cache=cache, pod_events=PodEvents(None))
        observer = Observer(parts, None)
        seen = await observer.observe(("team", "tales"), Wanted("u", 1, None, "", "x"), None, 1, Outcome())
        assert [each.name for each in seen.pods] == pods
