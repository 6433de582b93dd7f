# SPDX-License-Identifier: Apache-2.0
"""Command line of the pod supervisor: `python -m quire_server`.

The operator's pods and `quire serve` run this module.
"""

import argparse
import asyncio
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from quire_server.logs import configure_logging
from quire_server.model_server.vllm_repository import read_served_model_names, write_documents
from quire_server.supervisor.app import run
from quire_server.supervisor.managed_process import StartupFailed
from quire_server.supervisor.settings import SupervisorSettings
from quire_spec import constants
from quire_spec.documents.model_repository import find_vllm_model
from quire_spec.documents.server_arguments import ALLOWED
from quire_spec.errors import QuireError
from quire_spec.model.capabilities import DEVICES
from quire_spec.net.addresses import ANY_ADDRESS, POD_IP_VARIABLE, listen_address

EXIT_STOPPED = 0
EXIT_STARTUP_FAILED = 1

_HELP = """\
Serve one model and its adapters: start and supervise Triton Inference Server, the text process and the engine core,
fetch the adapters, and answer probes. Ctrl-C or SIGTERM drains open requests; a second signal stops at once.

It listens on these ports:
  HTTP, gRPC   Triton Inference Server, with one model for the base and for each exposed adapter
  metrics      the server's own metrics
  health       GET /health/live, /health/ready, /metrics; with the admin key: GET /status, PUT /adapters,
               /v2/repository/index, /v2/repository/models/NAME/load and unload
  openai       the OpenAI API, only with --openai-port
Point probes at the health port, which also reports why a pod is not ready. The server's own ports report ready only
if the health port does.

Examples:
  python -m quire_server --engine engine.json --adapters adapters.json --served-name tales \\
      --run-dir /tmp/quire --cache-dir ~/.cache/quire
  python -m quire_server --vllm-repository model_repository/vllm_model --served-name llama \\
      --run-dir /tmp/quire --cache-dir ~/.cache/quire
"""
_VLLM_REPOSITORY_HELP = "serve this vllm_backend model (model.json, multi_lora.json) instead of --engine and --adapters"
_HOST_HELP = (
    f"address to listen on (default: %(default)s); {ANY_ADDRESS} means all addresses, which are IPv6 addresses if "
    f"${POD_IP_VARIABLE} is an IPv6 address"
)
_EXPOSE_HELP = (
    "protocols with which clients can reach the server: http, grpc, http,grpc (default) or none; the ports of the "
    "other protocols accept connections only from this machine"
)
_OPENAI_HELP = f"serve the OpenAI API on this port, usually {constants.OPENAI_PORT} (default: not served)"
_OPENAI_KEYS_HELP = (
    "folder in which each file contains an API key, such as a mounted Secret (default: no key is needed)"
)
_OPENAI_SHARED_PREFIX_CACHE_HELP = "let requests with different API keys share cached prompts"
_OPENAI_LIVE_HELP = "serve /live, a page that shows the running engine, on the port of the OpenAI API"
_OPENAI_DEFAULTS_HELP = (
    "auto (default): the OpenAI API takes defaults of sampling parameters from generation_config.json; vllm: this file "
    "is ignored"
)
_OPENAI_CORS_HELP = "allow web pages of this origin to call the OpenAI API; * allows all origins"
_ADMIN_KEY_HELP = (
    "file with the key that requests to /status and /adapters must contain (default: no key is needed, but only "
    "requests from this machine are accepted)"
)
_SERVED_MODEL_NAME_HELP = (
    "name of the base model in the OpenAI API; can be repeated (default: the value of --served-name)"
)
_FRONT_COUNT_HELP = "number of processes that serve the OpenAI API on one port (default: 1)"
_RUNTIME_LORA_HELP = "allow clients of the OpenAI API that have the admin key to load and unload adapters"
_LORA_PATH_HELP = "folder of adapters that the OpenAI API can load; requires --allow-path-sources"
_MODEL_REPOSITORY_HELP = (
    "folder of other Triton models, such as Python models and ensembles; their code runs as this user; clients can "
    "load them through the health port"
)
_MODEL_ENV_HELP = "name of an environment variable that is passed to the code of other Triton models; can be repeated"
_SERVER_ARG_HELP = f"argument of the server; can be repeated; allowed: {', '.join(ALLOWED)}"
_REPEATED: dict[str, Any] = {"action": "append", "default": []}
_PVCS: dict[str, Any] = {"dest": "pvcs", "action": "append", "default": []}
_DRAIN_HELP = "number of seconds that open requests have to finish after the first signal (default: %(default)s)"
_EXIT_CODES = """\
exit codes:
  0        stopped by a signal after an orderly shutdown
  1        a process did not start; its last lines contain the reason
  2        the command line, engine.json, adapters.json or this machine is not usable; the message states what to change
  130, 143 stopped at once by a second SIGINT or SIGTERM (129: SIGHUP), or by the first one if no process had started
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the supervisor until it is stopped, and return the exit code."""
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
    parser = _build_parser()
    args = parser.parse_args(argv)
    if args.vllm_repository is None and None in (args.engine, args.adapters):
        parser.error("--engine and --adapters are required, unless --vllm-repository is set")
    if args.vllm_repository is not None and (args.engine or args.adapters):
        parser.error("--vllm-repository cannot be combined with --engine or --adapters; give one or the other")
    if args.vllm_repository is None and args.device is not None:
        parser.error("--device requires --vllm-repository; otherwise set device in engine.json")
    if args.openai_ssl_keyfile is not None and args.openai_ssl_certfile is None:
        parser.error("--openai-ssl-keyfile requires --openai-ssl-certfile")
    if not args.expose and args.openai_port is None:
        parser.error("--expose none requires --openai-port; otherwise no client could send a request")
    if args.allow_runtime_lora_updating and None in (args.admin_key_file, args.openai_port):
        parser.error("--allow-runtime-lora-updating requires --admin-key-file and --openai-port")
    if args.allowed_local_lora_path and not (args.allow_runtime_lora_updating and args.allow_path_sources):
        parser.error("--allowed-local-lora-path requires --allow-runtime-lora-updating and --allow-path-sources")
    return args


def _settings(args: argparse.Namespace) -> SupervisorSettings:
    """Convert the options to settings. A vllm_backend model is converted to engine.json and adapters.json."""
    values = vars(args) | {"host": listen_address(args.host, os.environ), "pvcs": dict(args.pvcs)}
    if args.vllm_repository is not None:
        key = hashlib.sha256(os.fsencode(args.vllm_repository.resolve())).hexdigest()[:16]
        folder = args.cache_dir / "vllm" / key
        values["engine"], values["adapters"] = write_documents(args.vllm_repository, args.device or "cuda", folder)
        args.openai_served_model_name = [*args.openai_served_model_name, *read_served_model_names(args.vllm_repository)]
        # multi_lora.json may contain local folders.
        values["allow_path_sources"] = values["require_adapters"] = True
        values["own_model_folder"] = find_vllm_model(args.vllm_repository).path
    values["allowed_local_lora_paths"] = tuple(args.allowed_local_lora_path)
    values["model_env"], values["server_args"] = frozenset(args.model_env), tuple(args.server_args)
    values["openai_flags"] = tuple(_openai_flags(args))
    return SupervisorSettings(**{f.name: values[f.name] for f in fields(SupervisorSettings) if f.name in values})


def _openai_flags(args: argparse.Namespace) -> Iterator[str]:
    """Yield arguments that the supervisor only passes on to the OpenAI front."""
    if args.openai_api_keys_dir is not None:
        yield f"--api-keys-dir={args.openai_api_keys_dir}"
    if args.allow_runtime_lora_updating:
        yield f"--admin-key-file={args.admin_key_file.absolute()}"
    if args.openai_shared_prefix_cache:
        yield "--shared-prefix-cache"
    if args.openai_live:
        yield "--live"
    if args.openai_max_body_bytes is not None:
        yield f"--max-body-bytes={args.openai_max_body_bytes}"
    if args.openai_generation_config is not None:
        yield f"--generation-config={args.openai_generation_config}"
    for name in args.openai_served_model_name:
        yield f"--served-model-name={name}"
    if args.openai_ssl_certfile is not None:
        yield f"--ssl-certfile={args.openai_ssl_certfile}"
    if args.openai_ssl_keyfile is not None:
        yield f"--ssl-keyfile={args.openai_ssl_keyfile}"
    if args.openai_enable_log_requests:
        yield "--log-requests"
    for origin in args.openai_cors_origin:
        yield f"--cors-origin={origin}"


def _parse_port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"must be a port from 1 to 65535, got {text!r}")
    return int(text)


def _parse_protocols(text: str) -> tuple[str, ...]:
    protocols = () if text == "none" else tuple(text.split(","))
    if unknown := [name for name in protocols if name not in constants.SERVER_PROTOCOLS]:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is not a protocol; give 'http', 'grpc', 'http,grpc' or 'none'"
        )
    return protocols


def _parse_front_count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= constants.MAX_OPENAI_FRONTS:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to {constants.MAX_OPENAI_FRONTS}, got {text!r}")
    return int(text)


def _parse_pvc_mount(text: str) -> tuple[str, Path]:
    claim, equals, folder = text.partition("=")
    if not claim or not equals or not folder:
        raise argparse.ArgumentTypeError(f"must have the form CLAIM=DIR, got {text!r}")
    return claim, Path(os.path.abspath(folder))


def _absolute_path(text: str) -> Path:
    # Child processes get these paths and may run in another working directory.
    return Path(text).absolute()


_OPTIONS: dict[str, tuple[tuple[str, str | None, Callable[[str], Any], str, dict[str, Any]], ...]] = {
    "what to serve": (
        ("--engine", "FILE", _absolute_path, "engine.json", {}),
        ("--adapters", "FILE", _absolute_path, "adapters.json: the adapter catalog", {}),
        ("--vllm-repository", "DIR", Path, _VLLM_REPOSITORY_HELP, {}),
        (
            "--device",
            None,
            str,
            "device for --vllm-repository if model.json sets none (default: cuda)",
            {"choices": DEVICES},
        ),
        ("--served-name", "NAME", str, "model name of the base model", {"required": True}),
    ),
    "further models": (
        ("--model-repository", "DIR", _absolute_path, _MODEL_REPOSITORY_HELP, {}),
        ("--model-env", "NAME", str, _MODEL_ENV_HELP, _REPEATED),
        ("--server-arg", "NAME=VALUE", str, _SERVER_ARG_HELP, {"dest": "server_args", **_REPEATED}),
    ),
    "folders": (
        (
            "--run-dir",
            "DIR",
            _absolute_path,
            "folder for sockets; only one supervisor can use it at a time",
            {"required": True},
        ),
        (
            "--cache-dir",
            "DIR",
            _absolute_path,
            "folder for downloaded adapters; kept across restarts",
            {"required": True},
        ),
    ),
    "network": (
        ("--host", "HOST", str, _HOST_HELP, {"default": "127.0.0.1"}),
        ("--expose", "PROTOCOLS", _parse_protocols, _EXPOSE_HELP, {"default": constants.SERVER_PROTOCOLS}),
        ("--http-port", "PORT", _parse_port, "default: %(default)s", {"default": constants.HTTP_PORT}),
        ("--grpc-port", "PORT", _parse_port, "default: %(default)s", {"default": constants.GRPC_PORT}),
        ("--metrics-port", "PORT", _parse_port, "default: %(default)s", {"default": constants.SERVER_METRICS_PORT}),
        ("--health-port", "PORT", _parse_port, "default: %(default)s", {"default": constants.HEALTH_PORT}),
        ("--openai-port", "PORT", _parse_port, _OPENAI_HELP, {}),
        ("--openai-served-model-name", "NAME", str, _SERVED_MODEL_NAME_HELP, {"action": "append", "default": []}),
        ("--openai-api-keys-dir", "DIR", _absolute_path, _OPENAI_KEYS_HELP, {}),
        ("--openai-shared-prefix-cache", None, bool, _OPENAI_SHARED_PREFIX_CACHE_HELP, {}),
        ("--openai-live", None, bool, _OPENAI_LIVE_HELP, {}),
        ("--openai-cors-origin", "ORIGIN", str, _OPENAI_CORS_HELP, {"action": "append", "default": []}),
        ("--openai-generation-config", None, str, _OPENAI_DEFAULTS_HELP, {"choices": ("auto", "vllm")}),
        ("--openai-ssl-certfile", "FILE", _absolute_path, "serve the OpenAI API over TLS: certificate chain", {}),
        ("--openai-ssl-keyfile", "FILE", _absolute_path, "key of the certificate (default: in the same file)", {}),
        ("--openai-api-server-count", "N", _parse_front_count, _FRONT_COUNT_HELP, {"default": 1}),
        ("--openai-enable-log-requests", None, bool, "log each request of the OpenAI API", {}),
        ("--openai-max-body-bytes", "N", int, "maximum size of a request (default: 8 MiB)", {}),
        ("--admin-key-file", "FILE", Path, _ADMIN_KEY_HELP, {}),
        ("--allow-runtime-lora-updating", None, bool, _RUNTIME_LORA_HELP, {}),
        ("--allowed-local-lora-path", "DIR", _absolute_path, _LORA_PATH_HELP, {"action": "append", "default": []}),
    ),
    "adapter sources": (
        ("--secrets-dir", "DIR", Path, "folder with Secrets, as files DIR/<secret>/<key>, or DIR/<secret> as JSON", {}),
        ("--pvc", "CLAIM=DIR", _parse_pvc_mount, "mount point of a PersistentVolumeClaim", _PVCS),
        ("--allow-path-sources", None, bool, "allow local folders as adapter sources; do not use this in pods", {}),
        ("--max-adapter-bytes", "N", int, "maximum adapter size (default: 4 GiB)", {"default": 4 * 2**30}),
    ),
    "process": (
        ("--drain-timeout", "S", float, _DRAIN_HELP, {"dest": "drain_timeout_s", "default": 30.0}),
        ("--verbose", None, bool, "show all log lines of the server", {}),
    ),
}
"""Maps each group to its options. An option consists of its name, metavar, type (bool for a flag), help text, and other
arguments of argparse."""


def _build_parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m quire_server", description=_HELP, epilog=_EXIT_CODES, formatter_class=formatter
    )
    for title, options in _OPTIONS.items():
        group = parser.add_argument_group(title)
        for name, metavar, parse, text, other in options:
            value = {"action": "store_true"} if parse is bool else {"metavar": metavar, "type": parse}
            group.add_argument(name, help=text, **value | other)
    return parser


if __name__ == "__main__":
    sys.exit(main())
