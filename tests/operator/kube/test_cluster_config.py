# SPDX-License-Identifier: Apache-2.0
"""Who we are at the API server: tokens that are replaced in a file, and programs that print them."""

import asyncio
import json
import ssl
import time
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from aiohttp import web
from nodocker_cluster.pki import CertificateAuthority
from support.fake_sources import FakeProxy, start_server

from quire_operator.controller.kopf_handlers import create_session
from quire_operator.kube import cluster_config as logins
from quire_operator.kube import exec_plugin as plugins
from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.cluster_config import ClusterConfig
from quire_operator.kube.errors import ApiServerUnavailable, Forbidden
from quire_operator.kube.resources import POD
from quire_spec.errors import ConfigError, Unavailable

V1 = "client.authentication.k8s.io/v1"


def kubeconfig(folder, user, server="http://127.0.0.1:1", **cluster):
    """A file whose one context has this user."""
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "n"}}],
        "clusters": [{"name": "k", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    (folder / "config").write_text(yaml.safe_dump(config))
    return folder / "config"


def plugin(folder, script, **entry):
    """A user whose exec entry runs a shell script, which counts its runs in a file named runs."""
    program = folder / "login"
    program.write_text(f"#!/bin/sh\nprintf . >> '{folder}/runs'\n{script}\n")
    program.chmod(0o755)
    return {"exec": {"apiVersion": V1, "command": "./login", "interactiveMode": "Never", **entry}}


def runs(folder):
    """How often it was run."""
    return len((folder / "runs").read_text()) if (folder / "runs").exists() else 0


def prints(folder, token, **status):
    """A script that prints a credential, which may be replaced later."""
    (folder / "credential").write_text(json.dumps({"kind": "ExecCredential", "status": {"token": token, **status}}))
    return f"cat '{folder}/credential'"


def until(seconds):
    """An expirationTimestamp."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


@asynccontextmanager
async def api_server(*tokens):
    """Takes these tokens, which a test may replace; gives its URL and them.

    Not a real one: that takes a token for ten minutes at least.
    """
    taken = list(tokens)

    async def answer(request):
        if request.headers.get("Authorization") not in [f"Bearer {token}" for token in taken]:
            return web.json_response({"message": "Unauthorized"}, status=401)
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})

    app = web.Application()
    app.add_routes([web.route("*", "/{path:.*}", answer)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", taken
    finally:
        await runner.cleanup()


# Token files


async def test_a_token_file_is_read_again_when_the_token_is_refused(tmp_path):
    (tmp_path / "token").write_text("old\n")
    async with api_server("old") as (server, taken):
        login = ClusterConfig.from_kubeconfig(kubeconfig(tmp_path, {"tokenFile": "token"}, server))
        async with ApiClient(login) as client:
            await client.list(POD, "n")
            # As the kubelet does; the file is not looked at for a minute.
            (tmp_path / "token").write_text("new\n")
            taken[:] = ["new"]
            await client.list(POD, "n")
            assert await login.auth_headers() == {"Authorization": "Bearer new"}
            taken.clear()
            with pytest.raises(Forbidden, match="401 Unauthorized"):
                await client.list(POD, "n")


async def test_a_token_file_is_read_again_by_its_age(tmp_path, monkeypatch):
    (tmp_path / "token").write_text("old")
    login = ClusterConfig.from_kubeconfig(kubeconfig(tmp_path, {"tokenFile": "token"}))
    await login.auth_headers()
    (tmp_path / "token").write_text("new")
    assert await login.auth_headers() == {"Authorization": "Bearer old"}
    monkeypatch.setattr(logins, "_TOKEN_REREAD_S", -1)
    assert await login.auth_headers() == {"Authorization": "Bearer new"}


async def test_a_watch_that_is_refused_has_the_token_read_again(tmp_path):
    (tmp_path / "token").write_text("old")
    async with api_server("new") as (server, _):
        login = ClusterConfig.from_kubeconfig(kubeconfig(tmp_path, {"tokenFile": "token"}, server))
        async with ApiClient(login) as client:
            for said in ("refused", ""):
                try:
                    async with client.watch(POD, "n", "1", "", 1):
                        found = ""
                except Forbidden:
                    found = "refused"
                assert found == said
                (tmp_path / "token").write_text("new")


@pytest.mark.parametrize("text, words", [(None, "No such file"), ("\n", "is empty")])
async def test_a_token_file_that_has_no_token_is_an_error_that_passes(tmp_path, text, words):
    async with api_server("t") as (server, _):
        login = ClusterConfig.from_kubeconfig(kubeconfig(tmp_path, {"tokenFile": "token"}, server))
        if text is not None:
            (tmp_path / "token").write_text(text)
        async with ApiClient(login) as client:
            with pytest.raises(ApiServerUnavailable, match=f"pods: not sent: token file .*/token.* {words}"):
                await client.create(POD, {"metadata": {"namespace": "n"}})
            (tmp_path / "token").write_text("t")
            await client.list(POD, "n")


# Plugins


async def test_a_token_that_is_about_to_end_is_replaced(tmp_path):
    user = plugin(tmp_path, prints(tmp_path, "one", expirationTimestamp=until(30)))
    login = ClusterConfig.from_kubeconfig(kubeconfig(tmp_path, user))
    assert await login.auth_headers() == {"Authorization": "Bearer one"}
    prints(tmp_path, "two", expirationTimestamp=until(3600))
    assert await login.auth_headers() == {"Authorization": "Bearer two"}
    assert await login.auth_headers() == {"Authorization": "Bearer two"}
    assert runs(tmp_path) == 2


async def test_a_plugin_runs_once_for_all_requests_that_are_refused_at_once(tmp_path):
    async with api_server("one") as (server, taken):
        login = ClusterConfig.from_kubeconfig(kubeconfig(tmp_path, plugin(tmp_path, prints(tmp_path, "one")), server))
        async with ApiClient(login) as client:
            await asyncio.gather(*(client.list(POD, "n") for _ in range(10)))
            assert runs(tmp_path) == 1
            prints(tmp_path, "two")
            taken[:] = ["two"]
            await asyncio.gather(*(client.list(POD, "n") for _ in range(10)))
            assert runs(tmp_path) == 2


async def test_a_plugin_is_told_what_kubectl_tells_it(tmp_path):
    script = (
        f"""printf '%s %s %s' "$1" "$COLOUR" "$KUBERNETES_EXEC_INFO" > '{tmp_path}/asked'\n{prints(tmp_path, "t")}"""
    )
    user = plugin(tmp_path, script, args=["get-token"], env=[{"name": "COLOUR", "value": "blue"}])
    await ClusterConfig.from_kubeconfig(kubeconfig(tmp_path, user)).auth_headers()
    argument, colour, info = (tmp_path / "asked").read_text().split(" ", 2)
    assert (argument, colour) == ("get-token", "blue")
    assert json.loads(info) == {"apiVersion": V1, "kind": "ExecCredential", "spec": {"interactive": False}}


@pytest.mark.parametrize(
    "script, words",
    [
        ("echo 'run: aws sso login' >&2; exit 3", "exit status 3: run: aws sso login"),
        ("exit 1", "exit status 1: no output on standard error"),
        ("kill -9 $$", "exit status -9"),
        ("echo Welcome", "its output is not an ExecCredential"),
        ("echo '[]'", "its output is not an ExecCredential"),
        ("""echo '{"status": null}'""", "its output is not an ExecCredential"),
        ("""echo '{"status": {"token": "t", "expirationTimestamp": "soon"}}'""", "its output is not an ExecCredential"),
        ("""echo '{"status": {"clientCertificateData": "x"}}'""", "its status contains clientCertificateData; client"),
        ("""echo '{"status": {"token": ""}}'""", "no token in its output"),
    ],
)
async def test_a_plugin_that_fails_is_named_with_what_it_said(tmp_path, script, words):
    login = ClusterConfig.from_kubeconfig(kubeconfig(tmp_path, plugin(tmp_path, script)))
    with pytest.raises(Unavailable) as caught:
        await login.auth_headers()
    assert str(caught.value).startswith(f"kubeconfig: {tmp_path}/login returned no credential: ")
    assert words in str(caught.value) and "run it by hand" in str(caught.value)
    (tmp_path / "login").write_text(f"#!/bin/sh\n{prints(tmp_path, 't')}")
    assert await login.auth_headers() == {"Authorization": "Bearer t"}, "the next request tries anew"


async def test_a_plugin_that_is_not_there_says_how_to_install_it(tmp_path):
    user = {"exec": {"apiVersion": V1, "command": "no-such-plugin", "installHint": "see example.com/plugin"}}
    login = ClusterConfig.from_kubeconfig(kubeconfig(tmp_path, user))
    with pytest.raises(Unavailable, match=r"no-such-plugin returned no credential: No such file .*: see example\.com"):
        await login.auth_headers()


async def test_a_plugin_that_hangs_is_ended_and_costs_all_that_wait_one_timeout(tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "_TIMEOUT_S", 2.0)
    user = plugin(tmp_path, f"echo $$ > '{tmp_path}/pid'; exec sleep 60")
    login = ClusterConfig.from_kubeconfig(kubeconfig(tmp_path, user))
    begun = time.monotonic()
    found = await asyncio.gather(*(login.auth_headers() for _ in range(5)), return_exceptions=True)
    assert time.monotonic() - begun < 8, "one after the other they take 10"
    assert all("no answer within 2 s" in str(error) for error in found) and runs(tmp_path) == 1
    pid = (tmp_path / "pid").read_text().strip()
    async with asyncio.timeout(5):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "entry, words",
    [
        ({"command": "x"}, "apiVersion"),
        ({"apiVersion": V1}, "command"),
        ({"apiVersion": V1, "command": "x", "env": [{"name": "A"}]}, "value"),
        ({"apiVersion": V1, "command": "x", "interactiveMode": "Always"}, "interactiveMode: Always needs a terminal"),
    ],
)
def test_an_exec_entry_that_cannot_be_used_is_refused_at_the_start(tmp_path, entry, words):
    with pytest.raises(ConfigError, match=words):
        ClusterConfig.from_kubeconfig(kubeconfig(tmp_path, {"exec": entry}))


# The rest of a kubeconfig


@pytest.mark.parametrize(
    "user, words",
    [
        ({"client-certificate": "no.crt", "client-key": "no.key"}, "No such file"),
        ({"client-certificate-data": "eA=="}, "client-key-data"),
        ({"client-certificate-data": "?", "client-key-data": "?"}, "Error"),
    ],
)
def test_certificates_that_cannot_be_read_name_the_file(tmp_path, user, words):
    with pytest.raises(ConfigError, match=f"kubeconfig .*/config: .*{words}.*see kubectl config view"):
        ClusterConfig.from_kubeconfig(kubeconfig(tmp_path, user, "https://127.0.0.1:1"))


async def test_a_server_under_another_name_and_behind_a_proxy_is_reached(tmp_path):
    """As through a bastion: the certificate names the server, and the URL what leads to it."""

    async def answer(request):
        lines = b'{"type": "BOOKMARK"}\n' if "watch" in request.query else b'{"items": [], "metadata": {}}'
        return web.Response(body=lines, content_type="application/json")

    authority = CertificateAuthority(tmp_path)
    authority.issue("api", "api", hosts=["api.example"])
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "api.crt", tmp_path / "api.key")
    server, proxy = await start_server(answer, tls), FakeProxy("user:passw0rd")
    cluster = {
        "server": str(server.make_url("/")),
        "certificate-authority": "ca.crt",
        "tls-server-name": "api.example",
        "proxy-url": f"http://user:passw0rd@127.0.0.1:{await proxy.start()}",
    }
    file = kubeconfig(tmp_path, {"token": "t"}, **cluster)
    async with ApiClient(ClusterConfig.from_kubeconfig(file)) as client:
        assert await client.request("GET", "/a") == {"items": [], "metadata": {}}
        async with client.stream("/a", {"watch": "true"}) as lines:
            assert [line async for line in lines] == [b'{"type": "BOOKMARK"}']
    config = ClusterConfig.from_kubeconfig(file)
    async with create_session(config, {}, []) as session, session.get(f"{config.server}/a") as response:
        assert (await response.json())["items"] == [], "kopf's session"
    assert set(proxy.targets) == {f"127.0.0.1:{server.port}"}
    proxy.credentials = "user:other"
    async with ApiClient(ClusterConfig.from_kubeconfig(file)) as client:
        with pytest.raises(ApiServerUnavailable, match="407") as caught:
            await client.request("GET", "/a")
    assert "passw0rd" not in str(caught.value) + repr(client.cluster_config)
    await proxy.close()
    await server.close()


def test_a_proxy_that_is_not_known_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match="proxy-url is not http") as caught:
        ClusterConfig.from_kubeconfig(kubeconfig(tmp_path, {}, **{"proxy-url": "socks5://user:passw0rd@h:1"}))
    assert "passw0rd" not in str(caught.value)


def test_a_kubeconfig_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"^kubeconfig {tmp_path}/none: does not exist; give another with --kubeconf"):
        ClusterConfig.from_environment(str(tmp_path / "none"))
