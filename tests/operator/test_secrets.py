# SPDX-License-Identifier: Apache-2.0
"""What is remembered of Secrets, and for how long."""

import base64

from quire_operator.reconcile.secrets import SecretStore


class Api:
    """An API server with a Secret of every name."""

    def __init__(self):
        self.asked = []

    async def find(self, kind, namespace, name):
        self.asked.append(name)
        return {"data": {"token": base64.b64encode(name.encode()).decode()}}


async def test_a_secret_is_read_once_while_it_is_remembered():
    api = Api()
    store = SecretStore(api, remember_s=300)
    for _ in range(3):
        assert (await store.get("team", "hub")).values == {"token": "hub"}
    store.put("team", "bucket", None)
    assert (await store.get("team", "bucket")).body is None
    assert api.asked == ["hub"]


async def test_secrets_that_nobody_asks_for_any_more_are_forgotten():
    """A deleted service's credentials must not stay in the operator's memory."""
    store = SecretStore(Api(), remember_s=0)
    for i in range(5):
        await store.get("team", f"hub-{i}")
    assert list(store._kept) == [("team", "hub-4")]
