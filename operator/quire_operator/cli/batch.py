# SPDX-License-Identifier: Apache-2.0
"""`quire batch`: runs the requests of a file, either on this machine with the model of an LLMService, or on a server.

If the model runs on this machine, the command prepares it in the same way as `quire serve`. In both cases, the command
then replaces its own process with `python -m quire_server.batch`. Called by main.py.
"""

import argparse
import os
import sys
from collections.abc import Iterator

from quire_operator.api import crd
from quire_operator.api.llmservice import LLMService
from quire_operator.cli import serve

_SERVER_OPTIONS = ("url", "api_key_env", "priority", "timeout")
_LOCAL_OPTIONS = ("volumes", "secrets_dir", "run_dir", "cache_dir")


def run(args: argparse.Namespace) -> int:
    """Replace this process with `python -m quire_server.batch`. The function returns only if the command line is
    wrong.
    """
    common = list(_common_flags(args))
    if args.url is not None:
        _reject(args, _LOCAL_OPTIONS, "-f")
        server = [f"--{name.replace('_', '-')}={_value(args, name)}" for name in _SERVER_OPTIONS if _value(args, name)]
        serve.exec_supervisor([*common, *server], os.environ)
    _reject(args, _SERVER_OPTIONS, "--url")
    manifest = crd.single_service(args.file)
    service = LLMService.from_body(crd.require_valid(manifest))
    # A batch has a separate folder. Therefore, it can run while `quire serve` runs the same service.
    run_dir = args.run_dir or serve.default_run_dir(f"{service.name}-batch", os.environ)
    options = serve.ServeOptions(
        volumes=args.volumes, secrets_dir=args.secrets_dir, run_dir=run_dir, cache_dir=args.cache_dir
    )
    launch_plan = serve.prepare(manifest, service, options, os.environ)
    serve.require_packages(serves_openai=True)
    serve.download_models(launch_plan, args.secrets_dir)
    serve.write_run_dir(launch_plan)
    engine = launch_plan.config.engine
    print(f"quire batch: {service.served_name} on {engine.device} from {engine.model}", file=sys.stderr)
    serve.exec_supervisor([*common, *launch_plan.pod_options], launch_plan.environment)


def _common_flags(args: argparse.Namespace) -> Iterator[str]:
    yield from (sys.executable, "-m", "quire_server.batch")
    for name in ("input", "output", "error_file", "max_inflight", "retry_timeout"):
        if (value := getattr(args, name)) is not None:
            yield f"--{name.replace('_', '-')}={value}"
    if args.verbose:
        yield "--verbose"


def _value(args: argparse.Namespace, name: str) -> str | None:
    value = getattr(args, name)
    return None if value is None else str(value)


def _reject(args: argparse.Namespace, names: tuple[str, ...], required: str) -> None:
    """If one of these options is set, end the command with a usage error."""
    for name in names:
        if getattr(args, name) not in (None, []):
            option = {"volumes": "volume"}.get(name, name).replace("_", "-")
            args.usage_error(f"--{option} can be used only with {required}; omit it")
