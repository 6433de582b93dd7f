# SPDX-License-Identifier: Apache-2.0
"""Keys, limits and the attacks that other servers fell to, against a real front."""

import contextlib
import hashlib
import json
import re
import socket
import time
from types import SimpleNamespace

import httpx
import openai
import pytest
from support.engine_processes import wait_for
from support.openai_front import running_front

from quire_server.openai.http import access, api_keys
from quire_server.openai.http.access import AccessControl
from quire_server.openai.http.cache_salts import CacheSalts
from quire_server.openai.http.protocol import MAX_HEAD_BYTES
from quire_server.openai.settings import FrontSettings
from quire_spec.documents.pod_config import OpenAIConfig

pytestmark = pytest.mark.timeout(180)

COMPLETION = {"model": "base", "prompt": list(range(100, 180)), "max_tokens": 1}
ROUTES = [
    *(("GET", path) for path in ("/v1/models", "/v1/models/base", "/nothing", "/invocations", "/v2/embed", "/docs")),
    *(("POST", path) for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")),
    *(("POST", path) for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/responses")),
    *(("POST", path) for path in ("/v1/messages", "/v1/messages/count_tokens")),
    *(("GET", "/v1/responses/resp_1"), ("DELETE", "/v1/responses/resp_1")),
    ("GET", "//health"),
    ("GET", "/health/../v1/models"),
    ("GET", "/%76%31/models"),
    ("GET", "/HEALTH"),
    ("OPTIONS", "/v1/models"),
]


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    (folder / "alice").write_text("key-a\n")
    (folder / "bob").write_text("key-b")
    return folder


@pytest.fixture(scope="module")
def guarded(tmp_path_factory, keys):
    openai = {"apiKeysDir": keys, "corsAllowedOrigins": ["https://chat.example"], "maxBodyBytes": 100000}
    with running_front(tmp_path_factory.mktemp("guarded"), openai) as front:
        yield front


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("headers", [{}, bearer("key-a "[:-2]), bearer(""), {"Authorization": "key-a"}], ids=str)
def test_every_other_route_needs_a_key(guarded, method, path, headers):
    answer = guarded.request(path, COMPLETION if method == "POST" else None, headers, method)
    kind = "authentication_error" if path.startswith("/v1/messages") else "AuthenticationError"
    assert (answer.status, answer.body["error"]["type"]) == (401, kind)
    assert answer.headers["www-authenticate"] == "Bearer" and "key-a" not in str(answer.body)


def test_open_routes_need_none(guarded):
    assert [guarded.request(path).status for path in sorted(access.OPEN_ROUTES)] == [
        200,
        200,
        404,
        200,
        200,
        200,
        200,
        200,
    ]


def test_the_index_describes_every_route_without_a_key(guarded):
    document = guarded.request("/openapi.json").body
    page = httpx.get(guarded.url).text
    for method, path in ROUTES[:-5]:
        if not path.startswith(("/nothing", "/invocations", "/v2/embed", "/docs")):
            template = re.sub("^/v1/(models|responses)/.+", r"/v1/\1/{id}", path)
            assert document["paths"][template][method.lower()]["summary"], path
            assert template.replace("{id}", "") in page
    assert '<a href="/v1/models">' in page and "/live" not in page, "this front does not serve /live"
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "messages" in document["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"]
    references = set(re.findall(r"'#/components/schemas/([^']+)'", str(document)))
    assert references <= document["components"]["schemas"].keys()


def test_keys_rotate_without_a_restart(guarded, keys):
    assert guarded.client("key-a").models.list().data
    new = keys / "carol"
    new.write_text("key-c")
    wait_for(lambda: guarded.request("/v1/models", headers=bearer("key-c")).status == 200, what="the new key")
    new.unlink()
    wait_for(lambda: guarded.request("/v1/models", headers=bearer("key-c")).status == 401, what="the removed key")
    with pytest.raises(openai.AuthenticationError):
        guarded.client("key-c").models.list()


def test_keys_are_counted_and_do_not_share_cached_prompts(guarded):
    def cached_tokens(key):
        answer = guarded.complete(bearer(key), **COMPLETION)
        assert answer.status == 200, answer.body
        return answer.body["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached_tokens(key) > 0 for key in ("key-a", "key-b", "key-a", "key-b")] == [False, False, True, True]
    metrics = guarded.request("/metrics").body
    for name in ("alice", "bob"):
        assert f'quire_api_key_requests_total{{api_key="{name}",model_name="base"}} 2.0' in metrics
        assert f'quire_api_key_tokens_total{{api_key="{name}",kind="prompt",model_name="base"}} 160.0' in metrics
        assert f'quire_api_key_tokens_total{{api_key="{name}",kind="completion",model_name="base"}} 2.0' in metrics


def test_pages_of_configured_origins_only_can_read(guarded):
    preflight = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    answer = guarded.request("/v1/completions", headers=preflight, method="OPTIONS")
    assert answer.status == 204 and "authorization" in answer.headers["access-control-allow-headers"]
    allowed = guarded.request("/v1/models", headers=bearer("key-a") | {"Origin": "https://chat.example"})
    assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
    other = guarded.request("/v1/models", headers=bearer("key-a") | {"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


def test_the_limit_of_the_body(guarded):
    answer = guarded.complete(bearer("key-a"), prompt="a" * 200_000)
    assert answer.status == 413 and "100000 bytes" in answer.message


def test_keys_that_cannot_be_read_accept_nobody(tmp_path):
    keys = api_keys.ApiKeys(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/key").write_text("")
    for checked in (keys, api_keys.ApiKeys(tmp_path / "empty")):
        for authorization in (b"Bearer ", b"Bearer", b"", b"Bearer x"):
            with pytest.raises(api_keys.ApiError, match="valid API key"):
                checked.authenticate(authorization)


def test_salts_of_the_prefix_cache_need_the_secret(tmp_path):
    def salts(secret: str | None) -> CacheSalts:
        file = tmp_path / "secret"
        file.unlink(missing_ok=True)
        if secret is not None:
            file.write_text(secret)
        return CacheSalts(
            FrontSettings(tmp_path, "base", "127.0.0.1", OpenAIConfig(), cache_salt_secret_file=tmp_path / "secret")
        )

    pods = [salts("of the service") for _ in range(2)]
    assert pods[0].salt("alice", "a") == pods[1].salt("alice", "a"), "replicas share blocks"
    names = [("alice", None), ("alice", "bob"), ("bob", None), ("", "alice")]
    distinct = {pods[0].salt(*pair) for pair in names} | {salts(secret).salt("alice", None) for secret in ("x", None)}
    assert len(distinct) == len(names) + 2
    assert salts(None).salt("alice", None) != salts(None).salt("alice", None)
    # What another client can compute from the name of the key.
    assert hashlib.sha256(b"alice/").hexdigest() not in distinct


def test_also_a_single_key_has_its_salt(tmp_path, keys):
    def salt(**options) -> str | None:
        settings = FrontSettings(tmp_path, "base", "127.0.0.1", OpenAIConfig(**options))
        return AccessControl(settings).cache_salt(SimpleNamespace(api_key_name="alice"), None)

    assert salt(apiKeysDir=keys) is not None, "the server's ports need no key"
    assert salt(apiKeysDir=keys, sharedPrefixCache=True) is None and salt() is None


def test_adapters_cannot_be_changed_unless_the_server_allows_it(front):
    answer = front.request("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/etc"})
    assert answer.status == 403 and "edit spec.adapters of the LLMService" in answer.message


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:80"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]:8004"}, 200),
        ({"Host": "127.8.9.10"}, 200),
        ({"Content-Encoding": "gzip"}, 415),
        ({"X-Other": "a" * (MAX_HEAD_BYTES + 1)}, 431),
        ({f"X-{i}": "a" for i in range(120)}, 431),
    ],
    ids=lambda value: str(value)[:60],
)
def test_without_keys_web_pages_and_oversized_heads_are_kept_out(front, headers, status):
    with contextlib.suppress(ConnectionError):
        answer = front.complete(headers, **COMPLETION)
        assert answer.status == status, answer.body


def raw_request(front, data, timeout=30):
    with socket.create_connection(("127.0.0.1", front.port), timeout=timeout) as connection:
        connection.settimeout(timeout)
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        received = b""
        with contextlib.suppress(ConnectionError):
            while chunk := connection.recv(65536):
                received += chunk
        return received


def test_a_header_without_an_end_is_not_buffered(front):
    before = front.memory_bytes()
    raw_request(front, b"GET /health HTTP/1.1\r\nX-Large: " + b"a" * 50 * 2**20)
    assert front.memory_bytes() - before < 20 * 2**20
    assert front.request("/health").status == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff\x16\x03\x01" * 100,
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /%ff%fe HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /v1/models/%00 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"BREW /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    ],
    ids=lambda value: str(value)[:50],
)
def test_bytes_that_are_not_http_close_their_connection_only(front, data):
    assert not raw_request(front, data).startswith(b"HTTP/1.1 2")
    assert front.request("/health").status == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a", "n": 1e400}',
        b'{"prompt": "a", "seed": 123456789012345678901234567890}',
        b'{"prompt": "a", "max_tokens": 99999999999}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "stop": ["' + b'","'.join([b"x"] * 100) + b'"]}',
        b'{"prompt": "a", "bad_words": [""]}',
        b'{"prompt": "a", "logit_bias": {"x": 1}}',
        b'{"prompt": "a", "logit_bias": ' + json.dumps({str(i): 1 for i in range(5000)}).encode() + b"}",
        b'{"prompt": "a", "model": {"$ne": null}}',
        b'{"prompt": "a", "model": "' + b"m" * 100_000 + b'"}',
        b'{"prompt": "a", "n": -1, "' + b"k" * 100_000 + b'": 1}',
        b'{"prompt": "a", "metadata": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "stop": "\\udfff"}',
        b'{"messages": [{"role": "user", "content": "a"}], "chat_template": "{% for i in range(10**9) %}{% endfor %}"}',
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_hostile_body_gets_one_short_error(front, body):
    """An answer is never much longer than the error: other servers amplified bodies by a factor of 5,300."""
    started = time.monotonic()
    answer = front.request("/v1/chat/completions" if b"messages" in body else "/v1/completions", body)
    assert 400 <= answer.status < 500, answer.body
    assert sum(map(len, answer.headers.values())) < 1000
    assert len(json.dumps(answer.body)) < 2000 and time.monotonic() - started < 10
    assert "0x" not in answer.message and "Traceback" not in answer.message
