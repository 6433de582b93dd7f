# SPDX-License-Identifier: Apache-2.0
"""A real service with KV tiers: its cores share a folder, are killed while they write to it, and start again."""

import concurrent.futures
import os
import signal
import time

import pytest
from support.quire_serve import QuireServeProcess, example_document, running_service

pytestmark = [pytest.mark.server, pytest.mark.timeout(240)]

GREEDY = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.0}
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jan", "Karla", "Leo")
PROMPTS = [" ".join(f"{name} went to the forest on day {day} and saw a bear." for day in range(14)) for name in NAMES]
"""They need more memory than the KV cache and host memory have together."""


def document(**tiers):
    document = example_document()
    document["spec"]["engine"] |= {"maxModelLen": 512, "dataParallelSize": 2, "kvCacheMemory": "5Mi"}
    document["spec"]["engine"]["kvCacheOffloading"] = tiers
    return document


def outputs(service: QuireServeProcess):
    """Return the output of each prompt, which is sent three times, for the base model and an adapter."""
    requests = [(model, prompt) for prompt in PROMPTS for _ in range(3) for model in ("tales", "pirate")]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        texts = list(threads.map(lambda request: service.text(*request, **GREEDY), requests))
    by_request = dict(zip(requests, texts, strict=True))
    assert texts == [by_request[request] for request in requests], "equal prompts have equal outputs"
    return by_request


def process_of(service, core):
    """Return the process id of a core; None while it does not run."""
    return service.status()["processes"][core]["pid"]


def counter(service, name):
    lines = [line for line in service.metrics().splitlines() if line.startswith(f"{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_no_wrong_token_after_cores_that_share_a_folder_were_killed(tmp_path):
    tiers = {"memory": "4Mi", "secondary": [{"folder": {"emptyDir": {}}, "size": "64Mi"}]}
    cache = tmp_path / "first/cache"
    (tmp_path / "first").mkdir()
    with running_service(document(**tiers), tmp_path / "first") as service:
        expected = outputs(service)
        assert counter(service, "quire_kv_folder_written_blocks_total") > 0
        for core in ("core-0", "core-1"):
            pid = service.pid(core)
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                load = thread.submit(outputs, service)
                time.sleep(0.4)
                os.kill(pid, signal.SIGKILL)
                load.exception()
            service.wait(lambda core=core, pid=pid: process_of(service, core) not in (None, pid), 60, "another core")
            service.wait(lambda: service.status()["degraded"] == "", 60, "both cores")
            assert outputs(service) == expected
        assert counter(service, "quire_kv_folder_read_blocks_total") > 0
        assert counter(service, "quire_kv_folder_errors_total") == 0
    # The next process finds the blocks.
    (tmp_path / "second").mkdir()
    cache.rename(tmp_path / "second/cache")
    with running_service(document(**tiers), tmp_path / "second") as service:
        assert outputs(service) == expected
        assert counter(service, "quire_kv_folder_read_blocks_total") > 0
        assert counter(service, "quire_kv_folder_errors_total") == 0
