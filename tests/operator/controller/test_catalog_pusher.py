# SPDX-License-Identifier: Apache-2.0
"""The catalog pusher pushes to all pods of a service; only the newest service replaces a newer catalog of a pod."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from quire_operator.controller.apply.catalog_pusher import CatalogPusher
from quire_operator.controller.status.observed_state import ServicePods, parse_pod
from quire_spec.documents.adapter_catalog import AdapterCatalog

DESIRED = SimpleNamespace(key=("team", "tales"), uid="u", adapter_catalog=AdapterCatalog(1))


def pod(name, ip="127.0.0.1"):
    return parse_pod({"metadata": {"name": name, "uid": name}, "status": {"podIP": ip}})


class PodAdmin:
    """Pods whose catalog has generation 2; records the pods and `replace_newer` of each push."""

    def __init__(self):
        self.pushes = []

    async def push_catalog(self, pods, catalog, admin_key, replace_newer=False):
        assert (catalog, admin_key) == (DESIRED.adapter_catalog, "key")
        self.pushes.append(([each.name for each in pods], replace_newer))
        report = SimpleNamespace(catalogue="sha256:other", generation=2)
        return tuple(replace(each, report=report) for each in pods)

    async def read_ranks(self, pods, admin_key):
        assert admin_key == "key"
        return tuple(replace(each, rank_error="lost") for each in pods)


class Secrets:
    async def admin_key(self, key, uid):
        assert (key, uid) == (DESIRED.key, DESIRED.uid)
        return "key"


@pytest.mark.parametrize("newest", [True, False])
async def test_a_newer_catalog_is_replaced_only_by_the_newest_service(newest):
    async def is_newest(desired):
        return newest

    pod_admin = PodAdmin()
    pods = ServicePods((pod("a"), pod("b")), None, (pod("download"),), worker_pods=(pod("a-1"),))
    pushed = await CatalogPusher(pod_admin, Secrets(), is_newest).push_catalog(DESIRED, pods, DESIRED.adapter_catalog)
    assert [each.name for each in pushed.server_pods] == ["a", "b"]
    assert [each.name for each in pushed.job_pods] == ["download"]
    assert [(each.name, each.rank_error) for each in pushed.worker_pods] == [("a-1", "lost")]
    assert all(each.report is not None for each in (*pushed.server_pods, *pushed.job_pods))
    names = ["a", "b", "download"]
    assert pod_admin.pushes == ([(names, False), (names, True)] if newest else [(names, False)])


async def test_pods_without_an_address_are_not_visited():
    pods = ServicePods((pod("a", ip=""),))
    assert await CatalogPusher(PodAdmin(), None, None).push_catalog(DESIRED, pods, DESIRED.adapter_catalog) is pods
