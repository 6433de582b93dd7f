# SPDX-License-Identifier: Apache-2.0
"""Results of the methods that processes call from each other.

The functions of a process that implement its methods are its table of methods (server.py).
"""

from typing import Any, Literal

import msgspec

from quire_spec.constants import AdapterDigest, AdapterName
from quire_spec.documents.pod_status import CoreState, MeasuredMemory
from quire_spec.protocol.kv_wire import RowLayout
from quire_spec.protocol.messages import SchedulerStats

MAX_ROUNDING = 1e-5
"""Changes of a log probability up to this one can be caused by rounding."""


class CoreStatus(msgspec.Struct, frozen=True):
    """Result of the core's method `status`."""

    started_at: str
    memory: MeasuredMemory
    adapters: dict[AdapterDigest, str]
    """State of each registered adapter: slot, host or disk."""
    stats: SchedulerStats


class AdapterCheck(msgspec.Struct, frozen=True):
    """Result of the core's method `verify_adapter`."""

    effect: float
    """The largest change of a log probability that the adapter causes in the effect probe."""
    canary_logprob: float | None = None
    """The mean log probability of the canary's completion, if it has one."""

    @property
    def has_effect(self) -> bool:
        """Whether the adapter changes more than rounding does."""
        return self.effect > MAX_ROUNDING


class SharedRows(msgspec.Struct, frozen=True):
    """Result of the core's method `shared_rows`: host memory that holds one KV block in each row, and then one state in
    each row if layers have states."""

    pid: int
    """Process that has the memory file open."""
    file: int
    """Its descriptor of the file, in which the rows follow each other."""
    num_rows: int
    layout: RowLayout
    row_bytes: int
    """Bytes of a row in the file: the parts of the ranks of this node."""
    generation: int = 0
    """Number of the group of nodes; 0 if there is one node."""
    nodes: list[str] = []
    """On the first node: HOST:PORT of the servers of the other nodes, from node 1."""
    states_start: int = 0
    """Where the rows of states begin in the file, in bytes."""
    num_states: int = 0
    state_bytes: int = 0
    """Bytes of a row of states: the parts of all ranks."""


class UncachedPrompt(msgspec.Struct, frozen=True):
    """Result of the core's and of the text process's method `uncached_prompt`."""

    num_tokens: int
    """Number of tokens of the prompt that are not cached, on the device or in host memory."""
    compute_s: float = 0.0
    """Seconds to compute them, as measured when the core started; 0 if it was not measured."""


class KVPeerStatus(msgspec.Struct, frozen=True):
    """Result of the method `status` of the process that serves KV blocks to other pods."""

    num_connections: int = 0
    num_leases: int = 0
    num_sent_blocks: int = 0
    num_sent_bytes: int = 0
    refused: dict[str, int] = {}
    """Number of connections that were refused or closed because of an error, by reason."""


class NodeStatus(msgspec.Struct, frozen=True):
    """Result of the method `status` of the process of a node other than the first (`nnodes` of EngineConfig)."""

    state: Literal["connecting", "loading", "ready"]
    """`connecting`: the first node does not listen, or other nodes are missing. `loading`: the stages are being loaded.
    `ready`: all stages serve."""
    generation: int
    """Number of the group, or of the last one while the node is connecting."""


class TextStatus(msgspec.Struct, frozen=True):
    """Result of the text process's method `status`."""

    started_at: str
    core: bool
    """True while a core is connected."""
    num_open: int
    """Number of open requests, including queued requests."""
    num_queued: int
    """Number of open requests that no step has run yet."""
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    cores: dict[str, CoreState] = {}
    """State of each core by the name of its process. Empty if there is only one core."""


class ServedModels(msgspec.Struct, frozen=True):
    """Result of the text process's method `models`: the model names that requests can use."""

    served_name: str
    """Name of the base model."""
    adapters: list[AdapterName]
    loading: list[AdapterName]
    """Adapters that requests can name as soon as they are loaded."""
    max_model_len: int
    sampling_defaults: dict[str, Any]
    """Sampling parameters in the checkpoint's generation_config.json."""
    closed_reason: str
    """Reason why requests are rejected at the moment; empty while requests are accepted."""
    has_thinking_budget: bool = False
    """Whether requests can set thinking_token_budget."""
    pooling_task: str = ""
    """What the model returns for requests with `pooling`: embed, classify or token_classify; empty if it only
    generates."""
    labels: list[str] = []
    """Names of the classes of a classifier."""
    has_step_token: bool = False
    """Whether only some tokens have a vector, of as many numbers as there are labels."""
    has_score_template: bool = False
    """Whether the chat template has the roles query and document."""
    joins_pairs: bool = False
    """Whether the tokenizer joins the texts of a pair, because the model is an encoder."""


class Tokenized(msgspec.Struct, frozen=True):
    """Result of the text process's method `tokenize`."""

    tokens: list[int]
    token_strs: list[str] | None
    """The text of each token, if the call requests it."""
    max_model_len: int
