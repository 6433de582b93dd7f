# SPDX-License-Identifier: Apache-2.0
"""Runs the operator's controller in a thread of the test, against a real API server.

LLMServices come from a Reflector, so that a test can start many operators and stop each at once. With `with_kopf` the
whole operator runs under kopf; tests/cluster/test_operator_process.py also runs it as a process.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import kopf
from support.cluster import Cluster
from support.engine_processes import wait_for
from support.fake_kubelet import FakeContainer, FakeKubelet

from quire_operator.controller import kopf_handlers
from quire_operator.controller.controller import Controller, ControllerSettings
from quire_operator.controller.operator_process import OperatorOptions
from quire_operator.kube import resources
from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.cluster_config import ClusterConfig
from quire_operator.kube.reflector import Reflector
from quire_operator.render.model_reader_job import READER_COMPONENT
from quire_server.downloads.inspect_model import termination_message
from quire_spec.constants import CATALOG_FILE

Manifest = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "examples/models/tiny"
CLAIM = {"pvc": {"claimName": "models", "path": "tiny"}}
COMPONENT_LABEL = "app.kubernetes.io/component"

CHILDREN = {
    ("v1", "ServiceAccount"): "tales",
    ("v1", "Secret"): "tales-admin",
    ("v1", "ConfigMap"): "tales-adapters",
    ("networking.k8s.io/v1", "NetworkPolicy"): "tales",
    ("v1", "Service"): "tales",
    ("apps/v1", "Deployment"): "tales",
}
"""One object of each kind that every API server serves."""


def llm_service(name: str = "tales", /, **spec: Any) -> Manifest:
    """An LLMService on a CPU whose model is on a claim."""
    fields = {"device": "CPU", "model": {"source": CLAIM}, "observability": {"podMonitor": "None"}, **spec}
    return {"apiVersion": "quire.dev/v1alpha1", "kind": "LLMService", "metadata": {"name": name}, "spec": fields}


def make_claim(name: str = "models") -> Manifest:
    """The claim that models are on."""
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


def answer_model_readers(kubelet: FakeKubelet, model: Path = TINY) -> None:
    """Make the Jobs that read a claim return this model."""
    completed = FakeContainer(exit_code=0, reason="Completed", message=termination_message(model))
    kubelet.set_behavior(lambda pod: pod["metadata"]["labels"].get(COMPONENT_LABEL) == READER_COMPONENT, completed)


@dataclass
class ControllerHarness:
    """A controller for one namespace. A context manager; its exit is as abrupt as a kill."""

    cluster: Cluster
    namespace: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ControllerSettings."""
    kubeconfig: Path | None = None
    make_client: Callable[[ClusterConfig], ApiClient] = ApiClient
    with_kopf: bool = False
    """Run the whole operator under kopf, as `quire operate` does."""
    recorded_writes: list[tuple[str, str]] = field(default_factory=list)
    """Kind and verb of each write."""
    failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._ready, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="operator", daemon=True)
        self._thread.start()
        assert self._ready.wait(30) and self.failure is None, self.failure
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the controller in the middle of what it does."""
        self._stop.set()
        self._thread.join(20)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        try:
            if self.with_kopf:
                await self._run_with_kopf()
                return
            async with self.make_client(self._cluster_config()) as client:
                self.controller = controller = Controller(client, self._controller_settings())
                self._record_writes()
                async with self._watch_services(client, controller.settings), controller.run() as failure:
                    self._ready.set()
                    while not self._stop.is_set() and not failure.done():
                        await asyncio.sleep(0.02)
                    if failure.done():
                        self.failure = failure.exception()
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self._ready.set()

    @asynccontextmanager
    async def _watch_services(self, client: ApiClient, settings: ControllerSettings) -> AsyncIterator[None]:
        cache = self.controller.cache
        reflector = Reflector(client, resources.LLM_SERVICE, cache, self.namespace, "", settings.watch_timeouts)
        self.controller.heartbeats.append(reflector.heartbeat)
        watch_task = asyncio.create_task(reflector.run())
        try:
            yield
        finally:
            watch_task.cancel()
            # A connection that it is about to make is closed with the others.
            await asyncio.gather(watch_task, return_exceptions=True)

    async def _run_with_kopf(self) -> None:
        options = OperatorOptions(self._cluster_config(), self._controller_settings(), "127.0.0.1", 0, self.make_client)
        memo, stop_flag = kopf.Memo(), asyncio.Event()
        operator_task = asyncio.create_task(kopf_handlers.run_operator(options, stop_flag=stop_flag, memo=memo))
        while not self._stop.is_set() and not operator_task.done():
            await asyncio.sleep(0.02)
            if "operator" in memo and not self._ready.is_set():
                self.controller = memo.operator.controller
                self._record_writes()
                self._ready.set()
        stop_flag.set()
        await asyncio.wait([operator_task])
        # The end of a TLS connection takes some iterations of the loop after the session was closed.
        await asyncio.sleep(0.25)
        self.failure = operator_task.exception()

    def _record_writes(self) -> None:
        controller = self.controller
        record_write = controller.metrics.record_write

        def record_harness_write(kind: resources.Resource, verb: str) -> None:
            self.recorded_writes.append((kind.kind, verb))
            record_write(kind, verb)

        controller.metrics.record_write = record_harness_write  # type: ignore[method-assign]
        controller.reconciler._deps.record_write = record_harness_write
        controller.reconciler._deps.applier._record_write = record_harness_write
        controller.reconciler._deps.status_writer._record_write = record_harness_write

    def _controller_settings(self) -> ControllerSettings:
        # Models of tests are on loopback addresses, which the operator otherwise never reads.
        defaults = {"namespaces": (self.namespace,), "resync_s": 3600.0, "borders": None}
        return ControllerSettings(**{**defaults, **self.settings})

    def _cluster_config(self) -> ClusterConfig:
        return ClusterConfig.from_environment(str(self.kubeconfig or self.cluster.kubeconfig))

    # State for tests

    def status(self, name: str = "tales") -> Manifest:
        """Return the status of a service; empty while there is none."""
        body = self.cluster.get("quire.dev/v1alpha1", "LLMService", name, self.namespace) or {}
        return dict(body.get("status", {}))

    def condition(self, kind: str, name: str = "tales") -> Manifest:
        """Return a condition; empty while there is none."""
        return next((c for c in self.status(name).get("conditions", []) if c["type"] == kind), {})

    def child(self, kind: str, name: str = "tales") -> Manifest | None:
        """Return a child object by kind."""
        version = next((v for v, k in CHILDREN if k == kind), "v1")
        return self.cluster.get(version, kind, name, self.namespace)

    def wait_settled(self, name: str = "tales", timeout: float = 30) -> None:
        """Wait until the newest spec is applied, the status written, and the queue idle."""

        def is_settled() -> bool:
            body = self.cluster.get("quire.dev/v1alpha1", "LLMService", name, self.namespace)
            assert body is not None
            status = body.get("status", {})
            state = self.controller.reconciler._states.get((self.namespace, name))
            return (
                status.get("observedGeneration") == body["metadata"]["generation"]
                and state is not None
                and state.applied_generation == body["metadata"]["generation"]
                and self.is_idle()
            )

        try:
            wait_for(is_settled, timeout, f"{name} settled")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.status(name).get('conditions')}") from error

    def is_idle(self) -> bool:
        """Whether no service is due or being worked on."""
        queue = self.controller.queue
        now = queue._clock()
        return not queue._running and all(due > now + 0.5 for due in list(queue._due_at.values()))

    def requeue(self, name: str = "tales") -> None:
        """Run a pass over a service now, as a resync does."""
        controller = self.controller
        asyncio.run_coroutine_threadsafe(self._add_to_queue((self.namespace, name)), self._loop()).result(20)
        wait_for(self.is_idle, 30, "the resync to be over")
        assert controller is self.controller

    async def _add_to_queue(self, key: tuple[str, str]) -> None:
        self.controller.queue.add(key)

    def _loop(self) -> asyncio.AbstractEventLoop:
        return self.controller._tasks[0].get_loop()


def normalized(body: Manifest) -> Manifest:
    """Return an object without values that differ between runs: uids, versions, times, addresses, the random key."""
    meta = {k: v for k, v in body["metadata"].items() if k in ("name", "labels", "annotations")}
    owners = [{k: v for k, v in o.items() if k != "uid"} for o in body["metadata"].get("ownerReferences", [])]
    content = {k: v for k, v in body.items() if k not in ("metadata", "status", "secrets")}
    if body["kind"] == "Secret":
        content["data"] = sorted(content["data"])
    if body["kind"] == "Service":
        content["spec"] = {k: v for k, v in content["spec"].items() if not k.startswith("clusterIP")}
    if body["kind"] == "Deployment":
        meta["annotations"] = {k: v for k, v in meta["annotations"].items() if not k.startswith("deployment.k")}
    meta.get("annotations", {}).pop("quire.dev/applied", None)  # the namespace is in it
    return {**content, "metadata": {**meta, "ownerReferences": owners}}


def without_generation(bodies: Iterable[Manifest]) -> list[Manifest]:
    """Return objects without the generation of the spec, which the adapter catalog contains."""

    def is_catalog(body: Manifest) -> bool:
        return body["kind"] == "ConfigMap" and CATALOG_FILE in body["data"]

    def catalog_of(body: Manifest) -> Manifest:
        return {key: value for key, value in json.loads(body["data"][CATALOG_FILE]).items() if key != "generation"}

    return [{**body, "data": catalog_of(body)} if is_catalog(body) else body for body in bodies]


def child_objects(cluster: Cluster, namespace: str, service: str = "tales") -> list[Manifest]:
    """Return all children of a service, normalized and sorted."""
    selector = f"app.kubernetes.io/managed-by=quire-operator,app.kubernetes.io/instance={service}"
    bodies = []
    for version, kind in (*CHILDREN, ("batch/v1", "Job"), ("v1", "PersistentVolumeClaim")):
        for body in cluster.items(version, kind, namespace, labelSelector=selector):
            bodies.append(normalized({**body, "kind": kind, "apiVersion": version}))
    return sorted(bodies, key=lambda body: (body["kind"], body["metadata"]["name"]))
