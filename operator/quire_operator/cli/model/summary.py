# SPDX-License-Identifier: Apache-2.0
"""What `quire serve MODEL` says before it downloads: the size of the model, and whether it fits on this machine.

It reads config.json and the size of the weights, as `quire plan` does. Called by form.py.
"""

import asyncio
import csv
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from quire_operator.api.llmservice import MODEL_SOURCE, Device, LLMService
from quire_operator.cli.local_sources import LocalSources
from quire_operator.cli.model.place import Place, place_of
from quire_operator.plan.checkpoint import CheckpointInfo
from quire_operator.plan.checkpoint_files import Parser, read_local_checkpoint, read_source_checkpoint
from quire_operator.plan.gpu import GpuInfo, MemorySource
from quire_operator.plan.inputs import PlannerInputs
from quire_operator.plan.planner import make_plan
from quire_spec.documents.download_progress import format_bytes
from quire_spec.documents.sources import Source
from quire_spec.errors import AccessDenied, ConfigError, Unavailable
from quire_spec.model.host_memory import available_memory_bytes

_TIMEOUT_S = 10.0
"""The size is not shown if a source does not answer in this time. The download has longer limits of its own."""
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits")


def summarize(
    service: LLMService, local_sources: LocalSources, cache_dir: Path, environment: Mapping[str, str]
) -> list[str]:
    """Return the lines of the summary.

    Raises:
        ConfigError: the model cannot be served, or does not fit into the memory or on the disk. The message names
            fields of the LLMService, or options.
        NotFound, AccessDenied: the source has no model, or needs credentials.
    """
    source = service.model_sources[MODEL_SOURCE]
    place = place_of(source, local_sources, cache_dir, environment, service.streams_weights)
    try:
        parse = partial(CheckpointInfo.from_files, model_impl=service.spec.engine.modelImpl)
        model = asyncio.run(_read(source, local_sources, place, parse, not service.spec.engine.skipTokenizerInit))
    except AccessDenied:
        raise
    except (Unavailable, TimeoutError) as error:
        return [f"the size of the model is unknown: {error or f'no answer in {_TIMEOUT_S:g} s'}"]
    size = format_bytes(model.weights_bytes)
    line = f"{model.shape.architecture}, {size} of weights in {model.dtype}"
    if source.s3 is not None and service.streams_weights:
        line += "; they are read from the bucket at each start"
    elif not place.is_complete:
        line += f"; {_check_disk(place, model.weights_bytes)}"
    return [line, _check_memory(service, model)]


async def _read(
    source: Source, local_sources: LocalSources, place: Place, parse: Parser[CheckpointInfo], needs_tokenizer: bool
) -> CheckpointInfo:
    async with asyncio.timeout(_TIMEOUT_S):
        if place.is_complete:
            return await read_local_checkpoint(place.folder, parse, needs_tokenizer)
        localized = local_sources.localize(source)
        return await read_source_checkpoint(
            localized, local_sources.read_secret, parse, needs_tokenizer=needs_tokenizer
        )


def _check_disk(place: Place, num_bytes: int) -> str:
    existing = next(folder for folder in (place.folder, *place.folder.parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise ConfigError(
            f"{place.option}: {place.folder} has {format_bytes(free)} of free space, but the model needs "
            f"{format_bytes(num_bytes)}; make room, or give a folder on another disk"
        )
    return f"they are downloaded to {place.folder}, where {format_bytes(free)} are free"


def _check_memory(service: LLMService, model: CheckpointInfo) -> str:
    """Return whether the model fits. On a CPU, only the weights are compared: the engine sizes everything else."""
    runs_on_cpu = service.spec.device is Device.CPU
    if gpus := [] if runs_on_cpu else visible_gpus():
        inputs = replace(PlannerInputs.from_service(service, model, gpus[0]), max_gpus=len(gpus))
        plan = make_plan(inputs)
        count = plan.tensorParallelSize.value
        return f"fits on {count} x {gpus[0].name} with {plan.kvTokens} tokens of KV cache"
    if not runs_on_cpu:
        return "whether it fits is unknown, because nvidia-smi does not show the GPU"
    free, needed = available_memory_bytes(), model.weights_bytes
    if service.spec.engine.quantization is not None:
        return f"{format_bytes(free)} of memory are free; quantization {service.spec.engine.quantization} needs less"
    if needed > free:
        raise ConfigError(
            f"MODEL: its weights need {format_bytes(needed)}, but {format_bytes(free)} of memory are free; choose a "
            "smaller model, or give --quantization int8 or int4"
        )
    return f"the weights fit into the {format_bytes(free)} of memory that are free"


def visible_gpus() -> list[GpuInfo]:
    """Return the GPUs that the driver shows; an empty list if it shows none."""
    try:
        result = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        return [
            GpuInfo(name.strip().replace(" ", "-"), int(mib), MemorySource.SPEC, _capability(capability))
            for name, mib, capability in csv.reader(result.stdout.splitlines())
        ]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.strip().partition(".")
    return int(major), int(minor)
