# SPDX-License-Identifier: Apache-2.0
"""A namespace with LLMServices, their pods, operators that come and go, and an API server behind a proxy: where
histories.py has things happen, and witness.py sees what is said of them.
"""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from support.api_proxy import ApiProxy
from support.cluster import Cluster
from support.downloads import Downloads, is_download
from support.operating import Operating, claim, llm_service
from support.remembering import Killed, RememberingFleet, RememberingPod, witnessed
from support.witness import API, Witness

from quire_operator.kube.reflector import WatchTimeouts
from quire_operator.render import object_names

Manifest = dict[str, Any]
CLAIMS = ("models", "more")
_APPLY = "application/apply-patch+yaml"


class World:
    """A context manager."""

    def __init__(self, cluster: Cluster, namespace: str, fleet: RememberingFleet, folder: Path) -> None:
        self.cluster, self.namespace, self.fleet, self.kubelet = cluster, namespace, fleet, fleet.kubelet
        self.proxy = ApiProxy(cluster, folder)
        self.downloads = Downloads(cluster, namespace, fleet.kubelet)
        self.witness = Witness(cluster, namespace, fleet.started, self.downloads)
        self.operators: list[Operating] = []
        self.num_writes = 0
        """Of operators that are gone."""
        self.ended: set[str] = set()
        """Pods that will never run again, by uid."""
        self.told: list[str] = []
        """What happened."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for name in CLAIMS:
                self.cluster.apply(claim(name), self.namespace)
            stack.enter_context(self.proxy)
            stack.enter_context(self.downloads)
            stack.enter_context(self.witness)
            stack.callback(self.stop_all)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def say(self, words: str) -> None:
        """Add to the history."""
        self.told.append(f"{time.monotonic():.2f} {words}")

    # Operators

    def start(self, kopf: bool = False) -> None:
        """One more."""
        running: dict[str, Any] = {}
        settings = {"secret_ttl_s": 1.0, "resync_s": 2.0, "watch_timeouts": WatchTimeouts(5.0, max_backoff_s=1.0)}
        client = witnessed(self.witness.claims, running)
        made = Operating(self.cluster, self.namespace, settings, self.proxy.kubeconfig, client, kopf)
        made.__enter__()
        running["queue"] = made.controller.queue
        pusher = made.controller._pod_admin
        pusher._total_timeout_s, pusher._unresponsive_timeout_s = 2.0, 0.5
        self.operators.append(made)
        self.witness.num_operators(len(self.operators))

    def stop(self, operating: Operating) -> None:
        """Abruptly."""
        operating.stop()
        self.operators.remove(operating)
        assert operating.failure is None or isinstance(operating.failure, Killed), repr(operating.failure)
        self.num_writes += len(operating.writes)
        self.witness.num_operators(len(self.operators))

    def stop_all(self) -> None:
        for operating in list(self.operators):
            self.stop(operating)

    def writes(self) -> int:
        """Of all operators together."""
        return self.num_writes + sum(len(operating.writes) for operating in self.operators)

    # Services

    def stored(self, name: str) -> Manifest:
        """A service as it is; empty when there is none."""
        return self.cluster.get(*API, name, self.namespace) or {}

    def make(self, name: str, spec: Manifest) -> None:
        self.cluster.apply(llm_service(name, **spec), self.namespace)

    def edit(self, name: str, spec: Manifest) -> None:
        self.cluster.merge(*API, name, {"spec": spec}, self.namespace)

    def apply(self, name: str, spec: Manifest, manager: str) -> None:
        """Server-side apply of a part of a spec, which is then that manager's."""
        body = {"apiVersion": API[0], "kind": API[1], "metadata": {"name": name}, "spec": spec}
        path = self.cluster.path(*API, self.namespace, name)
        self.cluster.request("PATCH", path, body, _APPLY, fieldManager=manager, force="true")

    def pods(self, name: str) -> list[tuple[Manifest, RememberingPod]]:
        """Those that run, by name."""
        found = [(m.pod, m.script) for m in self.fleet.of(self.namespace) if m.pod["metadata"]["uid"] not in self.ended]
        return [(pod, script) for pod, script in found if pod["metadata"]["labels"][object_names.INSTANCE] == name]  # type: ignore[misc]

    def downloading(self, name: str) -> list[Manifest]:
        """Pods that download a service's model, by name."""
        found = self.cluster.items("v1", "Pod", self.namespace, labelSelector=f"{object_names.INSTANCE}={name}")
        running = [pod for pod in found if is_download(pod) and pod["status"].get("phase") == "Running"]
        return sorted(running, key=lambda pod: str(pod["metadata"]["name"]))

    def let_claim_go(self, name: str) -> None:
        """Delete all pods of a service, which hold its claim, also those that have ended."""
        for pod in self.cluster.items("v1", "Pod", self.namespace, labelSelector=f"{object_names.INSTANCE}={name}"):
            self.cluster.delete("v1", "Pod", pod["metadata"]["name"], self.namespace)
