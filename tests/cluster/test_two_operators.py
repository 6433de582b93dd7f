# SPDX-License-Identifier: Apache-2.0
"""Two operators that see the same services: one of them writes, and the other one reports the owner."""

import contextlib
import time

import pytest
from support.controller_harness import ControllerHarness, llm_service
from support.engine_processes import wait_for

from quire_operator.controller.status import ownership

API, KIND = "quire.dev/v1alpha1", "LLMService"


def settings(name):
    """Each operator has an image of its own, which it would give to all pods."""
    return {"identity": f"{name}/quire", "images": {"GPU": f"quire:{name}", "CPU": f"quire:{name}"}}


def service(name="tales", **spec):
    return llm_service(name, rollout={"updatePolicy": "Auto"}, **spec)


def image(cluster, namespace, name="tales"):
    body = cluster.get("apps/v1", "Deployment", name, namespace)
    return body and body["spec"]["template"]["spec"]["containers"][0]["image"]


def owner(operator, name="tales"):
    return operator.status(name).get("operator", {}).get("identity")


def test_they_never_fight(cluster, namespace, kubelet, caplog):
    names = [f"tales-{i}" for i in range(6)]
    with (
        ControllerHarness(cluster, namespace, settings("a")) as first,
        ControllerHarness(cluster, namespace, settings("b")) as second,
    ):
        for name in names:
            cluster.apply(service(name), namespace)
        for name in names:
            wait_for(lambda n=name: image(cluster, namespace, n), 120, f"the Deployment of {name}")
        for _ in range(3):
            for operator in (first, second):
                for name in names:
                    operator.requeue(name)
        owners = {name: owner(first, name) for name in names}
        foreign = {
            f"{name}/quire": operator.controller.reconciler.foreign_services()
            for name, operator in (("a", first), ("b", second))
        }
        for name, identity in owners.items():
            assert image(cluster, namespace, name) == f"quire:{identity.partition('/')[0]}"
            body = cluster.get("apps/v1", "Deployment", name, namespace)
            assert body["metadata"]["generation"] <= 2, "126 generations in 26 s without a mark"
            (other,) = {"a/quire", "b/quire"} - {identity}
            assert foreign[other][namespace, name] == identity and (namespace, name) not in foreign[identity]
            assert f"service={namespace}/{name} owner={identity} identity={other}" in caplog.text


def test_the_second_writes_nothing_and_says_so(cluster, namespace, kubelet):
    with ControllerHarness(cluster, namespace, settings("a")) as first:
        cluster.apply(service(), namespace)
        first.wait_settled()
        with ControllerHarness(cluster, namespace, settings("b")) as second:
            cluster.merge(API, KIND, "tales", {"spec": {"replicas": 2}}, namespace)
            first.wait_settled()
            second.requeue()
            assert second.recorded_writes == []
            controller = second.controller
            text = controller.metrics.generate_text(controller.update_gauges).decode()
            assert "quire_operator_foreign_services 1.0" in text
            assert first.child("Deployment")["spec"]["replicas"] == 2 and image(cluster, namespace) == "quire:a"


def test_the_same_installation_continues_at_once(cluster, namespace, kubelet):
    """After a restart, an upgrade, or an installation with the same name and namespace."""
    with ControllerHarness(cluster, namespace, settings("a")) as first:
        cluster.apply(service(), namespace)
        first.wait_settled()
    upgraded = {**settings("a"), "images": {"GPU": "quire:new", "CPU": "quire:new"}}
    with ControllerHarness(cluster, namespace, upgraded):
        wait_for(lambda: image(cluster, namespace) == "quire:new", 120, "the new image")


@pytest.mark.parametrize("how", ["after the mark has expired", "when a user removes the mark"])
def test_a_dead_owner_is_replaced(cluster, namespace, kubelet, monkeypatch, how):
    with contextlib.ExitStack() as stack:
        if "expired" in how:
            monkeypatch.setattr(ownership, "RENEW_S", 0.5)
            monkeypatch.setattr(ownership, "EXPIRE_S", 4.0)
        first = stack.enter_context(ControllerHarness(cluster, namespace, settings("a")))
        cluster.apply(service(), namespace)
        first.wait_settled()
        second = stack.enter_context(ControllerHarness(cluster, namespace, settings("b")))
        wait_for(lambda: second.controller.reconciler.foreign_services(), 20, "the second sees the first")
        # Longer than a mark is valid.
        for _ in range(5 if "expired" in how else 0):
            time.sleep(1)
            first.requeue()
            assert owner(first) == "a/quire", "it is renewed while its owner runs"
        first.stop()
        if "expired" not in how:
            second.requeue()
            assert owner(second) == "a/quire" and second.recorded_writes == []
            patch = '[{"op": "remove", "path": "/status/operator"}]'
            arguments = ("patch", "llm", "tales", "--subresource=status", "--type=json", f"--patch={patch}")
            cluster.kubectl(*arguments, namespace=namespace)
        wait_for(lambda: image(cluster, namespace) == "quire:b", 120, "the second takes it over")
        assert owner(second) == "b/quire"
        assert second.controller.reconciler.foreign_services() == {}
