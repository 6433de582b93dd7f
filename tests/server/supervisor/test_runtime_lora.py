# SPDX-License-Identifier: Apache-2.0
"""Adapters that clients load and unload through the OpenAI front of a real supervisor and server, with fake engines."""

import asyncio
import json
import os
import signal
from itertools import product

import pytest
from nodocker_cluster.ports import free_ports
from support.engine_processes import IpcClient
from support.hostile_frames import PAYLOADS, UNKNOWN_KIND, hostile_frame
from support.supervisor_harness import adapter_folder, catalog, started_supervisor

from quire_spec import constants
from quire_spec.errors import InvalidArgument, NotFound

pytestmark = [pytest.mark.server, pytest.mark.timeout(180)]

ADMIN_KEY = "key-of-the-admin"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def pod(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pod")
    for name in ("one", "two"):
        adapter_folder(folder / "loras" / name, weights=name.encode())
    adapter_folder(folder / "loras/broken", rank=0)
    (folder / "admin").write_text(ADMIN_KEY)
    (folder / "keys").mkdir()
    (folder / "keys/alice").write_text("key-a")
    [port] = free_ports(1)
    openai = {"port": port, "apiKeysDir": folder / "keys"}
    openai |= {"allowRuntimeLoraUpdating": True, "allowedLocalLoraPaths": [folder / "loras"]}
    config = {"adminKeyFile": folder / "admin", "openai": openai}
    with started_supervisor(folder / "pod", catalog(1), config, load_s=1.0) as pod:
        pod.ports["openai"] = port
        pod.wait_ready(30)
        yield pod
        assert pod.stop() == 0
        assert not pod.run_dir.exists()


def models(pod):
    return [model["id"] for model in pod.request("openai", "/v1/models", key="key-a").body["data"]]


def complete(pod, model):
    body = {"model": model, "prompt": "x", "max_tokens": 1}
    return pod.request("openai", "/v1/completions", body, key="key-a").status


def change(pod, path, key=ADMIN_KEY, **fields):
    return pod.request("openai", path, fields, key=key)


def test_hostile_frames_to_the_supervisor_end_only_their_call(pod):
    kinds = ("Call", "GenerateRequest", "Reply", UNKNOWN_KIND)
    frames = [
        hostile_frame(kind, [1000 + i], payload) for i, (kind, payload) in enumerate(product(kinds, PAYLOADS.values()))
    ]
    path = pod.run_dir / constants.SUPERVISOR_SOCKET
    with IpcClient(path, "openai") as first, IpcClient(path, "openai") as second:
        first.socket.sendall(b"".join(frames))
        failures = [first.receive() for _ in frames]
        assert [failure.id for failure in failures] == [1000 + i for i in range(len(frames))]
        for client in (first, second):
            with pytest.raises(InvalidArgument, match=r"load_lora_adapter: Expected `str`, got `int` - at `\$\.name`"):
                client.call("load_lora_adapter", name=1, location="x", in_place=False)
            with pytest.raises(NotFound, match="the adapter 'none' does not exist"):
                client.call("unload_lora_adapter", name="none")


def test_an_adapter_is_loaded_served_and_unloaded(pod):
    async def load_slowly():
        loading = asyncio.create_task(asyncio.to_thread(change, pod, LOAD, lora_name="a", lora_path="one"))
        statuses = []
        while not loading.done():
            statuses.append((await asyncio.to_thread(complete, pod, "a"), await asyncio.to_thread(complete, pod, "b")))
            await asyncio.sleep(0.05)
        return await loading, statuses

    answer, statuses = asyncio.run(load_slowly())
    assert (answer.status, answer.body) == (200, "Success: LoRA adapter 'a' added successfully.")
    assert {status for _, status in statuses} == {404}, "an unknown model"
    assert (503, 404) in statuses, "a model that is loading"
    assert complete(pod, "a") == 200 and models(pod) == ["tales", "a"]
    assert pod.generate("a", "x", max_tokens=1).status == 200
    assert "already loaded" in change(pod, LOAD, lora_name="a", lora_path="two").body["error"]["message"]
    os.kill(pod.pid("core", ADMIN_KEY), signal.SIGKILL)
    pod.wait(lambda: pod.status(ADMIN_KEY)["processes"]["core"]["restarts"] == 1, 30, "restarted")
    pod.wait(lambda: complete(pod, "a") == 200, 30, "served again after the core's death")
    answer = change(pod, UNLOAD, lora_name="a")
    assert (answer.status, answer.body) == (200, "Success: LoRA adapter 'a' removed successfully.")
    assert complete(pod, "a") == 404 and models(pod) == ["tales"]
    assert change(pod, UNLOAD, lora_name="a").status == 404


@pytest.mark.parametrize(
    ("fields", "status", "problem"),
    [
        ({"lora_name": "x", "lora_path": "broken"}, 400, "rank must be positive"),
        ({"lora_name": "x", "lora_path": "/etc"}, 400, "allowed"),
        ({"lora_name": "tales", "lora_path": "one"}, 400, "base model"),
        ({"lora_name": "a/b", "lora_path": "one"}, 400, "lora_name"),
        ({"lora_name": "x"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": json.loads('{"http":' * 400 + "{}" + "}" * 400)}, 400, "use fewer levels"),
        ({"lora_name": "x", "lora_path": {"pvc": {"claimName": "absent"}}}, 400, "absent"),
    ],
)
def test_an_adapter_that_cannot_be_loaded_changes_nothing(pod, fields, status, problem):
    answer = change(pod, LOAD, **fields)
    assert answer.status == status and problem in answer.body["error"]["message"], answer.body
    assert models(pod) == ["tales"]


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
@pytest.mark.parametrize("key", ["", "key-a", ADMIN_KEY + "x"])
def test_only_the_admin_key_changes_adapters(pod, path, key):
    answer = change(pod, path, key, lora_name="x", lora_path="one")
    assert (answer.status, answer.body["error"]["type"]) == (401, "AuthenticationError")


def test_the_admin_key_is_no_api_key(pod):
    assert pod.request("openai", "/v1/models", key=ADMIN_KEY).status == 401
