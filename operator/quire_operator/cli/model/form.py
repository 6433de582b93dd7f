# SPDX-License-Identifier: Apache-2.0
"""`quire serve MODEL`: builds the LLMService that `-f` would read, from a model and options with vLLM's names.

The document is checked as a file is. In messages, its fields are replaced by the options that set them. Called by
main.py.
"""

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from quire_operator.api import crd
from quire_operator.api.engine_spec import LoraSpec
from quire_operator.api.llmservice import LLMService
from quire_operator.api.validation_errors import InvalidService
from quire_operator.api.yaml_manifest import Manifest, parse_manifests
from quire_operator.cli import serve, service_file
from quire_operator.cli.local_sources import LocalSources
from quire_operator.cli.model.options import DEST_PREFIX, SPEC_OPTIONS
from quire_operator.cli.model.summary import summarize
from quire_operator.cli.pod_options import option_of
from quire_spec import constants
from quire_spec.dataclass_json import non_default_json
from quire_spec.documents.sources import source_from_url
from quire_spec.errors import ConfigError
from quire_spec.model.capabilities import LORA_RANKS

_SPECULATIVE = "engine.speculativeConfig"
_OTHER_OPTIONS = {
    "model.source": "MODEL",
    "model.servedName": "--served-model-name",
    "openai.servedModelNames": "--served-model-name",
    "adapters": "--lora",
    _SPECULATIVE: "--speculative-config",
    "runtime.ports": "--http-port, --grpc-port, --metrics-port, --health-port, --port",
    "device": "--device",
}
_POD_FIELDS = {
    "openai.port": "openai.port",
    "openai.apiServerCount": "openai.apiServerCount",
    "engine.data_parallel_size": "engine.dataParallelSize",
    "engine.pipeline_parallel_size": "engine.pipelineParallelSize",
    "engine.load_format": "engine.loadFormat",
    "engine.lora_experts": "lora.experts",
    "engine.lora_modules_to_save": "lora.modulesToSave",
    "engine.otlp_traces_endpoint": "observability.tracing.endpoint",
    "engine.tool_call_parser": "openai.toolCallParser",
    "engine.reasoning_parser": "openai.reasoningParser",
    **{f"ports.{name}": f"runtime.ports.{name}" for name in ("http", "grpc", "metrics", "health")},
}
"""Fields of spec that contain the values of options of pod_options.py, by the field of pod.json. A saved file has them,
too."""
_PORTS = {
    "http": constants.HTTP_PORT,
    "grpc": constants.GRPC_PORT,
    "metrics": constants.SERVER_METRICS_PORT,
    "health": constants.HEALTH_PORT,
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def build(args: argparse.Namespace, pod_fields: Mapping[str, Any], has_gpu: bool) -> dict[str, Any]:
    """Return the LLMService for the command line, as the content of a file.

    Args:
        pod_fields: values of the options of pod_options.py, by their field in pod.json.
        has_gpu: whether this machine has a GPU. Without --device, it decides about the device.

    Raises:
        ConfigError: MODEL or an option cannot be understood.
    """
    spec: dict[str, Any] = {}
    if args.device == "cpu" or (args.device is None and not has_gpu):
        spec["device"] = "CPU"
    source = _source(args.model, "MODEL")
    _set(spec, "model.source", source)
    if args.revision is not None:
        if "huggingFace" not in source:
            raise ConfigError(f"--revision: {args.model!r} is not a repository of the hub; remove the option")
        source["huggingFace"]["revision"] = args.revision
    names = args.served_model_name or [args.model if "huggingFace" in source else source.get("path", args.model)]
    _set(spec, "model.servedName", _server_name(names[0]))
    if args.served_model_name or "huggingFace" in source:
        _set(spec, "openai.servedModelNames", list(names))
    for path, value in _field_values(args, pod_fields):
        _set(spec, path, value)
    if adapters := [_adapter(text) for text in args.adapters or ()]:
        spec["adapters"] = adapters
        ranks = [rank for adapter in adapters if (rank := _local_rank(adapter["source"])) is not None]
        largest = max(ranks, default=0)
        if getattr(args, f"{DEST_PREFIX}lora.maxRank") is None and largest > LoraSpec().maxRank:
            _set(spec, "lora.maxRank", next((rank for rank in LORA_RANKS if rank >= largest), largest))
    elif args.enable_lora:
        spec.setdefault("lora", {})
    port = pod_fields.get("openai.port")
    if port == 0:
        _set(spec, "openai.enabled", False)
    moved = next((name for name, default in _PORTS.items() if default == port), None)
    if moved is not None and f"ports.{moved}" not in pod_fields:
        # The port of the OpenAI API is free then.
        _set(spec, f"runtime.ports.{moved}", constants.OPENAI_PORT)
    metadata = {"name": _service_name(spec["model"]["servedName"])}
    return {"apiVersion": f"{constants.API_GROUP}/v1alpha1", "kind": "LLMService", "metadata": metadata, "spec": spec}


def save(document: Mapping[str, Any], file: Path, pod_fields: Mapping[str, Any]) -> int:
    """Check the document, and write it to a file, or print it if the file is `-`. Return the exit status 0.

    The document is not checked against this machine, because it can be for another one. Options that no field of the
    document contains are named on standard error.

    Raises:
        ConfigError: the document is not valid, or the file cannot be written. The message names options.
    """
    with _option_names():
        crd.require_valid(_manifest(document))
    if others := [option_of(field) for field in pod_fields if field not in _POD_FIELDS]:
        print(f"quire: not in the file, so give it again with -f: {', '.join(others)}", file=sys.stderr)
    text = _to_yaml(document)
    if str(file) == "-":
        print(text, end="")
        return 0
    try:
        file.write_text(text)
    except OSError as error:
        raise ConfigError(f"--save: {file} cannot be written: {error.strerror}; give another file") from error
    print(f"quire: wrote {file}; serve it with: quire serve -f {file}", file=sys.stderr)
    return 0


def prepare(
    document: Mapping[str, Any], args: argparse.Namespace, options: serve.ServeOptions, environment: Mapping[str, str]
) -> serve.LaunchPlan:
    """Check the document, and return the plan that launches it.

    The key of --api-key or QUIRE_API_KEY is in a file only: neither in the environment nor in arguments of the plan.

    Raises:
        ConfigError: the document is not valid, or cannot run on this machine. The message names options.
    """
    variables = dict(environment)
    variables.pop("QUIRE_SERVE_API_KEY", None)
    api_key = variables.pop("QUIRE_API_KEY", None) if args.api_key is None else args.api_key
    if args.download_dir is not None:
        variables["HF_HUB_CACHE"] = str(args.download_dir.absolute())
    with _option_names():
        options = replace(options, api_key=api_key or None)
        return service_file.content_of(_manifest(document), options, variables).launch_plan


def announce(
    document: Mapping[str, Any], args: argparse.Namespace, launch_plan: serve.LaunchPlan, has_gpu: bool
) -> None:
    """Print on standard error the device, the size of the model, and whether it fits.

    Raises:
        ConfigError: the model cannot be served, or does not fit. The message names options.
        NotFound, AccessDenied: the source has no model, or needs credentials.
    """
    if args.device is None and not has_gpu:
        print("quire: this machine has no NVIDIA GPU, so the model runs on the CPU", file=sys.stderr)
    service = LLMService.from_body(document)
    local_sources = LocalSources(Path(), dict(args.volumes), args.secrets_dir)
    try:
        lines = summarize(service, local_sources, launch_plan.cache_dir, launch_plan.environment)
    except ConfigError as error:
        raise ConfigError(_name_options(str(error))) from error
    for line in lines:
        print(f"quire: {line}", file=sys.stderr)


def _manifest(document: Mapping[str, Any]) -> Manifest:
    (manifest,) = parse_manifests(_to_yaml(document), "-")
    return manifest


@contextlib.contextmanager
def _option_names() -> Iterator[None]:
    """Replace fields by options in the message of an InvalidService."""
    try:
        yield
    except InvalidService as error:
        raise ConfigError("\n".join(_name_options(str(problem)) for problem in error.problems)) from error


def _to_yaml(document: Mapping[str, Any]) -> str:
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def _name_options(text: str) -> str:
    options = {path: option_of(field) for field, path in _POD_FIELDS.items()}
    options |= {path: option for option, path, _, _ in SPEC_OPTIONS} | _OTHER_OPTIONS
    # This option is an object, so the name of its field is part of the message.
    speculative = rf"\bspec\.{_SPECULATIVE}\.(\w+)"
    text = re.sub(speculative, lambda match: f"{options[_SPECULATIVE]} {_snake_case(match[1])}", text)
    for path in sorted(options, key=len, reverse=True):
        text = re.sub(rf"\bspec\.{re.escape(path)}(?![A-Za-z])(\.\w+|\[\d+\])*", options[path], text)
    return text


def _field_values(args: argparse.Namespace, pod_fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for _, path, _, _ in SPEC_OPTIONS:
        if (value := getattr(args, DEST_PREFIX + path)) is not None:
            yield path, value
    for field, path in _POD_FIELDS.items():
        if pod_fields.get(field):
            yield path, pod_fields[field]
    if args.speculative_config is not None:
        fields = _json_object(args.speculative_config, "--speculative-config")
        if isinstance(fields.get("model"), str):
            fields["model"] = {"source": _source(fields["model"], "--speculative-config")}
        yield _SPECULATIVE, {_camel_case(name): value for name, value in fields.items()}


def _set(spec: dict[str, Any], path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        spec = spec.setdefault(parent, {})
    spec[name] = value


def _source(text: str, option: str) -> dict[str, Any]:
    """Return the source that a text means: a folder that exists, a URL, or a repository of the hub."""
    folder = Path(text).expanduser()
    if folder.is_dir():
        return {"path": os.path.abspath(folder)}  # without "..", and with the links of the path
    try:
        source = source_from_url(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error
    if source is not None:
        return non_default_json(source)
    if text.startswith((".", "/", "~")) or _HUB_ID.fullmatch(text) is None:
        raise ConfigError(
            f"{option}: {text!r} is neither a folder nor the id of a repository on the Hugging Face hub; correct the "
            "path, or give ORGANIZATION/NAME"
        )
    return {"huggingFace": {"repo": text}}


def _adapter(text: str) -> dict[str, Any]:
    """Return the adapter of NAME=SOURCE, or of vLLM's JSON with name and path."""
    name, separator, source = text.partition("=")
    if text.startswith("{"):
        fields = _json_object(text, "--lora")
        name, source = str(fields.get("name", "")), str(fields.get("path", ""))
    elif not separator:
        source = ""
    if not name or not source:
        raise ConfigError(f"--lora: {text!r} is not NAME=SOURCE; write it as in sql=adapters/sql")
    return {"name": name, "source": _source(source, f"--lora {name}")}


def _local_rank(source: Mapping[str, Any]) -> int | None:
    """Return the LoRA rank of a local adapter; None if it cannot be read, which loading the adapter reports."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
        if "path" in source:
            config = json.loads(Path(source["path"], "adapter_config.json").read_text())
            return max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])
    return None


def _json_object(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {text!r} is not JSON: {error}; quote it for the shell") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option}: {text!r} is not a JSON object; write it in braces")
    return value


def _server_name(name: str) -> str:
    """Return the name of the model on Triton's ports, which cannot contain a slash."""
    last = name.rstrip("/").rpartition("/")[2] or "model"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-._")[:63] or "model"


def _service_name(name: str) -> str:
    """Return the name of the LLMService, which becomes a DNS name."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (label if label[:1].isalpha() else f"model-{label}")[:40].strip("-")


def _snake_case(name: str) -> str:
    return re.sub("[A-Z]", lambda match: f"_{match[0].lower()}", name)


def _camel_case(name: str) -> str:
    first, *words = name.split("_")
    return first + "".join(map(str.capitalize, words))
