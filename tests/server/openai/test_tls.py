# SPDX-License-Identifier: Apache-2.0
"""Certificates that are renewed while the front runs, and files that are none."""

import asyncio
import ssl

import uvicorn
from nodocker_cluster.pki import CertificateAuthority
from nodocker_cluster.ports import free_ports
from support.pod_config import write_pod_config

from quire_server.openai import __main__ as front
from quire_server.openai.http import server
from quire_server.openai.http.protocol import LimitedHttpProtocol
from quire_spec import constants


async def serial_number(port):
    """Return the served certificate; the client does not verify it."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return certificate


async def test_a_renewed_certificate_serves_new_connections_and_a_broken_one_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "CERTIFICATE_CHECK_INTERVAL_S", 0.02)
    authority = CertificateAuthority(tmp_path)
    authority.issue("front", "front", hosts=["127.0.0.1"])
    certfile, keyfile = tmp_path / "front.crt", tmp_path / "front.key"
    [port] = free_ports(1)

    async def application(scope, receive, send):
        raise AssertionError("no request is sent")

    config = uvicorn.Config(
        *(application, "127.0.0.1", port),
        http=LimitedHttpProtocol,
        ssl_certfile=certfile,
        ssl_keyfile=keyfile,
        lifespan="off",
    )
    front_server = server.FrontServer(config, tmp_path / "probe.sock", tmp_path / "closing")
    task = asyncio.create_task(front_server.serve())
    while not front_server.started:
        await asyncio.sleep(0.01)
    first = await serial_number(port)
    authority.issue("front", "front", hosts=["127.0.0.1"])
    async with asyncio.timeout(10):
        while (second := await serial_number(port)) == first:
            await asyncio.sleep(0.02)
    certfile.write_text("-----BEGIN CERTIFICATE-----\n")
    await asyncio.sleep(0.1)
    assert await serial_number(port) == second
    front_server.should_exit = True
    await task


def test_files_that_are_no_certificate_end_the_start_with_the_reason(tmp_path, capsys):
    (tmp_path / "x.pem").write_text("no certificate")
    [port] = free_ports(1)
    openai = {"port": port, "sslCertfile": tmp_path / "x.pem"}
    config_file = write_pod_config(tmp_path / "pod.json", {"openai": openai})
    assert front.main([f"--config={config_file}", f"--run-dir={tmp_path}"]) == constants.EXIT_CONFIG
    assert f"openai.sslCertfile {tmp_path / 'x.pem'}" in capsys.readouterr().err
