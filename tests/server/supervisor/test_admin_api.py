# SPDX-License-Identifier: Apache-2.0
"""The health port over real HTTP: who may ask what, and how it refuses."""

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


class Supervised:
    """A pod that is as ready as a test says; the real one is behind the same port in test_supervisor.py."""

    def __init__(self):
        self.why = ""
        self.taken = []

    def not_ready_reason(self):
        return self.why

    def status(self):
        process = ProcessStatus(ProcessState.READY, 7, "2026-01-01T00:00:00Z")
        adapter = AdapterStatus("sql", AdapterState.FAILED, "2026-01-01T00:00:00Z", error="HTTP 404")
        return PodStatus("0.1.0", "tales", not self.why, self.why, None, 3, {"core": process}, None, [], [adapter])

    async def metrics(self):
        if self.why == "broken":
            raise RuntimeError("secret detail")
        return "quire_ready 1\n"

    def set_catalog(self, catalog, replaces=""):
        if catalog.generation < 3 and replaces != "sha256:3":
            raise StaleCatalog("generation 1 is older than 3")
        self.taken.append(catalog)


class Port:
    """An open health port and a client for it."""

    def __init__(self, supervised, server, session):
        self.supervised, self.server, self.session = supervised, server, session

    async def ask(self, method, path, key=None, **options):
        headers = options.pop("headers", {}) | ({"Authorization": f"Bearer {key}"} if key else {})
        async with self.session.request(method, self.server.make_url(path), headers=headers, **options) as answer:
            text = await answer.text()
            with contextlib.suppress(ValueError):
                return answer.status, json.loads(text)
            return answer.status, text


@contextlib.asynccontextmanager
async def opened(key_file=None):
    supervised = Supervised()
    server = TestServer(AdminAPI(supervised, key_file).app())
    await server.start_server()
    async with aiohttp.ClientSession() as session:
        yield Port(supervised, server, session)
    await server.close()


@pytest.fixture
async def port():
    async with opened() as port:
        yield port


@pytest.fixture
async def locked(tmp_path):
    (tmp_path / "key").write_text(KEY + "\n")
    async with opened(tmp_path / "key") as port:
        port.key_file = tmp_path / "key"
        yield port


async def test_probes(port):
    assert await port.ask("GET", "/health/live") == (200, {"live": True})
    assert await port.ask("GET", "/health/ready") == (200, {"ready": True, "reason": ""})
    port.supervised.why = "core is restarting"
    assert await port.ask("GET", "/health/ready") == (503, {"ready": False, "reason": "core is restarting"})
    assert (await port.ask("GET", "/health/live"))[0] == 200


async def test_status_and_metrics(port):
    status, document = await port.ask("GET", "/status")
    assert status == 200
    assert document["processes"]["core"]["state"] == "Ready"
    assert document["adapters"][0] | {"since": ""} == {
        "name": "sql",
        "state": "Failed",
        "since": "",
        "digest": None,
        "model": None,
        "error": "HTTP 404",
    }
    async with port.session.get(port.server.make_url("/metrics")) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert await answer.text() == "quire_ready 1\n"


async def test_a_catalogue_is_taken(port):
    document = {"generation": 4, "adapters": [{"name": "sql", "source": {"path": "/a"}}]}
    assert await port.ask("PUT", "/adapters", json=document) == (202, {"generation": 4})
    (catalogue,) = port.supervised.taken
    assert catalogue.adapters[0].source.path == "/a"


async def test_an_older_catalogue_is_taken_where_it_says_what_it_replaces(port):
    document = {"generation": 1, "adapters": []}
    for digest, status in (("sha256:2", 409), ("sha256:3", 202)):
        assert (await port.ask("PUT", "/adapters", json=document, headers={"Quire-Replaces": digest}))[0] == status


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[]", 400, "expected an object"),
        (b'{"generation": 9, "adaptors": []}', 400, "adaptors: unknown field"),
        (b'{"generation": 9, "adapters": [{"name": "A B", "source": {"path": "/a"}}]}', 400, "'A B'"),
        (b'{"generation": 9, "adapters": [{"name": "a", "source": {}}]}', 400, "exactly one of"),
        (b'{"generation": 1, "adapters": []}', 409, "older than 3"),
        (b'{"generation": 9}', 400, "adapters: missing; list all that there are to be, [] for none"),
    ],
)
async def test_a_catalogue_is_refused_with_a_reason(port, body, status, words):
    answered, document = await port.ask("PUT", "/adapters", data=body)
    assert (answered, document["code"]) == (status, "INVALID_ARG")
    assert words in document["error"]
    assert port.supervised.taken == []


async def test_a_body_that_is_too_large(port):
    body = io.BytesIO(b" " * (admin_api.MAX_BODY_BYTES + 1))
    status, document = await port.ask("PUT", "/adapters", data=body)
    assert (status, document["code"]) == (413, "INVALID_ARG")


@pytest.mark.parametrize(("method", "path"), [("GET", "/status"), ("PUT", "/adapters")])
async def test_the_admin_side_wants_the_key(locked, method, path):
    for key in (None, "wrong", KEY + "x", KEY[:-1], "é"):
        status, document = await locked.ask(method, path, key)
        assert (status, document["code"]) == (401, "INVALID_ARG")
        assert KEY not in document["error"]
    options = {"json": {"generation": 5, "adapters": []}} if method == "PUT" else {}
    assert (await locked.ask(method, path, KEY, **options))[0] in (200, 202)


async def test_probes_and_metrics_need_no_key(locked):
    for path in ("/health/live", "/health/ready", "/metrics"):
        assert (await locked.ask("GET", path))[0] == 200


async def test_a_rotated_key_is_taken_at_once(locked):
    locked.key_file.write_text("n" * 32)
    assert (await locked.ask("GET", "/status", KEY))[0] == 401
    assert (await locked.ask("GET", "/status", "n" * 32))[0] == 200
    locked.key_file.write_text("")
    status, document = await locked.ask("GET", "/status", "")
    assert (status, "is empty" in document["error"]) == (503, True)


async def test_a_key_file_without_a_key_is_refused_at_start(tmp_path):
    (tmp_path / "key").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        AdminAPI(Supervised(), tmp_path / "key")
    with pytest.raises(ConfigError, match="No such file"):
        AdminAPI(Supervised(), tmp_path / "absent")


@pytest.mark.parametrize("remote", ["10.1.2.3", "::ffff:10.1.2.3", "2001:db8::1"])
async def test_without_a_key_only_this_machine_may_ask(port, monkeypatch, remote):
    monkeypatch.setattr("aiohttp.web_request.BaseRequest.remote", remote)
    status, document = await port.ask("GET", "/status")
    assert status == 403
    assert "--admin-key-file" in document["error"]
    assert (await port.ask("GET", "/health/ready"))[0] == 200


@pytest.mark.parametrize("remote", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
async def test_loopback_in_all_its_forms(port, monkeypatch, remote):
    monkeypatch.setattr("aiohttp.web_request.BaseRequest.remote", remote)
    assert (await port.ask("GET", "/status"))[0] == 200


async def test_a_web_page_cannot_pass_for_this_machine_by_a_name_of_its_own(port):
    status, _ = await port.ask("GET", "/status", headers={"Host": "attacker.example"})
    assert status == 403


async def test_unknown_paths_and_methods_are_json_too(port):
    assert (await port.ask("GET", "/nothing"))[1]["code"] == "NOT_FOUND"
    status, document = await port.ask("POST", "/adapters")
    assert (status, document["code"]) == (405, "INVALID_ARG")


async def test_a_defect_is_logged_and_not_shown(port, caplog):
    port.supervised.why = "broken"
    with caplog.at_level(logging.ERROR):
        status, document = await port.ask("GET", "/metrics")
    assert (status, document["code"]) == (500, "INTERNAL")
    assert "secret detail" not in document["error"]
    assert "secret detail" in caplog.text
