# SPDX-License-Identifier: Apache-2.0
"""The text report of `quire plan`. It shows the memory as a bar and a table, the settings with their reasons, and the
advice.

The functions are pure. The caller passes the width of the terminal, and whether to use color. It receives the lines of
the report. Called by cli/plan.py.
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire_operator.api.llmservice import LLMService
from quire_operator.plan.break_even import BreakEven
from quire_operator.plan.checkpoint import CheckpointInfo, SizeSource
from quire_operator.plan.device_memory import GIB
from quire_operator.plan.draft_info import DraftInfo
from quire_operator.plan.gpu import MemorySource
from quire_operator.plan.plan import FitReason, Plan, PlannedValue
from quire_spec.model import batch_invariance

MIN_WIDTH, MAX_WIDTH = 60, 120
_RESET = "\x1b[0m"
_MEMORY_SOURCE_TEXT = {
    MemorySource.SPEC: "from the spec",
    MemorySource.NODE_LABELS: "from the nodes' labels",
    MemorySource.PRODUCT_TABLE: "from the table of products",
}
_SETTINGS = (
    "tensorParallelSize", "gpuMemoryUtilization", "kvCacheMemory", "maxModelLen", "maxNumSeqs", "maxNumBatchedTokens",
    "blockSize", "dtype",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One use of memory. It is a row of the table and a segment of the bar."""

    symbol: str
    """The segment of the bar is drawn with this character."""
    color: str
    name: str
    size: int
    note: str = ""


def render_lines(
    service: LLMService,
    model: CheckpointInfo,
    plan: Plan,
    width: int,
    use_color: bool,
    draft: DraftInfo | None = None,
    num_stages: int = 1,
    num_nodes: int = 1,
) -> Iterator[str]:
    """Yield the lines of the report. A line has at most `width` columns, unless it contains a longer word.

    With `use_color`, the bar contains ANSI escapes.
    """
    width = max(MIN_WIDTH, min(width, MAX_WIDTH))
    if not service.roles:
        yield from _wrap(_headline(service, plan, num_nodes), width)
    weights = f"{model.weights_bytes / GIB:.2f} GiB of weights, {_size_source_text(model)}"
    yield from _wrap(f"model: {model.shape.architecture}, {weights}", width)
    if draft is not None:
        yield from _wrap(f"draft model: {_describe_draft(draft)}", width)
    yield from _wrap(_describe_invariance(model, plan), width)
    if num_stages > 1:
        places = f", each in a pod on a node of its own ({num_nodes} pods for a replica)" if num_nodes > 1 else ""
        text = f"{num_stages} pipeline stages{places}; the memory is that of the one with the fewest KV tokens"
        yield from _wrap(text, width)
    if model.shape.encoder is not None:
        yield from _wrap(
            "KV cache: none, because an encoder computes each request in one step and keeps nothing", width
        )
    if service.kv_transfer is not None:
        yield from _wrap(_break_even_text(model, plan), width)
    for pods in service.pods:
        yield ""
        if pods.role is not None:
            yield from _wrap(_headline(pods, plan.for_role(pods.role), num_nodes), width)
        yield from _pod_lines(pods, plan.for_role(pods.role), width, use_color)


def _pod_lines(service: LLMService, plan: Plan, width: int, use_color: bool) -> Iterator[str]:
    """Yield the part of the report about the pods of a service, or of one of its roles."""
    rows = _host_rows(service, plan) if plan.gpu is None else _gpu_rows(service, plan)
    title = "memory of the pod" if plan.gpu is None else "memory of each GPU"
    yield memory_bar(rows, width, use_color)
    yield from _table(title, rows, width)
    if plan.gpu is not None:
        yield ""
        yield from _table("host memory of the pod", _host_rows(service, plan), width)
    if text := _kv_folder_text(service):
        yield from _wrap(text, width)
    yield ""
    yield from _settings(plan, width)
    yield ""
    yield from _wrap(_fit_text(plan), width)


def memory_bar(rows: Sequence[MemoryRow], width: int, use_color: bool) -> str:
    """Return a bar of `width` columns. Each row has a segment in the bar. The length of the segment is in proportion to
    the size of the row.

    If the size of a row is not 0, its segment has at least one column.
    """
    bar_width = width - 2
    end_columns, total, cumulative = [], sum(row.size for row in rows) or 1, 0
    for row in rows:
        cumulative += row.size
        end_columns.append(round(cumulative * bar_width / total))
    text, start = "", 0
    for i, (row, end) in enumerate(zip(rows, end_columns, strict=True)):
        num_later = sum(later_row.size > 0 for later_row in rows[i + 1 :])
        end_column = min(max(end, start + (row.size > 0)), bar_width - num_later)
        segment = row.symbol * (end_column - start)
        text += f"\x1b[{row.color}m{segment}{_RESET}" if use_color and segment else segment
        start = end_column
    return f"[{text}]"


def _headline(service: LLMService, plan: Plan, num_nodes: int) -> str:
    name = service.name if service.role is None else f"{service.name}, {service.spec.replicas} x role {service.role}"
    if plan.gpu is None:
        return f"{name}: on a CPU" if num_nodes == 1 else f"{name}: on the CPUs of {num_nodes} nodes"
    place = "replica" if num_nodes == 1 else f"of the {num_nodes} nodes of a replica"
    size = f"{plan.gpu.visibleMiB / 1024:.2f} GiB of CUDA memory each, {_MEMORY_SOURCE_TEXT[plan.gpu.memory_source]}"
    return f"{name}: {plan.gpu.count} x {plan.gpu.product or 'GPU'} for each {place} ({size})"


def _kv_folder_text(service: LLMService) -> str:
    tier = service.kv_tier
    if tier is None:
        return ""
    place = "an emptyDir of each pod" if tier.folder.pvc is None else f"claim {tier.folder.pvc.claimName}"
    return f"KV blocks in files: at most {tier.size} on {place}"


def _break_even_text(model: CheckpointInfo, plan: Plan) -> str:
    if (estimate := BreakEven.estimate(model.shape, plan)) is None:
        return "KV peers: the speed of this processor is not known; the engine measures when reading blocks is faster"
    return (
        f"KV peers: reading blocks takes less time than computing them above {estimate.bits_per_s / 1e9:.1f} Gbit/s "
        f"between pods, if a pod computes {estimate.tokens_per_s / 1000:.1f} thousand prompt tokens/s (half of the "
        f"peak of its GPUs), with {estimate.bytes_per_token / 1024:.0f} KiB a token"
    )


def _describe_draft(draft: DraftInfo) -> str:
    origin = "from spec.engine.speculativeConfig"
    if draft.checkpoint is None:
        return f"{draft.method}, {draft.num_elements / 1e6:.1f} million weights, {origin}"
    size = f"{draft.checkpoint.weights_bytes / GIB:.2f} GiB of weights, {_size_source_text(draft.checkpoint)}"
    return f"{draft.checkpoint.shape.architecture}, {size}, {origin}"


def _describe_invariance(model: CheckpointInfo, plan: Plan) -> str:
    """Say whether outputs depend on what else is served. The processor is not known, so it is assumed to have the
    compiled kernels."""
    dtype = model.dtype if plan.dtype.value == "auto" else plan.dtype.value
    device, num_ranks = "cpu" if plan.gpu is None else "cuda", plan.tensorParallelSize.value
    reason = batch_invariance.variance_reason(model.shape, device, dtype, num_ranks)
    return batch_invariance.describe(reason) + ("" if reason else ", on an x86 processor with AVX2 and without AMX")


def _size_source_text(model: CheckpointInfo) -> str:
    if model.size_source is SizeSource.SHAPE:
        return "estimated from config.json alone"
    return f"from the {model.size_source.value}"


def _gpu_rows(service: LLMService, plan: Plan) -> list[MemoryRow]:
    return [
        *_model_rows(service, plan),
        MemoryRow(".", "0", "unused", plan.bytes.reserve, "CUDA graphs, the server, fragmentation"),
    ]


def _model_rows(service: LLMService, plan: Plan) -> list[MemoryRow]:
    sizes, lora = plan.bytes, service.spec.lora
    parts = (lora.experts, ", with experts"), (lora.modulesToSave, ", with whole embeddings and output projections")
    extras = "".join(text for is_set, text in parts if is_set)
    lora_note = f"{lora.maxLoaded} slots, {lora.total_rank} pages of one LoRA rank{extras}"
    kv_note = f"{plan.kvTokens} tokens, {plan.concurrency:.1f} requests of {plan.maxModelLen.value}"
    return [
        MemoryRow("W", "44", "weights", sizes.weights),
        MemoryRow("d", "106", "draft model", sizes.draft, "without its KV cache, which is part of the KV cache below"),
        MemoryRow("s", "45", "step", sizes.activations, f"up to {plan.maxNumBatchedTokens.value} tokens in a step"),
        MemoryRow("t", "103", "states", sizes.states, f"of {plan.maxNumSeqs.value} sequences, and their snapshots"),
        MemoryRow("o", "100", "other libraries", sizes.nonTorch),
        MemoryRow("A", "43", "adapters", sizes.lora, lora_note),
        MemoryRow("K", "42", "KV cache", sizes.kv, kv_note),
    ]


def _host_rows(service: LLMService, plan: Plan) -> list[MemoryRow]:
    host = plan.hostBytes
    return [
        *(_model_rows(service, plan) if plan.gpu is None else []),
        MemoryRow("c", "46", "adapter copies", host.loraCopies),
        MemoryRow("S", "104", "swap space", host.swap, "KV blocks of preempted requests"),
        MemoryRow("O", "105", "KV offloading", host.kvOffloading, "KV blocks of repeated prompts"),
        MemoryRow("p", "100", "processes", host.processes),
        MemoryRow("m", "47", "models' processes", host.stubs, "one for each model name"),
        MemoryRow("h", "41", "shared memory", host.sharedMemory, f"at most {plan.sharedMemory.value}"),
        MemoryRow(".", "0", "unused", max(0, host.total - host.required)),
    ]


def _table(title: str, rows: Sequence[MemoryRow], width: int) -> Iterator[str]:
    yield f"{title:<22} {'GiB':>8}"
    for row in rows:
        if row.size:
            yield from _hanging_indent(f"{row.symbol} {row.name:<20} {row.size / GIB:>8.2f}  ", row.note, width)
    yield f"  {'total':<20} {sum(row.size for row in rows) / GIB:>8.2f}"


def _settings(plan: Plan, width: int) -> Iterator[str]:
    yield f"{'setting':<21} {'value':>9}  {'from':<9} why"
    for name in _SETTINGS:
        planned_value: PlannedValue[int] | PlannedValue[str] | None = getattr(plan, name)
        if planned_value is not None:
            prefix = f"{name:<21} {planned_value.value:>9}  {planned_value.origin.value:<9} "
            yield from _hanging_indent(prefix, planned_value.why, width)


def _fit_text(plan: Plan) -> str:
    if plan.fit is FitReason.FITS:
        return f"It fits. {plan.advice}".rstrip()
    return f"It fits, but {plan.fit.value}: {plan.advice}"


def _hanging_indent(prefix: str, text: str, width: int) -> Iterator[str]:
    """Wrap `text` into a column to the right of `prefix`, and yield the lines."""
    first, *continuation_lines = textwrap.wrap(text, width - len(prefix)) or [""]
    yield f"{prefix}{first}".rstrip()
    yield from (" " * len(prefix) + line for line in continuation_lines)


def _wrap(text: str, width: int) -> Iterator[str]:
    yield from textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
