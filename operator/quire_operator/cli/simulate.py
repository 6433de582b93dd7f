# SPDX-License-Identifier: Apache-2.0
"""`quire simulate`: plans the LLMService, and runs `python -m quire_engine.simulation` on the planned engine.

Called by main.py.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from quire_operator.api import crd
from quire_operator.api.llmservice import LLMService
from quire_operator.api.spec_defaults import SpecDefaults
from quire_operator.cli import serve
from quire_operator.cli.plan import plan_from_args
from quire_operator.plan import limits
from quire_operator.render.pod_config import cluster_document
from quire_spec.dataclass_json import to_json
from quire_spec.documents.adapter_catalog import AdapterSpec
from quire_spec.documents.simulated_service import SimulatedService
from quire_spec.errors import ConfigError

_OPTIONS = (
    *("model", "trace", "trace_block_size", "limit", "rate_scale", "replicas", "router", "costs", "slo", "goodput"),
    *("price", "format", "output"),
)


def run(args: argparse.Namespace) -> int:
    """Run the simulator and return its exit status."""
    serve.require_packages()
    with tempfile.TemporaryDirectory(prefix="quire-simulate-") as folder:
        file, environment = Path(folder) / "input.json", dict(os.environ)
        arguments = [*_options(args)]
        if args.simulate_command == "fit":
            arguments += map(str, args.recordings)
        elif args.simulate_command == "record":
            manifest = crd.single_service(args.file)
            service = LLMService.from_body(crd.require_valid(manifest))
            options = serve.ServeOptions(volumes=args.volumes, secrets_dir=args.secrets_dir, run_dir=Path(folder))
            launch_plan = serve.prepare(manifest, service, options, os.environ)
            serve.download_models(launch_plan, args.secrets_dir)
            environment = dict(launch_plan.environment)
            arguments += _adapter_folders(launch_plan.catalog.adapters)
            _write(file, launch_plan.config.engine.to_json())
            arguments.append(f"--engine={file}")
        elif args.file is not None:
            _write(file, to_json(_planned_service(args)))
            arguments.append(f"--service={file}")
        command = (sys.executable, "-m", "quire_engine.simulation", args.simulate_command, *arguments)
        return subprocess.run(command, env=environment, check=False).returncode


def _planned_service(args: argparse.Namespace) -> SimulatedService:
    """Return the engine that the plan of an LLMService gives its pods.

    Raises:
        ConfigError: the file, an option or the model is invalid, or the model does not fit.
    """
    manifest = crd.single_service(args.file)
    service = SpecDefaults.read(args.defaults).service(crd.require_valid(manifest))
    if service.roles:
        raise ConfigError("spec.disaggregation: roles cannot be simulated; remove the field for the simulation")
    inputs, plan = plan_from_args(args, manifest, service)
    engine = cluster_document(service, plan)["engine"]
    if inputs.model.shape.encoder is not None:
        raise ConfigError(
            f"{inputs.model.shape.architecture} is an encoder, and only models that generate are simulated"
        )
    pool_tokens = plan.bytes.kv // limits.kv_bytes_per_token(inputs, plan.tensorParallelSize.value)
    return SimulatedService(engine, inputs.model.shape, pool_tokens, service.spec.replicas)


def _adapter_folders(adapters: Iterable[AdapterSpec]) -> Iterator[str]:
    """Return the options for the adapters that are in a folder of this machine."""
    for adapter in adapters:
        if adapter.source.path is not None:
            yield f"--adapter={adapter.name}={adapter.source.path}"


def _options(args: argparse.Namespace) -> Iterator[str]:
    for name in _OPTIONS:
        if (value := getattr(args, name, None)) is not None:
            yield f"--{name.replace('_', '-')}={value}"
    if getattr(args, "strict", False):
        yield "--strict"


def _write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value), encoding="utf-8")
