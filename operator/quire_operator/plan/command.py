# SPDX-License-Identifier: Apache-2.0
"""`quire plan`: reads what it is told to, has planner.py plan, and prints. Called by cli.py."""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from quire_operator import crd
from quire_operator.errors import InvalidService, Problem
from quire_operator.manifest import Manifest
from quire_operator.plan.checkpoint import CONFIG_FILE, Checkpoint
from quire_operator.plan.errors import Unplannable, Why
from quire_operator.plan.files import FolderFiles, files_of, read_checkpoint
from quire_operator.plan.gpu import Gpu, node_labels, resolve
from quire_operator.plan.inputs import Inputs
from quire_operator.plan.plan import Plan
from quire_operator.plan.planner import DEFAULT_IMAGES, make_plan
from quire_operator.plan.text import lines
from quire_operator.service import Device, LLMService
from quire_operator.sources import Machine
from quire_spec.errors import ConfigError, Unavailable


def run(options: argparse.Namespace) -> int:
    """Print the plan."""
    manifest = crd.only_service(options.file)
    service = LLMService.from_body(crd.valid(manifest))
    model, plan = planned(options, manifest, service)
    if options.output == "json":
        print(json.dumps(plan.to_json(), indent=2))
        return 0
    tty = sys.stdout.isatty()
    width = shutil.get_terminal_size((100, 24)).columns
    print(*lines(service, model, plan, width, tty and not os.environ.get("NO_COLOR")), sep="\n")
    return 0


def planned(
    options: argparse.Namespace,
    manifest: Manifest,
    service: LLMService,
    images: Mapping[str, str] = DEFAULT_IMAGES,
) -> tuple[Checkpoint, Plan]:
    """The model and its plan; raises ConfigError, Unavailable and NotFound with what to do."""
    gpu = _gpu(options, service)
    model = _model(options, manifest, service)
    inputs = Inputs.of(service, model, gpu)
    if options.count is not None and gpu is not None:
        inputs = inputs.with_gpus(options.count)
    return model, make_plan(inputs, images)


def _gpu(options: argparse.Namespace, service: LLMService) -> Gpu | None:
    if service.spec.device is Device.CPU:
        if options.gpu or options.count or options.nodes:
            raise ConfigError(
                "spec.device: CPU: --gpu, --count and --nodes are for GPUs; remove them, or set it to GPU"
            )
        return None
    nodes = [] if options.nodes is None else node_labels(_listing(options.nodes))
    try:
        return resolve(service.spec.gpu, nodes, options.gpu)
    except Unplannable as error:
        if error.why is not Why.GPU_UNKNOWN:
            raise
        raise Unplannable(error.why, f"{error}; or give --gpu or --nodes here") from error


def _listing(file: str) -> object:
    try:
        return json.loads(sys.stdin.read() if file == "-" else Path(file).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--nodes {file}: {error}; give the output of kubectl get nodes -o json") from error


def _model(options: argparse.Namespace, manifest: Manifest, service: LLMService) -> Checkpoint:
    if options.model_config is not None:
        path: Path = options.model_config
        if not path.exists():
            raise ConfigError(f"--model-config {path}: does not exist; give a model's folder, or its {CONFIG_FILE}")
        return read_checkpoint(FolderFiles(path))
    machine = Machine(manifest.folder, dict(options.volumes), options.secrets_dir)
    source, where = service.spec.model.source, ("spec", "model", "source")
    if problems := list(machine.problems(source, where, (CONFIG_FILE,))):
        raise InvalidService([_hint(problem) for problem in problems], manifest.place)
    try:
        return read_checkpoint(files_of(machine.local(source), machine.folder(source), machine.secret))
    except Unavailable as error:
        raise Unavailable(
            f"{error}; where this machine cannot reach it, say where config.json is: --model-config PATH"
        ) from error


def _hint(problem: Problem) -> Problem:
    fix = f"{problem.fix}, or say where config.json is: --model-config PATH"
    return Problem(problem.path, problem.value, problem.rule, fix)
