# SPDX-License-Identifier: Apache-2.0
"""Invalid requests: each gets one clear error, and the next request works."""

import re
import socket
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.quire_serve import command_line, run_concurrently

pytestmark = pytest.mark.server

STORY = "Once upon a time"


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"temperature": "NaN"}, ("INVALID_ARG", "temperature")),
        ({"temperature": -1}, ("INVALID_ARG", "temperature", "-1")),
        ({"top_p": 2}, ("INVALID_ARG", "top_p")),
        ({"max_tokens": 0}, ("INVALID_ARG", "max_tokens")),
        ({"max_tokens": "lots"}, ("INVALID_ARG", "max_tokens", "lots")),
        ({"n": 0}, ("INVALID_ARG", "'n'")),
        ({"n": 3, "temperature": 0}, ("INVALID_ARG", "'n'")),
        ({"n": 3, "best_of": 2}, ("INVALID_ARG", "'best_of'")),
        ({"best_off": 3}, ("INVALID_ARG", "best_off")),
        ({"stop": str(["x"] * 10_000).replace("'", '"')}, ("INVALID_ARG", "stop", "10000")),
        ({"lora_name": "unknown"}, ("NOT_FOUND", "unknown", "pirate")),
        ({"logprobs": 1000}, ("INVALID_ARG", "logprobs")),
        ({"presence_penalty": "3"}, ("INVALID_ARG", "presence_penalty", "3")),
        ({"repetition_penalty": 0}, ("INVALID_ARG", "repetition_penalty")),
        ({"logit_bias": '{"word": 1}'}, ("INVALID_ARG", "logit_bias", "word")),
        ({"logit_bias": '{"999999": 1}'}, ("INVALID_ARG", "logit_bias", "999999")),
        ({"allowed_token_ids": "[]"}, ("INVALID_ARG", "allowed_token_ids")),
        ({"bad_words": '[""]'}, ("INVALID_ARG", "bad_words")),
        ({"truncate_prompt_tokens": 0}, ("INVALID_ARG", "truncate_prompt_tokens")),
        ({"sampling_parameters": "{"}, ("INVALID_ARG", "sampling_parameters")),
        ({"sampling_parameters": "[1]"}, ("INVALID_ARG", "sampling_parameters")),
        ({"seed": 2**63}, ("INVALID_ARG", "seed")),
    ],
)
def test_error_names_the_parameter(service, parameters, words):
    response = service.generate("tales", STORY, **parameters)
    assert response.status == 400, response
    assert all(word in response.body["error"] for word in words), response.body
    assert "Traceback" not in response.body["error"]
    assert len(response.body["error"]) < 1000
    works(service)


def test_rejects_prompt_longer_than_max_model_len(service):
    response = service.generate("tales", "word " * 5000)
    assert response.status == 400
    assert "INVALID_ARG" in response.body["error"]
    assert "max_model_len" in response.body["error"]
    works(service)


def test_rejects_50_megabyte_prompt(service):
    response = service.generate("tales", "x" * 50_000_000)
    assert response.status in (400, 413), response
    assert len(str(response.body)) < 1000
    works(service)


@pytest.mark.parametrize("prompt", [b"\xff\xfe\xfa", b"ok \xc3"])
def test_invalid_utf8(service, prompt):
    body = b'{"max_tokens": 4, "text_input": "' + prompt + b'"}'
    response = service.request("http", "/v2/models/tales/generate", body)
    assert response.status == 400, response
    works(service)


def test_invalid_utf8_over_grpc(service):
    (stream,) = run_concurrently(service.grpc_stream("tales", b"\xff\xfe", max_tokens=4))
    assert "INVALID_ARG" in stream.error
    assert "UTF-8" in stream.error
    works(service)


def test_rejects_unknown_model(service):
    assert service.generate("unknown", STORY).status in (400, 404)
    works(service)


@pytest.mark.parametrize("ids", [[], [-1], [10**6], [1] * 5000])
def test_rejects_invalid_input_ids(service, ids):
    response = service.request("http", "/v2/models/tales/generate", {"input_ids": ids, "max_tokens": 2})
    assert response.status == 400, response
    works(service)


def test_grpc_errors_begin_with_the_code(service):
    unknown, wrong = run_concurrently(
        service.grpc_stream("tales", STORY, lora_name="unknown"), service.grpc_stream("tales", STORY, temperature=-1.0)
    )
    assert unknown.error.startswith("NOT_FOUND: ")
    assert wrong.error.startswith("INVALID_ARG: ")
    works(service)


def test_counts_each_rejection_of_stub_front_and_text_process_once(service):
    def counted():
        families = text_string_to_metric_families(service.metrics())
        (family,) = [family for family in families if family.name == "vllm:request_failure"]
        return Counter({s.labels["reason"]: int(s.value) for s in family.samples if s.name.endswith("_total")})

    before = counted()
    assert service.generate("tales", STORY, temperature=-1).status == 400
    assert service.generate("sql", STORY, lora_name="pirate").status == 400
    assert service.request("http", "/v2/models/pirate/generate", {"input_ids": [-1]}).status == 400
    assert service.generate("tales", STORY, lora_name="unknown").status == 400
    (stream,) = run_concurrently(service.grpc_stream("tales", b"\xff"))
    assert stream.error
    service.wait(lambda: counted() - before == {"INVALID_ARG": 4, "NOT_FOUND": 1}, 5, "counted")
    before = counted()
    for body in ({"prompt": "a", "temperature": -1}, {"prompt": [10**9]}, {"prompt": "a " * 20_000}):
        assert service.request("openai", "/v1/completions", {"model": "tales"} | body).status == 400
    assert service.request("openai", "/v1/completions", {"model": "absent", "prompt": "a"}).status == 404
    service.wait(lambda: sum((counted() - before).values()) >= 4, 5, "counted")
    assert counted() - before == {"INVALID_ARG": 3, "NOT_FOUND": 1}


def test_invalid_requests_do_not_affect_valid_ones(service):
    alone = service.text("pirate", STORY, temperature=0.0, max_tokens=60)
    good = [service.http_stream("pirate", STORY, temperature=0.0, max_tokens=60) for _ in range(8)]
    bad = [service.http_stream("tales", STORY, temperature=-1) for _ in range(8)]
    streams = run_concurrently(*(s for pair in zip(good, bad, strict=True) for s in pair))
    assert [s.text for s in streams[::2]] == [alone] * 8
    assert all("temperature" in s.error for s in streams[1::2])


def test_other_users_of_the_machine_can_read_nothing(service):
    works(service)
    processes = [process for process in service.child_processes() if "tritonserver" in process.name()]
    assert processes
    for process in service.child_processes():
        assert not re.search("key=[0-9a-f]{32}", " ".join(command_line(process)))
    prefix = (service.folder / "run/shm-prefix").read_text()
    regions = list(Path("/dev/shm").glob(f"{prefix}*"))
    assert regions and all(region.stat().st_mode & 0o077 == 0 for region in regions)
    assert (service.folder / "run").stat().st_mode & 0o077 == 0
    assert (service.folder / "run/cache-salt-secret").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("port", ["http", "openai"])
def test_without_free_descriptors_connections_wait_and_the_log_stays_small(service, port):
    part = "bin/tritonserver" if port == "http" else "quire_server.openai"
    process = next(p for p in service.child_processes() if any(part in a for a in command_line(p)))
    soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
    num_lines = len(service.log.read_bytes().splitlines())
    limit = process.num_fds() + 10
    process.rlimit(psutil.RLIMIT_NOFILE, (limit, hard))
    try:
        connections = [socket.create_connection(("127.0.0.1", service.ports[port])) for _ in range(40)]
        service.wait(lambda: process.num_fds() >= limit, 10, "no free descriptors")
        time.sleep(2)  # a process that tries again at once writes thousands of lines in this time
        assert len(service.log.read_bytes().splitlines()) - num_lines < 100
        for connection in connections:
            connection.close()
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
    service.wait(lambda: process.num_fds() < limit, 10, "free descriptors")
    works(service)
    assert service.request("openai", "/v1/models").status == 200


def works(service):
    assert service.generate("tales", STORY, max_tokens=2).status == 200
