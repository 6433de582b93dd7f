# SPDX-License-Identifier: Apache-2.0
"""Readiness on the server's own ports: never true while a request would fail, from the start to the drain."""

import asyncio
import itertools
import os
import signal
import time

import pytest
import tritonclient.grpc.aio as grpcaio
from support.supervisor_harness import adapter_folder, catalog, started_supervisor
from tritonclient.utils import InferenceServerException

pytestmark = [pytest.mark.server, pytest.mark.timeout(180)]

REACTION_S = 1.0
"""Time after a death in which readiness may still be true."""
SLACK_S = 3.0
"""What one round of requests takes at most on a busy machine."""


async def readiness(pod, client, *models):
    """Return what both protocols report for the server and for models; None while the server does not answer."""
    answers = []
    for path in ("health/ready", *(f"models/{model}/ready" for model in models)):
        status = (await asyncio.to_thread(pod.request, "http", f"/v2/{path}")).status
        answers.append(None if status == 0 else status == 200)
    try:
        over_grpc = [await client.is_server_ready(), *[await client.is_model_ready(model) for model in models]]
    except InferenceServerException:
        over_grpc = [None] * (1 + len(models))
    return answers, over_grpc


async def wait_readiness(pod, client, models, expected, timeout_s):
    started = time.monotonic()
    while (answers := await readiness(pod, client, *models)) != (expected, expected):
        assert time.monotonic() - started < timeout_s, (answers, pod.health(), pod.tail())
        await asyncio.sleep(0.02)
    return time.monotonic() - started


async def is_ready(pod, client, model, protocol):
    if protocol == "http":
        return (await asyncio.to_thread(pod.request, "http", f"/v2/models/{model}/ready")).status == 200
    try:
        return await client.is_model_ready(model)
    except InferenceServerException:
        return False


async def watch(pod, client, deaths):
    """Fail if a request fails right after its model was reported ready, on any protocol, except after a death."""
    while True:
        for model, protocol in itertools.product(("tales", "a"), ("http", "grpc")):
            reported = await is_ready(pod, client, model, protocol)
            answer = await asyncio.to_thread(pod.generate, model, "x", max_tokens=1) if reported else None
            if answer is not None and answer.status != 200 and answer.status != 0:
                now = time.monotonic()
                assert any(now - died < REACTION_S + SLACK_S for died in deaths), (model, protocol, answer)
        await asyncio.sleep(0.02)


def test_ready_is_true_only_while_requests_are_answered(tmp_path):
    document = catalog(1, a=adapter_folder(tmp_path / "a"), broken=adapter_folder(tmp_path / "broken", rank=0))
    deaths = []

    async def scenario(pod):
        async with grpcaio.InferenceServerClient(f"127.0.0.1:{pod.ports['grpc']}") as client:
            watcher = asyncio.create_task(watch(pod, client, deaths))
            # The server is up before the core.
            await wait_readiness(pod, client, ["tales"], [False, False], 60)
            assert await client.is_server_live()
            (tmp_path / "start").touch()
            await wait_readiness(pod, client, ["tales", "a"], [True, True, True], 60)
            pod.wait_ready(60)
            for victim in ("core", "text"):
                deaths.append(time.monotonic())
                os.kill(pod.pid(victim), signal.SIGKILL)
                seconds = await wait_readiness(pod, client, ["tales", "a"], [False, False, False], 20)
                print(f"\nnot ready {seconds:.2f} s after the death of {victim}")
                assert seconds < REACTION_S + SLACK_S
                assert await client.is_server_live()
                while (await asyncio.to_thread(pod.generate, "tales", "x", max_tokens=1)).status != 200:
                    await asyncio.sleep(0.02)
                seconds = await wait_readiness(pod, client, ["tales"], [True, True], 20)
                print(f"ready {seconds:.2f} s after the first answer")
                assert seconds < 1.0 + SLACK_S
                await wait_readiness(pod, client, ["a"], [True, True], 20)
            # The load of another model does not make the server unready, as release 24.10 is by itself.
            pod.put_adapters(catalog(2, a=tmp_path / "a", b=adapter_folder(tmp_path / "b", weights=b"b" * 1000)))
            while (await readiness(pod, client, "b"))[0][1] is not True:
                answers, over_grpc = await readiness(pod, client, "tales")
                assert answers == over_grpc == [True, True]
            deaths.append(time.monotonic())  # of the adapter's model, between a readiness request and the next request
            pod.put_adapters(catalog(3))
            await wait_readiness(pod, client, ["tales", "a"], [True, True, False], 10)
            watcher.cancel()
            stream = asyncio.create_task(pod.http_stream("tales", "x", max_tokens=100))
            await asyncio.sleep(0.2)
            pod.process.send_signal(signal.SIGTERM)
            await wait_readiness(pod, client, ["tales"], [False, False], 2)
            assert (await stream).error is None
            with pytest.raises(asyncio.CancelledError):
                await watcher

    with started_supervisor(tmp_path / "pod", document, core_waits_for=str(tmp_path / "start")) as pod:
        asyncio.run(scenario(pod))
        assert pod.process.wait(30) == 0
