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
from quire_server.openai.settings import DEFAULT_MAX_BODY_BYTES, FrontSettings
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
    settings = _parse_settings(argv)
    _raise_file_limit()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    # uvicorn handles the signals while it serves, and raises them again at the end.
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: None)
    try:
        listener = _listen(settings)
    except OSError as error:
        print(f"openai: --port {settings.port}: cannot listen ({error.strerror}); use another port", file=sys.stderr)
        return constants.EXIT_CONFIG
    try:
        uvloop.run(_serve(settings, listener))
    except ConfigError as error:
        print(f"openai: {error}", file=sys.stderr)
        return constants.EXIT_CONFIG
    return 0


async def _serve(settings: FrontSettings, listener: socket.socket) -> None:
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
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        listener.close()
        raise ConfigError(
            f"--ssl-certfile {settings.ssl_certfile}, --ssl-keyfile {settings.ssl_keyfile}: cannot be used ({error}); "
            "give a PEM certificate chain and its key without a password"
        ) from error
    connect_task = asyncio.create_task(client.run())
    logger.info("OpenAI front starting host=%s port=%d", settings.host, settings.port)
    # All objects that were created so far live as long as the process. `freeze` keeps the garbage collector from
    # scanning them.
    gc.collect()
    gc.freeze()
    try:
        closing_file = settings.run_dir / constants.CLOSING_FILE
        await FrontServer(config, settings.probe_socket, closing_file, application.close).serve(sockets=[listener])
    finally:
        connect_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await connect_task


def _raise_file_limit() -> None:
    """Raise the limit of open files to the hard limit, because each connection needs an open file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listen(settings: FrontSettings) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if is_ipv6(settings.host) else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if settings.reuse_port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _parse_settings(argv: Sequence[str] | None) -> FrontSettings:
    parser = argparse.ArgumentParser(prog="python -m quire_server.openai", description="Serve the OpenAI API.")
    parser.add_argument(
        "--run-dir", type=Path, required=True, metavar="DIR", help="folder that contains the pod's Unix sockets"
    )
    parser.add_argument("--served-name", required=True, metavar="NAME", help="model name of the base model")
    parser.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="name of the base model in this API; can be repeated (default: the value of --served-name)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=constants.OPENAI_PORT, help="port to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--max-body-bytes",
        type=int,
        default=DEFAULT_MAX_BODY_BYTES,
        metavar="N",
        help="maximum size of a request body (default: %(default)s)",
    )
    parser.add_argument(
        "--api-keys-dir", type=Path, metavar="DIR", help="folder that contains one API key in each of its files"
    )
    parser.add_argument(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        help="file with the key for requests that load and unload adapters",
    )
    parser.add_argument(
        "--shared-prefix-cache", action="store_true", help="let requests with different API keys share cached prompts"
    )
    parser.add_argument("--live", action="store_true", help="serve /live, a page that shows the running engine")
    parser.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="allow web pages of this origin to use the API",
    )
    parser.add_argument(
        "--generation-config",
        choices=("auto", "vllm"),
        default="auto",
        help="auto: take defaults of sampling parameters from generation_config.json; vllm: ignore this file",
    )
    parser.add_argument("--ssl-certfile", type=Path, metavar="FILE", help="serve HTTPS with this certificate chain")
    parser.add_argument(
        "--ssl-keyfile", type=Path, metavar="FILE", help="key of the certificate (default: in the same file)"
    )
    parser.add_argument("--probe-socket", type=Path, metavar="FILE", help="additional Unix socket for probes")
    parser.add_argument("--reuse-port", action="store_true", help="share the port with other processes")
    parser.add_argument("--log-requests", action="store_true", help="log each request")
    args = parser.parse_args(argv)
    if args.ssl_keyfile is not None and args.ssl_certfile is None:
        parser.error("--ssl-keyfile requires --ssl-certfile")
    return FrontSettings(
        run_dir=args.run_dir,
        served_name=args.served_name,
        served_model_names=tuple(args.served_model_name),
        host=args.host,
        port=args.port,
        max_body_bytes=args.max_body_bytes,
        api_keys_dir=args.api_keys_dir,
        admin_key_file=args.admin_key_file,
        shared_prefix_cache=args.shared_prefix_cache,
        live=args.live,
        uses_generation_config=args.generation_config == "auto",
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        probe_socket=args.probe_socket,
        reuse_port=args.reuse_port,
        log_requests=args.log_requests,
        cors_origins=tuple(args.cors_origin),
    )


if __name__ == "__main__":
    sys.exit(main())
