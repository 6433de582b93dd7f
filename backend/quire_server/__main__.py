# SPDX-License-Identifier: Apache-2.0
"""Command line of the pod supervisor: `python -m quire_server`. Pods of the operator and `quire serve` run it."""

import argparse
import asyncio
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from quire_server.logs import configure_logging
from quire_server.model_server.vllm_repository import write_documents
from quire_server.supervisor.app import run
from quire_server.supervisor.managed_process import StartupFailed
from quire_server.supervisor.settings import SupervisorSettings
from quire_spec import constants
from quire_spec.errors import QuireError
from quire_spec.model import capabilities
from quire_spec.net.addresses import ANY_ADDRESS, POD_IP_VARIABLE, listen_address

EXIT_STOPPED = 0
EXIT_STARTUP_FAILED = 1

_HELP = """\
Serve one model and its adapters: start and supervise Triton Inference Server, the text process and the engine core,
fetch the adapters, and answer probes. Ctrl-C or SIGTERM drains open requests; a second one stops at once.

It listens on these ports:
  HTTP, gRPC   Triton Inference Server, with one model for the base and for each exposed adapter
  metrics      the server's own metrics
  health       GET /health/live, /health/ready, /metrics; GET /status, PUT /adapters (with the admin key)
  openai       the OpenAI API, only with --openai-port
Point probes at the health port: the server itself answers 200 even if a model is dead.

Examples:
  python -m quire_server --engine engine.json --adapters adapters.json --served-name tales \\
      --run-dir /tmp/quire --cache-dir ~/.cache/quire
  python -m quire_server --vllm-repository model_repository/vllm_model --served-name llama \\
      --run-dir /tmp/quire --cache-dir ~/.cache/quire
"""
_EXIT_CODES = """\
exit codes:
  0        stopped by a signal after an orderly shutdown
  1        a process did not start; its last lines contain the reason
  2        the command line, engine.json, adapters.json or this machine is not usable; the message states what to change
  130, 143 stopped at once by a second SIGINT or SIGTERM (129: SIGHUP), or by a first one before any process started
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run until stopped; return the exit code."""
    args = _parse_args(argv)
    configure_logging()
    try:
        asyncio.run(run(_settings(args)))
    except StartupFailed as error:
        return _print_error(error, constants.EXIT_CONFIG if error.is_config_error else EXIT_STARTUP_FAILED)
    except QuireError as error:
        return _print_error(error, constants.EXIT_CONFIG)
    return EXIT_STOPPED


def _print_error(error: QuireError, code: int) -> int:
    print(f"quire: {error}", file=sys.stderr, flush=True)
    return code


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.vllm_repository is None and None in (args.engine, args.adapters):
        parser.error("--engine and --adapters are required, or --vllm-repository")
    if args.vllm_repository is not None and (args.engine or args.adapters):
        parser.error("--vllm-repository cannot be combined with --engine or --adapters; give one or the other")
    if args.vllm_repository is None and args.device is not None:
        parser.error("--device requires --vllm-repository; otherwise set device in engine.json")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m quire_server",
        description=_HELP,
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    files = parser.add_argument_group("what to serve")
    files.add_argument("--engine", type=Path, metavar="FILE", help="engine.json")
    files.add_argument("--adapters", type=Path, metavar="FILE", help="adapters.json: the adapter catalog")
    files.add_argument(
        "--vllm-repository",
        type=Path,
        metavar="DIR",
        help="instead of both: an unchanged model of NVIDIA's vllm_backend (model.json, multi_lora.json)",
    )
    files.add_argument(
        "--device", choices=capabilities.DEVICES, help="used if model.json contains no device (default: cuda)"
    )
    files.add_argument("--served-name", required=True, metavar="NAME", help="model name of the base model")
    folders = parser.add_argument_group("folders")
    folders.add_argument(
        "--run-dir", type=Path, required=True, metavar="DIR", help="sockets; used by one supervisor at a time"
    )
    folders.add_argument(
        "--cache-dir", type=Path, required=True, metavar="DIR", help="fetched adapters; kept across restarts"
    )
    ports = parser.add_argument_group("network")
    ports.add_argument(
        "--host",
        default="127.0.0.1",
        help=f"address to listen on (default: %(default)s); {ANY_ADDRESS}: all addresses (IPv6 if ${POD_IP_VARIABLE} "
        "is an IPv6 address)",
    )
    for name, port in (
        ("http", constants.HTTP_PORT),
        ("grpc", constants.GRPC_PORT),
        ("metrics", constants.SERVER_METRICS_PORT),
        ("health", constants.HEALTH_PORT),
    ):
        ports.add_argument(
            f"--{name}-port", type=_parse_port, default=port, metavar="PORT", help="default: %(default)s"
        )
    ports.add_argument(
        "--openai-port",
        type=_parse_port,
        metavar="PORT",
        help=f"serve the OpenAI API on this port, usually {constants.OPENAI_PORT} (default: not served)",
    )
    ports.add_argument(
        "--openai-api-keys-dir",
        type=Path,
        metavar="DIR",
        help="API keys of the OpenAI API, one file each, such as a mounted Secret (default: no key is needed)",
    )
    ports.add_argument(
        "--openai-shared-prefix-cache",
        action="store_true",
        help="let requests of different API keys use each other's cached prompts",
    )
    ports.add_argument(
        "--openai-cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let web pages of this origin call the OpenAI API; * for all",
    )
    ports.add_argument(
        "--openai-max-body-bytes", type=int, metavar="N", help="maximum size of a request (default: 8 MiB)"
    )
    ports.add_argument(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        help="key for /status and /adapters; without it they answer requests from this machine only",
    )
    sources = parser.add_argument_group("adapter sources")
    sources.add_argument(
        "--secrets-dir", type=Path, metavar="DIR", help="Secrets, as DIR/<secret>/<key>, or DIR/<secret> as JSON"
    )
    sources.add_argument(
        "--pvc",
        type=_parse_pvc_mount,
        action="append",
        default=[],
        metavar="CLAIM=DIR",
        help="mount point of a PersistentVolumeClaim",
    )
    sources.add_argument(
        "--allow-path-sources", action="store_true", help="allow local folders as adapter sources; not for pods"
    )
    sources.add_argument(
        "--max-adapter-bytes", type=int, default=4 * 2**30, metavar="N", help="maximum adapter size (default: 4 GiB)"
    )
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds for open requests to finish after the first signal (default: %(default)s)",
    )
    parser.add_argument("--verbose", action="store_true", help="show all log lines of the server")
    return parser


def _document_paths(args: argparse.Namespace) -> tuple[Path, Path]:
    if args.vllm_repository is None:
        return args.engine, args.adapters
    key = hashlib.sha256(os.fsencode(args.vllm_repository.resolve())).hexdigest()[:16]
    return write_documents(args.vllm_repository, args.device or "cuda", args.cache_dir / "vllm" / key)


def _settings(args: argparse.Namespace) -> SupervisorSettings:
    engine, adapters = _document_paths(args)
    return SupervisorSettings(
        # Child processes get these paths and may run in another working directory.
        engine=engine.absolute(),
        adapters=adapters.absolute(),
        served_name=args.served_name,
        run_dir=args.run_dir.absolute(),
        cache_dir=args.cache_dir.absolute(),
        host=listen_address(args.host, os.environ),
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        metrics_port=args.metrics_port,
        health_port=args.health_port,
        openai_port=args.openai_port,
        openai_flags=tuple(_openai_flags(args)),
        admin_key_file=args.admin_key_file,
        secrets_dir=args.secrets_dir,
        pvcs=dict(args.pvc),
        # multi_lora.json may contain local folders.
        allow_path_sources=args.allow_path_sources or args.vllm_repository is not None,
        require_adapters=args.vllm_repository is not None,
        max_adapter_bytes=args.max_adapter_bytes,
        drain_timeout_s=args.drain_timeout,
        verbose=args.verbose,
    )


def _openai_flags(args: argparse.Namespace) -> Iterator[str]:
    """Yield the arguments of the OpenAI front that are not the supervisor's own."""
    if args.openai_api_keys_dir is not None:
        yield f"--api-keys-dir={args.openai_api_keys_dir.absolute()}"
    if args.openai_shared_prefix_cache:
        yield "--shared-prefix-cache"
    if args.openai_max_body_bytes is not None:
        yield f"--max-body-bytes={args.openai_max_body_bytes}"
    for origin in args.openai_cors_origin:
        yield f"--cors-origin={origin}"


def _parse_port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"must be a port from 1 to 65535, got {text!r}")
    return int(text)


def _parse_pvc_mount(text: str) -> tuple[str, Path]:
    claim, equals, folder = text.partition("=")
    if not claim or not equals or not folder:
        raise argparse.ArgumentTypeError(f"must have the form CLAIM=DIR, got {text!r}")
    return claim, Path(os.path.abspath(folder))


if __name__ == "__main__":
    sys.exit(main())
