# SPDX-License-Identifier: Apache-2.0
"""The health port over real HTTP: authorization, responses and errors."""

import contextlib
import io
import json
import logging

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from quire_server.adapters.manager import StaleCatalog
from quire_server.supervisor import admin_api
from quire_server.supervisor.admin_api import AdminAPI
from quire_spec.documents.pod_status import AdapterState, AdapterStatus, PodStatus, ProcessState, ProcessStatus
from quire_spec.errors import ConfigError

KEY = "k" * 32


class FakeSupervisor:
    """A Supervisor with a readiness that the test sets; test_supervisor.py uses the real one."""

    def __init__(self):
        self.reason = ""
        self.catalogs = []
        self.closing = False

    def is_closing(self):
        return self.closing

    def not_ready_reason(self):
        return self.reason

    def status(self):
        process = ProcessStatus(ProcessState.READY, 7, "2026-01-01T00:00:00Z")
        adapter = AdapterStatus("sql", AdapterState.FAILED, "2026-01-01T00:00:00Z", error="HTTP 404")
        return PodStatus(
            "0.1.0", "tales", not self.reason, self.reason, None, 3, {"core": process}, None, [], [adapter]
        )

    async def metrics(self):
        if self.reason == "broken":
            raise RuntimeError("secret detail")
        return "quire_ready 1\n"

    async def vllm_backend_metrics(self):
        return 'vllm:prompt_tokens_total{model="tales",version="1"} 1\n'

    def set_catalog(self, catalog, replaces=""):
        if catalog.generation < 3 and replaces != "sha256:3":
            raise StaleCatalog("generation 1 is older than 3")
        self.catalogs.append(catalog)


class HealthPort:
    """A running health port and a client for it."""

    def __init__(self, supervisor, server, session):
        self.supervisor, self.server, self.session = supervisor, server, session

    async def request(self, method, path, key=None, **options):
        headers = options.pop("headers", {}) | ({"Authorization": f"Bearer {key}"} if key else {})
        async with self.session.request(method, self.server.make_url(path), headers=headers, **options) as response:
            text = await response.text()
            with contextlib.suppress(ValueError):
                return response.status, json.loads(text)
            return response.status, text


@contextlib.asynccontextmanager
async def running_port(key_file=None):
    supervisor = FakeSupervisor()
    server = TestServer(AdminAPI(supervisor, key_file).app())
    await server.start_server()
    async with aiohttp.ClientSession() as session:
        yield HealthPort(supervisor, server, session)
    await server.close()


@pytest.fixture
async def port():
    async with running_port() as port:
        yield port


@pytest.fixture
async def port_with_key(tmp_path):
    (tmp_path / "key").write_text(KEY + "\n")
    async with running_port(tmp_path / "key") as port:
        port.key_file = tmp_path / "key"
        yield port


async def test_probes(port):
    assert await port.request("GET", "/health/live") == (200, {"live": True})
    assert await port.request("GET", "/health/ready") == (200, {"ready": True, "reason": ""})
    port.supervisor.reason = "core is restarting"
    assert await port.request("GET", "/health/ready") == (503, {"ready": False, "reason": "core is restarting"})
    assert (await port.request("GET", "/health/live"))[0] == 200


async def test_status_and_metrics(port):
    status, document = await port.request("GET", "/status")
    assert status == 200
    assert document["processes"]["core"]["state"] == "Ready"
    assert document["adapters"][0] | {"since": ""} == {
        "name": "sql",
        "state": "Failed",
        "since": "",
        "digest": None,
        "effect": None,
        "warning": "",
        "candidate": None,
        "previous": None,
        "signer": None,
        "versions": {},
        "model": None,
        "error": "HTTP 404",
    }
    async with port.session.get(port.server.make_url("/metrics")) as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert await response.text() == "quire_ready 1\n"
    async with port.session.get(port.server.make_url("/metrics/vllm_backend")) as response:
        assert (await response.text()).startswith("vllm:prompt_tokens_total{model=")


async def test_accepts_catalog(port):
    document = {"generation": 4, "adapters": [{"name": "sql", "source": {"path": "/a"}}]}
    assert await port.request("PUT", "/adapters", json=document) == (202, {"generation": 4})
    (catalog,) = port.supervisor.catalogs
    assert catalog.adapters[0].source.path == "/a"


async def test_accepts_older_catalog_that_names_the_replaced_one(port):
    document = {"generation": 1, "adapters": []}
    for digest, status in (("sha256:2", 409), ("sha256:3", 202)):
        assert (await port.request("PUT", "/adapters", json=document, headers={"Quire-Replaces": digest}))[0] == status


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[]", 400, "expected an object"),
        (b'{"generation": 9, "adaptors": []}', 400, "adaptors: unknown field"),
        (b'{"generation": 9, "adapters": [{"name": "A B", "source": {"path": "/a"}}]}', 400, "'A B'"),
        (b'{"generation": 9, "adapters": [{"name": "a", "source": {}}]}', 400, "source: missing"),
        (b'{"generation": 1, "adapters": []}', 409, "older than 3"),
        (b'{"generation": 9}', 400, "adapters: missing; list all adapters, or [] if there are none"),
    ],
)
async def test_rejects_invalid_catalog(port, body, status, words):
    response_status, document = await port.request("PUT", "/adapters", data=body)
    assert (response_status, document["code"]) == (status, "INVALID_ARG")
    assert words in document["error"]
    assert port.supervisor.catalogs == []


async def test_rejects_oversize_body(port):
    body = io.BytesIO(b" " * (admin_api.MAX_BODY_BYTES + 1))
    status, document = await port.request("PUT", "/adapters", data=body)
    assert (status, document["code"]) == (413, "INVALID_ARG")


@pytest.mark.parametrize(("method", "path"), [("GET", "/status"), ("PUT", "/adapters")])
async def test_status_and_adapters_require_the_key(port_with_key, method, path):
    for key in (None, "wrong", KEY + "x", KEY[:-1], "é"):
        status, document = await port_with_key.request(method, path, key)
        assert (status, document["code"]) == (401, "INVALID_ARG")
        assert KEY not in document["error"]
    options = {"json": {"generation": 5, "adapters": []}} if method == "PUT" else {}
    assert (await port_with_key.request(method, path, KEY, **options))[0] in (200, 202)


async def test_probes_and_metrics_do_not_require_the_key(port_with_key):
    for path in ("/health/live", "/health/ready", "/metrics", "/metrics/vllm_backend"):
        assert (await port_with_key.request("GET", path))[0] == 200


async def test_rotated_key_takes_effect_at_once(port_with_key):
    port_with_key.key_file.write_text("n" * 32)
    assert (await port_with_key.request("GET", "/status", KEY))[0] == 401
    assert (await port_with_key.request("GET", "/status", "n" * 32))[0] == 200
    port_with_key.key_file.write_text("")
    status, document = await port_with_key.request("GET", "/status", "")
    assert (status, "is empty" in document["error"]) == (503, True)


async def test_rejects_key_file_without_key_at_startup(tmp_path):
    (tmp_path / "key").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        AdminAPI(FakeSupervisor(), tmp_path / "key")
    with pytest.raises(ConfigError, match="No such file"):
        AdminAPI(FakeSupervisor(), tmp_path / "absent")


@pytest.mark.parametrize(
    ("remote", "expected"),
    [
        *((remote, 403) for remote in ("10.1.2.3", "::ffff:10.1.2.3", "2001:db8::1")),
        *((remote, 200) for remote in ("127.0.0.1", "::1", "::ffff:127.0.0.1")),
    ],
)
async def test_without_key_file_accepts_loopback_only(port, monkeypatch, remote, expected):
    monkeypatch.setattr("aiohttp.web_request.BaseRequest.remote", remote)
    status, document = await port.request("GET", "/status")
    assert status == expected
    assert status == 200 or "--admin-key-file" in document["error"]
    assert (await port.request("GET", "/health/ready"))[0] == 200


async def test_rejects_dns_rebinding(port):
    status, _ = await port.request("GET", "/status", headers={"Host": "attacker.example"})
    assert status == 403


async def test_errors_of_unknown_paths_and_methods_are_json(port):
    assert (await port.request("GET", "/nothing"))[1]["code"] == "NOT_FOUND"
    status, document = await port.request("POST", "/adapters")
    assert (status, document["code"]) == (405, "INVALID_ARG")


async def test_internal_error_is_logged_but_not_returned(port, caplog):
    port.supervisor.reason = "broken"
    with caplog.at_level(logging.ERROR):
        status, document = await port.request("GET", "/metrics")
    assert (status, document["code"]) == (500, "INTERNAL")
    assert "secret detail" not in document["error"]
    assert "secret detail" in caplog.text
