# SPDX-License-Identifier: Apache-2.0
"""Requests of one client do not delay the preparation of another client's requests."""

import asyncio

import pytest

from quire_engine.text.admission.client_turns import MAX_PREPARATIONS_PER_CLIENT, ClientTurns


@pytest.mark.parametrize("waits", [False, True])
def test_a_client_with_many_requests_delays_another_one_by_a_few_of_them(waits: bool) -> None:
    prepared: list[str] = []

    async def prepare(turns: ClientTurns, client: str) -> None:
        async with turns.turn(client):
            if waits:
                await asyncio.sleep(0.001)
            prepared.append(client)

    async def run() -> None:
        turns = ClientTurns()
        tasks = [asyncio.create_task(prepare(turns, "a")) for _ in range(200)]
        for _ in range(5):
            await asyncio.sleep(0)
        position = len(prepared)
        tasks.append(asyncio.create_task(prepare(turns, "b")))
        await asyncio.gather(*tasks)
        assert prepared.index("b") <= position + 2 * MAX_PREPARATIONS_PER_CLIENT
        assert prepared.count("a") == 200 and not turns._semaphores

    asyncio.run(run())


def test_a_cancelled_preparation_gives_its_turn_back() -> None:
    async def run() -> None:
        turns = ClientTurns()

        async def hold() -> None:
            async with turns.turn("a"):
                await asyncio.Event().wait()

        tasks = [asyncio.create_task(hold()) for _ in range(3 * MAX_PREPARATIONS_PER_CLIENT)]
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(1):
            async with turns.turn("a"):
                pass

    asyncio.run(run())
