# SPDX-License-Identifier: Apache-2.0
"""The lease: who cannot renew it in time stops, and writes nothing from the moment on at which another may have it."""

import asyncio

import pytest
from support.clock import timeless

from quire_operator.kube.client import Client
from quire_operator.kube.errors import Busy, Stale
from quire_operator.kube.kinds import LLM_SERVICE
from quire_operator.kube.login import Login
from quire_operator.reconcile.lease import Lease, LeaseLost

SECONDS = 15


class Api:
    """An API server with one Lease; `before` is awaited before each request."""

    def __init__(self):
        self.body, self.version = None, 0

    async def before(self):
        pass

    async def find(self, kind, namespace, name):
        await self.before()
        return self.body

    async def create(self, kind, body):
        await self.before()
        if self.body is not None:
            raise Stale("is there")
        self._store(body)

    async def replace(self, kind, body):
        await self.before()
        if body["metadata"]["resourceVersion"] != str(self.version):
            raise Stale("has changed")
        self._store(body)

    def _store(self, body):
        self.version += 1
        self.body = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}


@pytest.fixture
def api():
    return Api()


@pytest.fixture
def lease(api):
    return Lease(api, "default", "operators", "me", SECONDS)


async def never():
    await asyncio.Event().wait()


async def refused():
    raise Busy("503")


@timeless
async def test_it_is_held_as_long_as_it_is_renewed(lease):
    assert not lease.is_held()
    await lease.acquire()
    async with lease.held() as task:
        await asyncio.sleep(2 * SECONDS)
        assert lease.is_held() and not task.done()
    assert not lease.is_held()


@pytest.mark.parametrize("answer", [never, refused])
@timeless
async def test_it_is_lost_in_time_when_nothing_comes_of_renewing_it(api, lease, answer):
    """Before others take it: an API server that hangs is waited for no longer than one that refuses."""
    await lease.acquire()
    api.before = answer
    begun = asyncio.get_running_loop().time()
    with pytest.raises(LeaseLost, match="not renewed"):
        await lease.hold()
    assert asyncio.get_running_loop().time() - begun == pytest.approx(SECONDS * 2 / 3)
    assert not lease.is_held()


@timeless
async def test_it_is_lost_when_another_has_it(api, lease):
    await lease.acquire()
    await Lease(api, "default", "operators", "other", -1).acquire()
    with pytest.raises(LeaseLost, match="somebody else"):
        await lease.hold()
    assert not lease.is_held()


@timeless
async def test_its_time_is_counted_from_before_the_request_that_renewed_it(api, lease):
    async def slow():
        await asyncio.sleep(0.4 * SECONDS)

    api.before = slow
    await lease.acquire()
    assert not lease.is_held(), "the answer came when two thirds of its time were over"


async def test_nothing_is_written_without_it():
    """No server is there: what is not asked fails at once, and says why."""
    login = Login("http://127.0.0.1:9", None, "default")
    async with Client(login) as client:
        client.may_write = lambda: False
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "namespace": "n"}}
        for write in (client.create(LLM_SERVICE, body), client.delete(LLM_SERVICE, "n", "s", "u")):
            with pytest.raises(Busy, match="not asked: another operator may be working"):
                await write
        with pytest.raises(Busy, match="no answer"):
            await client.get(LLM_SERVICE, "n", "s")
