# SPDX-License-Identifier: Apache-2.0
"""`quire plan`: reads the LLMService, the model's configuration and the GPU, and prints the plan.

Called by main.py; render.py also calls `plan_from_args`.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from quire_operator.api import crd
from quire_operator.api.llmservice import DRAFT_SOURCE, MODEL_SOURCE, Device, LLMService
from quire_operator.api.spec_defaults import SpecDefaults
from quire_operator.api.validation_errors import FieldPath, InvalidService, Problem
from quire_operator.api.yaml_manifest import Manifest
from quire_operator.cli.local_sources import LocalSources
from quire_operator.plan.checkpoint import CONFIG_FILE, CheckpointInfo
from quire_operator.plan.checkpoint_files import Parser, T, read_local_checkpoint, read_source_checkpoint
from quire_operator.plan.draft_info import DraftInfo
from quire_operator.plan.errors import Unplannable, UnplannableReason
from quire_operator.plan.gpu import GpuInfo, resolve_gpu
from quire_operator.plan.inputs import PlannerInputs
from quire_operator.plan.nodes import Node, node_capacity, parse_nodes, usable_node_labels
from quire_operator.plan.plan import Plan
from quire_operator.plan.planner import DEFAULT_IMAGES, make_plan
from quire_operator.plan.report import render_lines
from quire_spec.errors import ConfigError, Unavailable


def run(args: argparse.Namespace) -> int:
    """Print the plan and return the exit status."""
    manifest = crd.single_service(args.file)
    defaults = SpecDefaults.read(args.defaults)
    service = defaults.service(crd.require_valid(manifest))
    inputs, plan = plan_from_args(args, manifest, service, stages_on_one_node=args.pipeline_parallel_size)
    if args.output == "json":
        print(json.dumps(plan.to_json(), indent=2))
        return 0
    tty = sys.stdout.isatty()
    width = shutil.get_terminal_size((100, 24)).columns
    use_color = tty and not os.environ.get("NO_COLOR")
    stages = inputs.pipeline_parallel_size, inputs.num_nodes
    print(*render_lines(service, inputs.model, plan, width, use_color, inputs.draft, *stages), sep="\n")
    return 0


def plan_from_args(
    args: argparse.Namespace,
    manifest: Manifest,
    service: LLMService,
    images: Mapping[str, str] = DEFAULT_IMAGES,
    stages_on_one_node: int | None = None,
) -> tuple[PlannerInputs, Plan]:
    """Return the inputs of the plan, and the plan.

    Raises:
        ConfigError: the file, an option or the model is invalid, or the model does not fit.
        Unavailable, NotFound: the model cannot be read.
    """
    nodes = [] if args.nodes is None else parse_nodes(_read_node_list(args.nodes))
    gpus = {pods.role: _resolve_gpu(args, pods, nodes) for pods in service.pods}
    model = _read_model(args, manifest, service)
    draft = _read_draft(args, manifest, service, model)

    def inputs_of(pods: LLMService) -> PlannerInputs:
        gpu = gpus[pods.role]
        node = node_capacity(pods, nodes, gpu)
        inputs = PlannerInputs.from_service(pods, model, gpu, draft, node, stages_on_one_node)
        return inputs if args.count is None or gpu is None else replace(inputs, max_gpus=args.count)

    inputs = PlannerInputs.of_all_pods(service, inputs_of)
    return inputs, make_plan(inputs, images)


def _resolve_gpu(args: argparse.Namespace, service: LLMService, nodes: Sequence[Node]) -> GpuInfo | None:
    if service.spec.device is Device.CPU:
        if args.gpu or args.count or args.nodes:
            raise ConfigError(
                "spec.device: --gpu, --count and --nodes require GPU, got CPU; remove them, or set spec.device to GPU"
            )
        return None
    try:
        return resolve_gpu(service.spec.gpu, usable_node_labels(service, nodes), args.gpu)
    except Unplannable as error:
        if error.reason is not UnplannableReason.GPU_UNKNOWN:
            raise
        raise Unplannable(error.reason, f"{error}, or give --gpu or --nodes to this command") from error


def _read_node_list(file: str) -> object:
    try:
        return json.loads(sys.stdin.read() if file == "-" else Path(file).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--nodes {file}: {error}; give the output of kubectl get nodes -o json") from error


def _read_model(args: argparse.Namespace, manifest: Manifest, service: LLMService) -> CheckpointInfo:
    parse = partial(CheckpointInfo.from_files, model_impl=service.spec.engine.modelImpl)
    if args.model_config is not None:
        path: Path = args.model_config
        if not path.exists():
            raise ConfigError(f"--model-config {path}: does not exist; give a model's folder, or its {CONFIG_FILE}")
        return asyncio.run(read_local_checkpoint(path, parse))
    try:
        needs_tokenizer = not service.spec.engine.skipTokenizerInit
        return _read_source(args, manifest, service, MODEL_SOURCE, parse, needs_tokenizer)
    except InvalidService as error:
        raise InvalidService(list(map(_with_model_config_hint, error.problems)), manifest.location) from error
    except Unavailable as error:
        raise Unavailable(
            f"{error}; if this machine cannot reach the source, give the path of config.json: --model-config PATH"
        ) from error


def _read_draft(
    args: argparse.Namespace, manifest: Manifest, service: LLMService, model: CheckpointInfo
) -> DraftInfo | None:
    speculative = service.spec.engine.speculativeConfig
    if speculative is None or speculative.model is None:
        return None
    parse = partial(DraftInfo.from_files, speculative, model.shape)
    return _read_source(args, manifest, service, DRAFT_SOURCE, parse)


def _read_source(
    args: argparse.Namespace,
    manifest: Manifest,
    service: LLMService,
    path: FieldPath,
    parse: Parser[T],
    needs_tokenizer: bool = False,
) -> T:
    """Read the source at `path`. Raise InvalidService if this machine cannot read the source."""
    local_sources = LocalSources(manifest.folder, dict(args.volumes), args.secrets_dir)
    source = service.model_sources[path]
    if problems := list(local_sources.iter_problems(source, path, (CONFIG_FILE,))):
        raise InvalidService(problems, manifest.location)
    if (folder := local_sources.resolve(source)) is not None:
        return asyncio.run(read_local_checkpoint(folder, parse, needs_tokenizer))
    return asyncio.run(
        read_source_checkpoint(
            local_sources.localize(source), local_sources.read_secret, parse, needs_tokenizer=needs_tokenizer
        )
    )


def _with_model_config_hint(problem: Problem) -> Problem:
    fix = f"{problem.fix}, or give the path of config.json: --model-config PATH"
    return Problem(problem.path, problem.value, problem.rule, fix)
