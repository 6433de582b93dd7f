# SPDX-License-Identifier: Apache-2.0
"""A plan for people: memory as a bar and a table, the settings with their reasons, and what is worth changing.

Pure: a width and whether colours are wanted come in, lines go out.
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire_operator.plan.checkpoint import Checkpoint, SizeFrom
from quire_operator.plan.gpu import KnownFrom
from quire_operator.plan.memory import GIB
from quire_operator.plan.plan import Fit, Plan, Planned
from quire_operator.service import LLMService

MIN_WIDTH, MAX_WIDTH = 60, 120
_RESET = "\x1b[0m"
_FROM = {
    KnownFrom.SPEC: "from the spec",
    KnownFrom.NODE_LABELS: "from the nodes' labels",
    KnownFrom.PRODUCT_TABLE: "from the table of products",
}
_SETTINGS = (
    "tensorParallelSize", "gpuMemoryUtilization", "kvCacheMemory", "maxModelLen", "maxNumSeqs", "maxNumBatchedTokens",
    "blockSize", "dtype",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """A purpose of memory: a row of the table, and a stretch of the bar."""

    letter: str
    """What the bar is drawn with."""
    colour: str
    name: str
    size: int
    note: str = ""


def lines(service: LLMService, model: Checkpoint, plan: Plan, width: int, colours: bool) -> Iterator[str]:
    """The report, in lines of at most `width` columns where words allow; `colours`: ANSI escapes in the bar."""
    width = max(MIN_WIDTH, min(width, MAX_WIDTH))
    yield from _wrapped(_headline(service, plan), width)
    weights = f"{model.weights_bytes / GIB:.2f} GiB of weights, {_known(model)}"
    yield from _wrapped(f"model: {model.shape.architecture}, {weights}", width)
    yield ""
    parts = _host_parts(plan) if plan.gpu is None else _gpu_parts(service, plan)
    title = "memory of the pod" if plan.gpu is None else "memory of each GPU"
    yield bar(parts, width, colours)
    yield from _table(title, parts, width)
    if plan.gpu is not None:
        yield ""
        yield from _table("host memory of the pod", _host_parts(plan), width)
    yield ""
    yield from _settings(plan, width)
    yield ""
    yield from _wrapped(_verdict(plan), width)


def bar(parts: Sequence[Part], width: int, colours: bool) -> str:
    """One line of `width` columns in which each part has its share; a part that is there has a column at least."""
    room = width - 2
    ends, total, reached = [], sum(part.size for part in parts) or 1, 0
    for part in parts:
        reached += part.size
        ends.append(round(reached * room / total))
    text, start = "", 0
    for i, (part, end) in enumerate(zip(parts, ends, strict=True)):
        later = sum(other.size > 0 for other in parts[i + 1 :])
        stop = min(max(end, start + (part.size > 0)), room - later)
        piece = part.letter * (stop - start)
        text += f"\x1b[{part.colour}m{piece}{_RESET}" if colours and piece else piece
        start = stop
    return f"[{text}]"


def _headline(service: LLMService, plan: Plan) -> str:
    if plan.gpu is None:
        return f"{service.name}: on a CPU"
    size = f"{plan.gpu.visibleMiB / 1024:.2f} GiB each that CUDA gives out, {_FROM[plan.gpu.known_from]}"
    return f"{service.name}: {plan.gpu.count} x {plan.gpu.product or 'GPU'} for each replica ({size})"


def _known(model: Checkpoint) -> str:
    if model.size_from is SizeFrom.SHAPE:
        return "estimated from config.json alone"
    return f"from the {model.size_from.value}"


def _gpu_parts(service: LLMService, plan: Plan) -> list[Part]:
    lora, sizes = service.spec.lora, plan.bytes
    slots = f"{lora.maxLoaded} slots of rank {lora.maxRank}" if lora.maxLoaded else "none: spec.lora.maxLoaded is 0"
    return [
        Part("W", "44", "weights", sizes.weights),
        Part("s", "45", "step", sizes.activations, f"up to {plan.maxNumBatchedTokens.value} tokens at once"),
        Part("o", "100", "other libraries", sizes.nonTorch),
        Part("A", "43", "adapters", sizes.lora, slots),
        Part("K", "42", "KV cache", sizes.kv, _kv_note(plan)),
        Part(".", "0", "left free", sizes.reserve, "CUDA graphs, the server, fragments"),
    ]


def _host_parts(plan: Plan) -> list[Part]:
    host, sizes = plan.hostBytes, plan.bytes
    model = []
    if plan.gpu is None:
        model = [
            Part("W", "44", "weights", sizes.weights),
            Part("s", "45", "step", sizes.activations, f"up to {plan.maxNumBatchedTokens.value} tokens at once"),
            Part("A", "43", "adapters", sizes.lora),
            Part("K", "42", "KV cache", sizes.kv, _kv_note(plan)),
        ]
    return [
        *model,
        Part("c", "46", "adapter copies", host.loraCopies),
        *([Part("S", "104", "swap space", host.swap, "KV blocks of preempted requests")] if host.swap else []),
        Part("p", "100", "processes", host.processes),
        Part("m", "47", "models' processes", host.stubs, "one for each model name"),
        Part("h", "41", "shared memory", host.sharedMemory, f"of {plan.sharedMemory.value} at most"),
        Part(".", "0", "left free", max(0, host.total - host.needed)),
    ]


def _kv_note(plan: Plan) -> str:
    return f"{plan.kvTokens} tokens, {plan.concurrency:.1f} requests of {plan.maxModelLen.value}"


def _table(title: str, parts: Sequence[Part], width: int) -> Iterator[str]:
    yield f"{title:<22} {'GiB':>8}"
    for part in parts:
        if part.size:
            yield from _hanging(f"{part.letter} {part.name:<20} {part.size / GIB:>8.2f}  ", part.note, width)
    yield f"  {'total':<20} {sum(part.size for part in parts) / GIB:>8.2f}"


def _settings(plan: Plan, width: int) -> Iterator[str]:
    yield f"{'setting':<21} {'value':>9}  {'from':<9} why"
    for name in _SETTINGS:
        found: Planned[int] | Planned[str] | None = getattr(plan, name)
        if found is not None:
            head = f"{name:<21} {found.value:>9}  {found.origin.value:<9} "
            yield from _hanging(head, found.why, width)


def _verdict(plan: Plan) -> str:
    if plan.fit is Fit.FITS:
        return f"It fits. {plan.advice}".rstrip()
    return f"It fits, but {plan.fit.value}: {plan.advice}"


def _hanging(head: str, text: str, width: int) -> Iterator[str]:
    """A column of text beside `head`."""
    first, *more = textwrap.wrap(text, width - len(head)) or [""]
    yield f"{head}{first}".rstrip()
    yield from (" " * len(head) + line for line in more)


def _wrapped(text: str, width: int) -> Iterator[str]:
    yield from textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
