# SPDX-License-Identifier: Apache-2.0
"""Fixtures that the readers of several protocols need."""

import pytest
from support.fake_sources import RawServer
from support.source_fixtures import isolated_sources, serve, web  # noqa: F401


@pytest.fixture
async def raw():
    servers = []

    async def start(answer, pause_s=0.0):
        servers.append(RawServer(answer, pause_s))
        return servers[-1], await servers[-1].start()

    yield start
    for server in servers:
        await server.close()
