# SPDX-License-Identifier: Apache-2.0
"""`python -m quire_server`: one pod. The operator's pods run it, and `quire serve` hands over to it."""

import argparse
import asyncio
import hashlib
import os
import sys
from collections.abc import Sequence
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
Serve one model and its adapters: start Triton Inference Server, the text process and the engine core, keep them
running, fetch the adapters, and answer probes. Ctrl-C or SIGTERM lets open requests finish; a second one does not.

It listens on four ports:
  HTTP, gRPC   Triton Inference Server, with one model per name: the base and each adapter
  metrics      the server's own metrics
  health       GET /health/live, /health/ready, /metrics; GET /status, PUT /adapters (with the admin key)
Point probes at the health port: the server answers 200 while a model is dead.

Examples:
  python -m quire_server --engine engine.json --adapters adapters.json --served-name tales \\
      --run-dir /tmp/quire --cache-dir ~/.cache/quire
  python -m quire_server --vllm-repository model_repository/vllm_model --served-name llama \\
      --run-dir /tmp/quire --cache-dir ~/.cache/quire
"""
_EXIT_CODES = """\
exit codes:
  0        stopped by a signal, everything ended in order
  1        a process could not be brought up; its last lines say why
  2        the command line, engine.json, adapters.json or this machine is not fit; the message says what to change
  130, 143 stopped at once by a second SIGINT or SIGTERM (129: SIGHUP), or by a first one that came before anything was
           started
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run until stopped; returns the exit code."""
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
        parser.error("--engine and --adapters are needed, or --vllm-repository")
    if args.vllm_repository is not None and (args.engine or args.adapters):
        parser.error("--engine and --adapters, or --vllm-repository: not both")
    if args.vllm_repository is None and args.device is not None:
        parser.error("--device is for --vllm-repository: engine.json says it")
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
    files.add_argument("--adapters", type=Path, metavar="FILE", help="adapters.json: the catalogue")
    files.add_argument(
        "--vllm-repository",
        type=Path,
        metavar="DIR",
        help="instead of both: a model of NVIDIA's vllm_backend (model.json, multi_lora.json), as it is",
    )
    files.add_argument("--device", choices=capabilities.DEVICES, help="where model.json says none (default: cuda)")
    files.add_argument("--served-name", required=True, metavar="NAME", help="model name of the base")
    folders = parser.add_argument_group("folders")
    folders.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="sockets; one supervisor's alone")
    folders.add_argument("--cache-dir", type=Path, required=True, metavar="DIR", help="fetched adapters, kept")
    ports = parser.add_argument_group("network")
    ports.add_argument(
        "--host",
        default="127.0.0.1",
        help=f"address to listen on (default: %(default)s); {ANY_ADDRESS}: all, of IPv6 where ${POD_IP_VARIABLE} is",
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
        "--admin-key-file", type=Path, metavar="FILE", help="key for /status and /adapters; else this machine only"
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
        help="where a claim is mounted",
    )
    sources.add_argument("--allow-path-sources", action="store_true", help="take folders of this machine; not for pods")
    sources.add_argument(
        "--max-adapter-bytes", type=int, default=4 * 2**30, metavar="N", help="largest adapter (default: 4 GiB)"
    )
    parser.add_argument(
        "--drain-timeout", type=float, default=30.0, metavar="S", help="seconds that open requests may take to end"
    )
    parser.add_argument("--verbose", action="store_true", help="show all that the server logs")
    return parser


def _document_paths(args: argparse.Namespace) -> tuple[Path, Path]:
    if args.vllm_repository is None:
        return args.engine, args.adapters
    key = hashlib.sha256(os.fsencode(args.vllm_repository.resolve())).hexdigest()[:16]
    return write_documents(args.vllm_repository, args.device or "cuda", args.cache_dir / "vllm" / key)


def _settings(args: argparse.Namespace) -> SupervisorSettings:
    engine, adapters = _document_paths(args)
    return SupervisorSettings(
        # The processes that get these paths may run in another folder one day.
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
        admin_key_file=args.admin_key_file,
        secrets_dir=args.secrets_dir,
        pvcs=dict(args.pvc),
        # multi_lora.json names folders of this machine and nothing else.
        allow_path_sources=args.allow_path_sources or args.vllm_repository is not None,
        max_adapter_bytes=args.max_adapter_bytes,
        drain_timeout_s=args.drain_timeout,
        verbose=args.verbose,
    )


def _parse_port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; use 1 to 65535")
    return int(text)


def _parse_pvc_mount(text: str) -> tuple[str, Path]:
    claim, equals, folder = text.partition("=")
    if not claim or not equals or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is not CLAIM=DIR")
    return claim, Path(os.path.abspath(folder))


if __name__ == "__main__":
    sys.exit(main())
