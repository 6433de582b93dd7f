# SPDX-License-Identifier: Apache-2.0
"""What is remembered of Secrets, and for how long."""

import asyncio
import base64

from support.cel_cases import service_with

from quire_operator.api import crd
from quire_operator.api.llmservice import LLMService
from quire_operator.controller.observe.secret_store import MISSING_SECRET_TTL_S, SecretStore


class Api:
    """An API server with a Secret of every name."""

    def __init__(self):
        self.asked = []

    async def get_or_none(self, resource, namespace, name):
        self.asked.append(name)
        return {"data": {"token": base64.b64encode(name.encode()).decode()}}


async def test_a_secret_is_read_once_while_it_is_remembered():
    api = Api()
    store = SecretStore(api, ttl_s=300)
    for _ in range(3):
        assert (await store.get("team", "hub")).values == {"token": "hub"}
    store.update("team", "bucket", None)
    assert (await store.get("team", "bucket")).body is None
    assert api.asked == ["hub"]


async def test_secrets_that_nobody_asks_for_any_more_are_forgotten():
    """A deleted service's credentials must not stay in the operator's memory."""
    store = SecretStore(Api(), ttl_s=0)
    for i in range(5):
        await store.get("team", f"hub-{i}")
    assert list(store._cached_secrets) == [("team", "hub-4")]


async def test_a_secret_that_is_missing_is_looked_for_again_soon(monkeypatch):
    """A missing Secret is read again sooner than a cached one: the user may be creating it."""
    hub = {"repo": "org/model", "tokenSecretRef": {"name": "hub"}}
    service = LLMService.from_body(crd.validate(service_with({"spec.model.source": {"huggingFace": hub}})).body)
    now = [1000.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
    api = Api()
    store = SecretStore(api, ttl_s=300)
    store.update(service.namespace or "", "hub", None)
    assert await store.credentials(service) == {} and api.asked == []
    now[0] += MISSING_SECRET_TTL_S + 1
    assert await store.credentials(service) == {"hub": {"token": "hub"}}
    now[0] += MISSING_SECRET_TTL_S + 1
    assert await store.credentials(service) == {"hub": {"token": "hub"}}
    assert api.asked == ["hub"], "an existing Secret is cached"
