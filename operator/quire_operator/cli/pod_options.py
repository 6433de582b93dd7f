# SPDX-License-Identifier: Apache-2.0
"""Options of `quire serve` that set a field of pod.json.

Each row of the table names the field, so that an option needs no other code. Called by main.py and serve.py.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from quire_operator.cli.options import (
    OTHER_NAMES,
    parse_count,
    parse_count_or_zero,
    parse_file,
    parse_folder,
    parse_gib,
    parse_port,
    parse_port_or_zero,
)
from quire_spec import constants
from quire_spec.documents.server_arguments import ALLOWED
from quire_spec.model import capabilities

_DEST_PREFIX = "pod."
KV_EVENTS_FIELD = "engine.kv_events_config"
"""The value of its option is a port."""
KV_TRANSFER_KEY_FIELD = "engine.kv_transfer.key_file"
LOAD_FORMAT_FIELD = "engine.load_format"
KV_EVENTS_TOPIC_FIELD = f"{KV_EVENTS_FIELD}.topic"


def _parse_protocols(text: str) -> tuple[str, ...]:
    protocols = () if text == "none" else tuple(text.split(","))
    if protocols not in ((), ("http",), ("grpc",), constants.SERVER_PROTOCOLS):
        raise argparse.ArgumentTypeError(f"{text!r} names no protocols; give http, grpc, http,grpc or none")
    return protocols


def _parse_limits(text: str) -> dict[str, int]:
    try:
        limits = json.loads(text)
    except ValueError:
        limits = None
    if not isinstance(limits, dict) or not all(type(limit) is int for limit in limits.values()):
        raise argparse.ArgumentTypeError(f"""{text!r} is not an object of numbers; give '{{"image": 4}}'""")
    return limits


def _repository(text: str) -> Path:
    return Path(text).absolute()


_FLAG: dict[str, Any] = {"action": "store_const", "const": True}
_TOOL_CALLS, _REASONING = ", ".join(capabilities.TOOL_CALL_PARSERS), ", ".join(capabilities.REASONING_PARSERS)

_OPTIONS: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("--host", "host", {"metavar": "HOST"}, "address to listen on (default: 127.0.0.1, this machine)"),
    *(
        (
            f"--{name}-port",
            f"ports.{name}",
            {"type": parse_port, "metavar": "PORT"},
            f"{purpose} (default: spec.runtime.ports.{name})",
        )
        for name, purpose in (
            ("http", "requests over HTTP"),
            ("grpc", "requests over gRPC"),
            ("metrics", "metrics of Triton Inference Server"),
            ("health", "health, all metrics, status"),
        )
    ),
    (
        "--expose",
        "server.expose",
        {"type": _parse_protocols, "metavar": "PROTOCOLS"},
        "protocols that clients can use: http, grpc, both (http,grpc), or none; the server accepts other protocols "
        "only on loopback (default: spec.runtime.expose, otherwise both)",
    ),
    (
        "--model-repository",
        "server.modelRepository",
        {"type": _repository, "metavar": "DIR"},
        "folder with other Triton models that the server also serves; the code of these models runs as your user "
        "(default: spec.runtime.models)",
    ),
    (
        "--server-arg",
        "server.serverArgs",
        {"action": "append", "metavar": "NAME=VALUE"},
        f"argument of Triton Inference Server; can be repeated; replaces spec.runtime.serverArgs; allowed: "
        f"{', '.join(ALLOWED)}",
    ),
    (
        "--openai-port",
        "openai.port",
        {"type": parse_port_or_zero, "metavar": "PORT"},
        f"port of the OpenAI API; 0: not served (default: spec.openai.port, else {constants.OPENAI_PORT})",
    ),
    (
        "--openai-api-keys-dir",
        "openai.apiKeysDir",
        {"type": parse_folder, "metavar": "DIR"},
        "folder in which each file contains an API key; metrics show the names of the files (default: the Secret of "
        "spec.openai.apiKeysSecretRef; without it, no key is needed)",
    ),
    (
        "--openai-ssl-certfile",
        "openai.sslCertfile",
        {"type": parse_file, "metavar": "FILE"},
        "certificate chain of the OpenAI API, which is then served over TLS",
    ),
    (
        "--openai-ssl-keyfile",
        "openai.sslKeyfile",
        {"type": parse_file, "metavar": "FILE"},
        "private key of the certificate (default: in the certificate file)",
    ),
    (
        "--openai-api-server-count",
        "openai.apiServerCount",
        {"type": parse_count, "metavar": "N"},
        "number of processes that share the port of the OpenAI API (default: spec.openai.apiServerCount, otherwise 1)",
    ),
    (
        "--reject-unknown-fields",
        "openai.rejectUnknownFields",
        _FLAG,
        "reject requests of the OpenAI API that have a field that the server does not know (default: "
        "spec.openai.rejectUnknownFields; otherwise, such fields are ignored)",
    ),
    ("--openai-enable-log-requests", "openai.enableLogRequests", _FLAG, "log each request of the OpenAI API"),
    (
        "--admin-key-file",
        "adminKeyFile",
        {"type": parse_file, "metavar": "FILE"},
        "file with the key that clients must send to read the status and to change adapters (default: no key is "
        "needed, but only clients on this machine are accepted)",
    ),
    (
        "--allow-runtime-lora-updating",
        "openai.allowRuntimeLoraUpdating",
        _FLAG,
        "allow clients that have the admin key to load and unload adapters through the OpenAI API",
    ),
    (
        "--allowed-local-lora-path",
        "openai.allowedLocalLoraPaths",
        {"type": parse_folder, "action": "append", "metavar": "DIR"},
        "local folder from which the OpenAI API can load adapters; can be repeated (default: none; adapters can be "
        "loaded only from the hub, HTTP and S3)",
    ),
    (
        "--lora-experts",
        "engine.lora_experts",
        _FLAG,
        "accept adapters that change experts, and reserve memory for them in every adapter slot (default: "
        "spec.lora.experts, otherwise not)",
    ),
    (
        "--lora-modules-to-save",
        "engine.lora_modules_to_save",
        _FLAG,
        "accept adapters with a whole embedding or output projection, and reserve memory for both in every adapter "
        "slot (default: spec.lora.modulesToSave, otherwise not)",
    ),
    (
        "--data-parallel-size",
        "engine.data_parallel_size",
        {"type": parse_count, "metavar": "N"},
        "number of cores, copies of the model that serve one queue; each uses its own GPUs, and on a CPU they share "
        "the CPU cores (default: spec.engine.dataParallelSize, otherwise 1)",
    ),
    (
        "--pipeline-parallel-size",
        "engine.pipeline_parallel_size",
        {"type": parse_count, "metavar": "N"},
        "number of pipeline stages, each with its own part of the layers; each uses its own GPUs, and on a CPU they "
        "share the CPU cores (default: spec.engine.pipelineParallelSize, otherwise 1)",
    ),
    (
        "--pipeline-micro-batches",
        "engine.pipeline_micro_batches",
        {"type": parse_count, "metavar": "N"},
        "number of steps that are in flight with pipeline stages; 1 turns this off (default: one for each stage)",
    ),
    (
        "--nnodes",
        "engine.nnodes",
        {"type": parse_count, "metavar": "N"},
        "number of machines, each with an equal number of pipeline stages; run the same command on all of them, with "
        "another --node-rank (default: 1)",
    ),
    (
        "--master-addr",
        "engine.master_addr",
        {"metavar": "HOST"},
        "name or address of the machine with --node-rank 0, at which the others reach it",
    ),
    (
        "--master-port",
        "engine.rank_port",
        {"type": parse_port, "metavar": "PORT"},
        "port of that machine for the others; the next port is used, too, and between the machines also others that "
        f"the system chooses (default: {constants.RANK_PORT})",
    ),
    (
        "--rank-key-file",
        "engine.rank_key_file",
        {"type": parse_file, "metavar": "FILE"},
        "file with the key that all these machines share",
    ),
    (
        "--language-model-only",
        "engine.language_model_only",
        _FLAG,
        "serve a model that reads images without its vision tower (default: spec.engine.languageModelOnly, otherwise "
        "not)",
    ),
    (
        "--limit-mm-per-prompt",
        "engine.limit_mm_per_prompt",
        {"type": _parse_limits, "metavar": "JSON"},
        """maximum number of images of a prompt, as '{"image": 4}' (default: spec.engine.limitMmPerPrompt, otherwise """
        "8)",
    ),
    (
        "--allowed-media-domain",
        "openai.allowedMediaDomains",
        {"action": "append", "metavar": "HOST"},
        "host from which images are fetched over HTTPS if a request names their URL; can be repeated (default: "
        "spec.openai.allowedMediaDomains, otherwise none)",
    ),
    (
        "--load-format",
        LOAD_FORMAT_FIELD,
        {"choices": capabilities.LOAD_FORMATS, "metavar": "NAME"},
        "reader of the weights: safetensors, or runai_streamer, which is Model Streamer; it reads the weights of an "
        "s3:// source from the bucket, without a copy on the disk (default: spec.engine.loadFormat, otherwise auto, "
        "which is safetensors)",
    ),
    (
        "--model-impl",
        "engine.model_impl",
        {"choices": capabilities.MODEL_IMPLS, "metavar": "NAME"},
        "classes that compute the model: quire, transformers or auto, which prefers those of Quire (default: "
        "spec.engine.modelImpl, otherwise auto)",
    ),
    (
        "--convert",
        "engine.convert",
        {"choices": capabilities.CONVERSIONS, "metavar": "NAME"},
        "what the model returns besides text: embed, classify or none (default: spec.engine.convert, otherwise the "
        "checkpoint decides)",
    ),
    (
        "--pooling-type",
        "engine.pooling_type",
        {"choices": capabilities.POOLING_TYPES, "metavar": "NAME"},
        "hidden states that an embedding is made of: last, mean or cls (default: spec.engine.poolingType, otherwise "
        "the checkpoint decides)",
    ),
    (
        "--chat-template",
        "engine.chat_template",
        {"type": parse_file, "metavar": "FILE"},
        "chat template to use instead of the one in the checkpoint",
    ),
    (
        "--otlp-traces-endpoint",
        "engine.otlp_traces_endpoint",
        {"metavar": "URL"},
        "send spans of requests there by OTLP: http://HOST:4317 for gRPC, or http://HOST:4318/v1/traces for HTTP "
        "(default: spec.observability.tracing.endpoint, otherwise requests are not traced)",
    ),
    (
        "--tool-call-parser",
        "engine.tool_call_parser",
        {"choices": ("auto", "none", *capabilities.TOOL_CALL_PARSERS), "metavar": "NAME"},
        f"format of tool calls in outputs: {_TOOL_CALLS}, none (default: detected from the chat template)",
    ),
    (
        "--reasoning-parser",
        "engine.reasoning_parser",
        {"choices": ("auto", "none", *capabilities.REASONING_PARSERS), "metavar": "NAME"},
        f"format of reasoning in outputs: {_REASONING}, none (default: detected from the chat template)",
    ),
    (
        "--kv-offloading-size",
        "engine.kv_offloading_size",
        {"type": parse_gib, "metavar": "GIB"},
        "host memory in GiB that caches KV blocks of repeated prompts (default: "
        "spec.engine.kvCacheOffloading.memory, otherwise none)",
    ),
    (
        "--kv-offloading-folder",
        "engine.kv_offloading_folder",
        {"type": lambda text: str(Path(text).absolute()), "metavar": "DIR"},
        "folder that keeps these KV blocks in files, also after a restart (default: "
        "spec.engine.kvCacheOffloading.secondary, otherwise none)",
    ),
    (
        "--kv-offloading-folder-size",
        "engine.kv_offloading_folder_size",
        {"type": parse_gib, "metavar": "GIB"},
        "maximum size in GiB of all files in that folder (default: spec.engine.kvCacheOffloading.secondary[0].size, "
        "otherwise half of the space that is free at startup)",
    ),
    (
        "--kv-transfer-port",
        "engine.kv_transfer.port",
        {"type": parse_port, "metavar": "PORT"},
        "serve KV blocks of the host memory to other servers of the same model on this port; needs "
        "--kv-offloading-size and --kv-transfer-key-file (default: spec.engine.kvTransfer.port, otherwise none are "
        "served)",
    ),
    (
        "--kv-transfer-key-file",
        KV_TRANSFER_KEY_FIELD,
        {"type": parse_file, "metavar": "FILE"},
        "file with the key that all these servers share; without it, spec.engine.kvTransfer has no effect",
    ),
    (
        "--kv-transfer-peers",
        "engine.kv_transfer.allowed_peers",
        {"type": lambda text: tuple(filter(None, text.split(","))), "metavar": "HOST:PORT,..."},
        "servers that a request may name in the header x-kv-cache-source-host-port, to read their KV blocks, and in "
        "the header x-prefiller-host-port, with the port of their OpenAI API, to have them compute the prompt; "
        "NETWORK:PORT such as 10.0.0.0/8:8005 is possible (default: spec.engine.kvTransfer.allowedPeers, otherwise "
        "none)",
    ),
    (
        "--kv-transfer-bytes-per-second",
        "engine.kv_transfer.bytes_per_second",
        {"type": parse_count, "metavar": "N"},
        "maximum number of bytes of KV blocks that are sent in a second (default: "
        "spec.engine.kvTransfer.bytesPerSecond, otherwise no limit)",
    ),
    (
        "--prefill-local-tokens",
        "engine.prefill_local_tokens",
        {"type": parse_count_or_zero, "metavar": "N"},
        "compute a prompt of which at most N tokens are not cached, even if its request names another server for it "
        "(default: 512)",
    ),
    (
        "--kv-recompute-threshold",
        "engine.kv_recompute_threshold",
        {"type": parse_count_or_zero, "metavar": "N"},
        "read no KV blocks of other servers if fewer than N tokens of a prompt are not cached; 0: read them even if "
        "computing takes less time (default: 64)",
    ),
    (
        "--kv-load-failure-policy",
        "engine.kv_load_failure_policy",
        {"choices": capabilities.KV_LOAD_FAILURE_POLICIES, "metavar": "NAME"},
        "if another server should compute a prompt, and its KV blocks cannot be read: recompute computes the prompt, "
        "fail ends the request with status 503 (default: recompute)",
    ),
    (
        "--kv-events-port",
        KV_EVENTS_FIELD,
        {"type": parse_port, "metavar": "PORT"},
        "publish KV events for routers on this port, and replay them on the next one; with N cores, on the next N "
        "ports each; they contain the token ids of all requests, and need no key (default: spec.networking.kvEvents, "
        "otherwise none)",
    ),
    (
        "--kv-events-topic",
        KV_EVENTS_TOPIC_FIELD,
        {"metavar": "TOPIC"},
        "topic of the KV events (default: kv@MACHINE@MODEL; vllm-router accepts only the empty topic, '')",
    ),
    ("--verbose", "server.verbose", _FLAG, "also print the engine's configuration and the server's log"),
)
"""The option, the path of its field in pod.json, other arguments of argparse, and the help text."""

_OPTION_BY_FIELD = {field: option for option, field, _, _ in _OPTIONS}


def add_pod_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser. An option that is not given has the value None."""
    for option, field, arguments, text in _OPTIONS:
        parser.add_argument(*OTHER_NAMES.get(option, ()), option, dest=_DEST_PREFIX + field, help=text, **arguments)


def pod_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the options that were given, by the path of their field."""
    values = {dest: value for dest, value in vars(args).items() if dest.startswith(_DEST_PREFIX)}
    return {dest.removeprefix(_DEST_PREFIX): value for dest, value in values.items() if value is not None}


def option_of(field: str) -> str:
    """Return the option that sets a field."""
    return _OPTION_BY_FIELD[field]


def name_options(message: str) -> str:
    """Return an error message about pod.json in which the fields are replaced by the options that set them."""
    message = re.sub(rf"{KV_EVENTS_FIELD}\.\w*endpoint", KV_EVENTS_FIELD, message)
    # The engine names its own fields without a path. Their names contain an underscore, as no other word does.
    return re.sub(
        r"\w+(\.\w+)+|adminKeyFile|[a-z]+(_[a-z]+)+",
        lambda match: _OPTION_BY_FIELD.get(match[0]) or _OPTION_BY_FIELD.get(f"engine.{match[0]}", match[0]),
        message,
    )
