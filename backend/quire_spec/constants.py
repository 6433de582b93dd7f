# SPDX-License-Identifier: Apache-2.0
"""Constants that more than one package uses: ports, file names, tensor names, the pattern of a model name."""

import re
from typing import NewType

from quire_spec.errors import InvalidArgument

AdapterName = NewType("AdapterName", str)
"""Alias of an adapter. Clients use the alias, which can point to new content at any time."""
AdapterDigest = NewType("AdapterDigest", str)
"""Identity of an adapter: `sha256:` and the 64 hex digits of the hash of its content."""

SERVER_PROTOCOLS = ("http", "grpc")
"""Protocols of Triton Inference Server that can be exposed outside the pod."""
HTTP_PORT = 8000
GRPC_PORT = 8001
SERVER_METRICS_PORT = 8002
HEALTH_PORT = 8003
"""Port of the supervisor. It serves the probes, the metrics, the status and the admin API."""
OPENAI_PORT = 8004
RANK_PORT = 8007
"""Port of the first of several nodes, for the others. The next port is that of the store by which the ranks meet."""

CONFIG_FILE = "pod.json"
ENGINE_FILE = "engine.json"
CATALOG_FILE = "adapters.json"

CORE_SOCKET = "core.sock"
TEXT_SOCKET = "text.sock"
SUPERVISOR_SOCKET = "supervisor.sock"
KV_PEER = "kv_peer"
"""Name of the process that serves KV blocks to other pods."""
NODE = "node"
"""Name of the process that joins the group on a node other than the first."""
MAX_OPENAI_FRONTS = 16
"""Maximum number of processes of the OpenAI front in a pod."""
CLOSING_FILE = "closing"
"""Name of a file. While the pod is about to stop, the run folder contains this file. When the file exists, the OpenAI
front, the health port and the server's HTTP port end each connection after its next response, so that the clients
connect to other pods. The gRPC connections end by their age (GRPC_CONNECTION_AGE_S)."""
GRPC_CONNECTION_AGE_S = 5
"""The server ends each gRPC connection about this many seconds after it was opened. Open calls run to completion. gRPC
varies the time by 10 %. A pod that is about to stop still serves for longer than that (pod_template.PROPAGATION_S)."""
CACHE_SALT_SECRET_FILE = "cache-salt-secret"
"""Name of a file in the run folder. It contains the secret of the cache salts if no admin key is configured."""
MAX_SOCKET_PATH = 107
"""Maximum length of a Unix socket's path in bytes. sockaddr_un on Linux has no room for a longer path."""

EXIT_CONFIG = 2
"""A process exits with this code if its configuration is invalid. A restart would fail again."""

API_GROUP = "quire.dev"
API_VERSION = "v1alpha1"
KIND = "LLMService"

MAX_MODEL_NAME = 63
MODEL_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?")
"""Pattern of servedName and of adapter names. A name that matches is valid in the server's URLs and as a Kubernetes
label value."""

MAX_EXPOSED_ADAPTERS = 64
"""By default, at most this number of adapters have their own server model. Each server model of an adapter needs a stub
process of about 22 MiB."""

# Names of the tensors of the model interface. The tensors of NVIDIA's vllm_backend come first, then Quire's own.
TEXT_INPUT = "text_input"
STREAM = "stream"
SAMPLING_PARAMETERS = "sampling_parameters"
EXCLUDE_INPUT_IN_OUTPUT = "exclude_input_in_output"
RETURN_FINISH_REASON = "return_finish_reason"
RETURN_CUMULATIVE_LOGPROB = "return_cumulative_logprob"
RETURN_LOGPROBS = "return_logprobs"
RETURN_NUM_INPUT_TOKENS = "return_num_input_tokens"
RETURN_NUM_OUTPUT_TOKENS = "return_num_output_tokens"
EMBEDDING_REQUEST = "embedding_request"
IMAGE = "image"
INPUT_IDS = "input_ids"
RETURN_OUTPUT_IDS = "return_output_ids"
RETURN_PROMPT_LOGPROBS = "return_prompt_logprobs"

TEXT_OUTPUT = "text_output"
FINISH_REASON = "finish_reason"
CUMULATIVE_LOGPROB = "cumulative_logprob"
LOGPROBS = "logprobs"
NUM_INPUT_TOKENS = "num_input_tokens"
NUM_OUTPUT_TOKENS = "num_output_tokens"
OUTPUT_IDS = "output_ids"
PROMPT_LOGPROBS = "prompt_logprobs"

LORA_NAME = "lora_name"
MAX_IMAGE_BYTES = 16 * 2**20
"""Maximum size of an image file of a request."""
TRACE_HEADER = "traceparent"
"""Header of W3C Trace Context. Triton Inference Server forwards it over gRPC if requests are traced. Its generate
routes forward no headers, so that clients put it into the body."""


def core_names(data_parallel_size: int) -> tuple[str, ...]:
    """Return the names of the core processes of a pod."""
    return ("core",) if data_parallel_size == 1 else tuple(f"core-{i}" for i in range(data_parallel_size))


def core_index(name: str) -> int:
    """Return the index of a core process, which is its data-parallel rank."""
    return int(name.removeprefix("core").removeprefix("-") or 0)


def process_socket(name: str) -> str:
    """Return the name of the socket of the text process or of a core process."""
    return f"{name}.sock"


def openai_probe_socket(index: int) -> str:
    """Return the name of the socket on which OpenAI front `index` answers probes."""
    return f"openai-{index}.sock"


def check_model_name(name: str, field_path: str) -> None:
    """Reject a model name that the server or Kubernetes does not accept.

    Raises:
        InvalidArgument: the name is empty, too long, or has a character outside `[A-Za-z0-9._-]`.
    """
    if not MODEL_NAME.fullmatch(name) or len(name) > MAX_MODEL_NAME:
        raise InvalidArgument(
            f"{field_path}: {name!r} is not a model name; use at most {MAX_MODEL_NAME} letters, digits, '-', '_' and "
            "'.', starting and ending with a letter or digit"
        )
