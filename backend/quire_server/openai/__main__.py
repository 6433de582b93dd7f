# SPDX-License-Identifier: Apache-2.0
"""The OpenAI front: `python -m quire_server.openai`. The supervisor starts it.

The front is an HTTP server (uvicorn, uvloop) without a model. The front validates requests, sends them to the text
process over a Unix socket, and formats the responses.
"""

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

import uvicorn
import uvloop

from quire_server.openai.app import Application
from quire_server.openai.http.protocol import LimitedHttpProtocol
from quire_server.openai.http.server import FrontServer
from quire_server.openai.settings import FrontSettings
from quire_server.openai.text_client import TextClient
from quire_spec import constants
from quire_spec.errors import ConfigError
from quire_spec.net.addresses import is_ipv6

logger = logging.getLogger("quire_server.openai")

_GRACE_S = 5
"""After SIGTERM, open responses have this many seconds to end. The supervisor drains the text process before it sends
SIGTERM."""
_KEEP_ALIVE_S = 65
"""A connection is closed after it was idle for this many seconds. The value is longer than the timeouts of clients and
proxies, so that they close idle connections first. Otherwise, a client could send a request at the moment at which the
front closes the connection."""
_BACKLOG = 2048


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; return the exit code."""
    args = _build_parser().parse_args(argv)
    _raise_file_limit()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    # uvicorn handles the signals while it serves, and raises them again at the end.
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: None)
    try:
        settings = FrontSettings.load(args.config, args.run_dir, os.environ)
        uvloop.run(_serve(settings, _listen(settings), args.probe_socket))
    except ConfigError as error:
        print(f"openai: {error}", file=sys.stderr)
        return constants.EXIT_CONFIG
    return 0


async def _serve(settings: FrontSettings, listener: socket.socket, probe_socket: Path | None) -> None:
    certfile, keyfile = settings.openai.sslCertfile, settings.openai.sslKeyfile
    client = TextClient(settings.run_dir / constants.TEXT_SOCKET)
    application = Application(settings, client)
    config = uvicorn.Config(
        application,
        http=LimitedHttpProtocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_GRACE_S,
        timeout_keep_alive=_KEEP_ALIVE_S,
        ssl_certfile=certfile,
        ssl_keyfile=keyfile,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        listener.close()
        raise ConfigError(
            f"openai.sslCertfile {certfile}, openai.sslKeyfile {keyfile}: cannot be used ({error}); give a PEM "
            "certificate chain and its key without a password"
        ) from error
    connect_task = asyncio.create_task(client.run())
    logger.info("OpenAI front starting host=%s port=%d", settings.host, settings.openai.port)
    # All objects that were created so far live as long as the process. `freeze` keeps the garbage collector from
    # scanning them.
    gc.collect()
    gc.freeze()
    try:
        closing_file = settings.run_dir / constants.CLOSING_FILE
        await FrontServer(config, probe_socket, closing_file, application.close).serve(sockets=[listener])
    finally:
        await application.close_connections()
        connect_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await connect_task


def _raise_file_limit() -> None:
    """Raise the limit of open files to the hard limit, because each connection needs an open file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listen(settings: FrontSettings) -> socket.socket:
    port = settings.openai.port
    listener = socket.socket(socket.AF_INET6 if is_ipv6(settings.host) else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if settings.openai.apiServerCount > 1:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((settings.host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"openai.port {port}: cannot listen ({error.strerror}); use another port") from error
    return listener


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m quire_server.openai", description="Serve the OpenAI API.")
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="pod.json")
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="folder of the pod's Unix sockets")
    parser.add_argument("--probe-socket", type=Path, metavar="FILE", help="additional Unix socket for probes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
