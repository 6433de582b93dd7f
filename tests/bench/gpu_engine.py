# SPDX-License-Identifier: Apache-2.0
"""The engine on the card, with random weights made there, no checkpoint and no network.

All requests are greedy and ignore end-of-sequence tokens, so every engine makes the same number of tokens.
"""

import gc
import json
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import random_weights
import torch
from card import Card
from measure import kv_usage, logit_shortfall, measure, percentile
from token_arrivals import TokenArrivals
from workload import Request

from quire_engine.core.engine import Engine
from quire_engine.weights.checkpoint import Checkpoint
from quire_engine.worker.model_runner import DeviceModelRunner
from quire_spec.engine.config import EngineConfig
from quire_spec.model.model_config import ModelConfig
from quire_spec.protocol.messages import SequenceRequest

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 128000,
    "eos_token_id": 128001,
}  # fmt: skip
TINY = LLAMA_8B | {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "torch_dtype": "float32",
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


GRAPH_GAP_US = 5.0
"""Between a kernel of a graph and the next one that waits for it: one or two, and somewhat more under a profiler."""


MAX_TIE = 1e-4
"""Deviations of the logits within which rounding decides between two tokens: a hundred times float32's. The likeliest
token of 2,000 is 0.25 before the next one on average, so a wrong one is taken for a tie once in 2,500 times."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one measurement."""

    what: str
    sizes: tuple[tuple[int, int], ...]
    """Tokens of each prompt and output."""
    rate: float | None = None
    """Arrivals a second; None: all at once."""

    def requests(self, vocab_size: int) -> list[Request]:
        """Prompts of random tokens, the same for every engine."""
        draw = random.Random(self.what)
        return [Request(draw.choices(range(vocab_size), k=prompt), output) for prompt, output in self.sizes]

    def offsets(self) -> list[float] | None:
        """When each arrives: a Poisson process."""
        if self.rate is None:
            return None
        draw = random.Random(f"arrivals {self.what}")
        return list(accumulate((draw.expovariate(self.rate) for _ in self.sizes[1:]), initial=0.0))


def loads(card: Card, quick: bool) -> list[Load]:
    """Throughput at three proportions of prompt and output, and of a mix like ShareGPT's."""
    if not card.is_gpu:
        return [Load("12 in, 6 out", ((12, 6),) * 3), Load("at 20 a second", ((9, 4),) * 3, rate=20.0)]
    if quick:
        return [Load("1000 in, 128 out, 256 requests", ((1000, 128),) * 256)]
    mix = sharegpt_like(1024)
    return [
        Load("1000 in, 1000 out, 512 requests", ((1000, 1000),) * 512),
        Load("128 in, 1024 out, 256 requests", ((128, 1024),) * 256),
        Load("2048 in, 128 out, 512 requests", ((2048, 128),) * 512),
        Load("a mix like ShareGPT's, 1,024 requests", mix),
        *(Load(f"the mix at {rate} requests a second", mix[: 12 * rate], float(rate)) for rate in (4, 16, 32)),
    ]


def sharegpt_like(num: int) -> tuple[tuple[int, int], ...]:
    """Tokens of prompts and outputs as of ShareGPT's conversations."""
    draw = random.Random(5)
    return tuple((_log_normal(draw, 220, 1.0, 2048), _log_normal(draw, 200, 0.8, 1024)) for _ in range(num))


def _log_normal(draw: random.Random, median: int, sigma: float, most: int) -> int:
    return max(4, min(most, round(draw.lognormvariate(0.0, sigma) * median)))


def make_engine(card: Card, **settings: Any) -> Engine:
    """An engine of random weights."""
    model = LLAMA_8B if card.is_gpu else TINY
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(model | settings.pop("model_config", {})))
        shape = ModelConfig.load(folder)
        config = EngineConfig(model="random", device=card.device.type, **settings)
        with random_weights.patch_weight_loading():
            runner = DeviceModelRunner(config, shape, folder)
    return Engine(config, Checkpoint(folder, shape, frozenset(), "random"), runner, runner.memory)


def settings(card: Card) -> dict[str, Any]:
    """Of the engine that is measured."""
    if card.is_gpu:
        return {"dtype": "bfloat16", "max_model_len": 8192, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    tiny = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 8}
    return tiny | {"async_scheduling": True}


def check_graphs(card: Card, add: Callable[[Engine], Sequence[str]] | None = None) -> tuple[int, int]:
    """Of greedy tokens in float32 by a small model: how many differ with graphs, own forms and steps begun ahead from
    the references without graphs in steps that wait, and how many there are; `add`: registers adapters for the requests
    to take in turn. Where two tokens are as likely but for rounding, either may come, and others after it."""
    small = {"hidden_size": 512, "num_hidden_layers": 4, "vocab_size": 2000, "num_attention_heads": 8}
    small |= {"num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1024}
    load = Load("check", tuple((5 + 37 * i % 200, 24) for i in range(20)) if card.is_gpu else ((9, 4), (17, 3)))
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 128} if add is not None else {}
    found: list[list[list[int]]] = []
    for plain in (False, True):
        engine = make_engine(
            card,
            **(
                settings(card)
                | lora
                | {"dtype": "float32", "max_model_len": 512 if card.is_gpu else 64}
                | ({"async_scheduling": False} if plain else {})
            ),
            model_config=small if card.is_gpu else {},
            kv_cache_memory_bytes=1 << (30 if card.is_gpu else 20),
        )
        with _references() if plain else mock.patch.dict({}):
            if plain:
                engine._runner._graphs = None  # type: ignore[attr-defined]
            names = () if add is None else (*add(engine), None)
            found.append(drive(engine, load, names)["token_ids"])
            if plain:
                requests = load.requests(engine.shape.vocab_size)
                own, expected = found
                others = [
                    _others(engine, request, *pair, names[i % len(names)] if names else None)
                    for i, (request, *pair) in enumerate(zip(requests, own, expected, strict=True))
                ]
        close(engine)
    return sum(others), sum(map(len, expected))


def _others(
    engine: Engine, request: Request, output: Sequence[int], expected: Sequence[int], adapter: str | None
) -> int:
    """Tokens of an output that are not what was expected, unless the first of them is as likely by this engine."""
    differ = [i for i, (a, b) in enumerate(zip(output, expected, strict=True)) if a != b]
    if not differ or gap(engine, request, output[: differ[0] + 1], adapter) <= MAX_TIE:
        return 0
    return len(differ)


def gap(engine: Engine, request: Request, output: Sequence[int], adapter: str | None) -> float:
    """How far tokens fall short of the likeliest at worst, by an engine's logits; the deviation of these is 1."""
    params = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True, "prompt_logprobs": 1}
    engine.add(SequenceRequest(0, [*request.prompt_token_ids, *output], params, adapter))
    scored: list[list[list[float]]] = []
    while engine.has_work:
        for result in engine.step().results:
            if result.error_code is not None:
                raise RuntimeError(f"scoring: {result.error}")
            scored += result.prompt_logprobs or []
    return logit_shortfall(scored[-len(output) :])


def _references() -> Any:
    """All operations by their references, on every device."""
    import contextlib

    import quire_kernels
    from quire_kernels.dispatch import collect_ops

    stack = contextlib.ExitStack()
    for op in collect_ops(vars(quire_kernels)):
        stack.enter_context(mock.patch.dict(op.dispatch_table, {"cuda": op.reference}))
    return stack


def drive(engine: Engine, load: Load, adapters: Sequence[str | None] = ()) -> dict[str, Any]:
    """Put a load on an idle engine, its requests on the adapters in turn; see measure.py for what comes back."""
    return feed(engine, load.requests(engine.shape.vocab_size), load.offsets(), adapters)


def feed(
    engine: Engine, requests: Sequence[Request], arrivals: Sequence[float] | None, adapters: Sequence[str | None] = ()
) -> dict[str, Any]:
    """The same of requests that come at their times; None: all at once."""
    offsets = arrivals or [0.0] * len(requests)
    params = [{"temperature": 0.0, "max_tokens": request.num_output_tokens, "ignore_eos": True} for request in requests]
    record, kv, num_added, steps = TokenArrivals(), [], 0, []
    while num_added < len(requests) or engine.has_work:
        while num_added < len(requests) and offsets[num_added] <= record.now():
            adapter = adapters[num_added % len(adapters)] if adapters else None
            engine.add(SequenceRequest(num_added, requests[num_added].prompt_token_ids, params[num_added], adapter))
            num_added += 1
        if not engine.has_work:
            time.sleep(max(0.0, offsets[num_added] - record.now()))
            continue
        result = engine.step()
        for each in result.results:
            if each.error_code is not None:
                raise RuntimeError(f"request {each.id}: {each.error}")
            record.add(each.id, each.token_ids)
        kv.append((record.now(), result.stats.num_running, result.stats.num_used_blocks))
        steps.append((record.now(), len(result.results)))
    return record.to_reply() | {"kv": kv, "steps": steps}


def close(engine: Engine) -> None:
    """Give the device's memory back."""
    del engine._runner, engine._step_executor
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def numbers(engine: Engine, load: Load) -> dict[str, Any]:
    """Throughput, latencies and unused memory of one load."""
    reply, requests = drive(engine, load), load.requests(engine.shape.vocab_size)
    found = measure(requests, load.offsets(), reply)
    samples = kv_usage(requests, reply)
    block_size = engine.config.block_size
    held, used = sum(s["num_blocks"] for s in samples) * block_size, sum(s["num_tokens"] for s in samples)
    return {"what": load.what, **found, "kv_waste": 1 - used / held if held else None}


def decode_rate(
    engine: Engine, num_seqs: int, prompt: int, output: int, adapters: Sequence[str | None] = ()
) -> dict[str, Any]:
    """Output tokens a second while all sequences decode."""
    reply = drive(engine, Load(f"decode of {num_seqs}", ((prompt, output),) * num_seqs), adapters)
    first = max(events[0][0] for events in reply["events"])
    last = min(events[-1][0] for events in reply["events"])
    tokens = sum(count for events in reply["events"] for at, count in events if first < at <= last)
    gaps = [b - a for (a, _), (b, n) in pairwise(reply["steps"]) if first < b <= last and n == num_seqs]
    return {
        "what": f"{num_seqs} sequences, {prompt} in, {output} out, while all decode",
        "output_tokens_per_s": tokens / (last - first) if last > first else None,
        "step_ms": {"median": 1e3 * statistics.median(gaps), "p99": 1e3 * percentile(gaps, 99)} if gaps else None,
    }


def idle_per_step(engine: Engine, num_seqs: int, prompt: int, num_steps: int, ahead: bool) -> dict[str, Any]:
    """Time a step in which the device does nothing, from a trace of decoding steps, begun ahead or not.

    Beside it, what no tracing has touched: how long such a step takes, and its graph alone. Profilers may lose kernels,
    and time between them grows under their eyes: then the difference of these two says more.
    """
    from torch.profiler import ProfilerActivity, profile

    engine._step_executor.async_scheduling = ahead
    vocab, draw = engine.shape.vocab_size, random.Random(9)
    for i in range(num_seqs):
        # Nobody ends before the last one has decoded so many steps: prompts start in as many steps at most.
        params = {"temperature": 0.0, "max_tokens": 3 * num_steps + num_seqs + 20, "ignore_eos": True}
        engine.add(SequenceRequest(i, draw.choices(range(vocab), k=prompt), params))
    seen: set[int] = set()
    while len(seen) < num_seqs:
        seen |= {result.id for result in engine.step().results}
    found: dict[str, Any] = {"step_ms": step_ms(engine, num_steps), "graph_ms": graph_ms(engine, num_seqs, num_steps)}
    num_syncs = count_syncs(engine, num_steps)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with profile(activities=activities) as trace:
        for _ in range(num_steps):
            engine.step()
        _synchronize()
    engine.abort(range(num_seqs))
    while engine.has_work:
        engine.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        trace.export_chrome_trace(str(path))
        trace_of_device = busy_and_idle(json.loads(path.read_text())["traceEvents"])
    found |= {"what": f"{num_seqs} sequences at {prompt}, {'begun ahead' if ahead else 'waiting for each other'}"}
    num = trace_of_device.pop("num")
    # A trace that has seen nothing says nothing of idle time.
    found |= {f"{name}_ms": us / num_steps / 1e3 if num else None for name, us in trace_of_device.items()}
    return found | {"works_per_step": num / num_steps, "syncs_per_step": num_syncs / num_steps}


def step_ms(engine: Engine, num_steps: int) -> float:
    """Of a step, by the host's clock."""
    _synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    _synchronize()
    return 1e3 * (time.perf_counter() - start) / num_steps


def graph_bytes(engine: Engine) -> int:
    """Of the device's memory that captured steps keep; 0 without any."""
    graphs: Any = engine._runner._graphs  # type: ignore[attr-defined]
    return 0 if graphs is None else int(graphs.num_bytes)


def graph_ms(engine: Engine, num_seqs: int, num_replays: int) -> float | None:
    """Of the graph of a decoding step, replayed without anything between: the step that was begun last, whose numbers
    are the same each time. None: there are no graphs."""
    graphs: Any = engine._runner._graphs  # type: ignore[attr-defined]
    if graphs is None:
        return None
    replay, start, end = graphs._base_graphs[num_seqs], *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    start.record()
    for _ in range(num_replays):
        replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / num_replays


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def count_syncs(engine: Engine, num_steps: int) -> int:
    """How often torch makes the host wait for the device in some steps, but for the event at the end of each."""
    if not torch.cuda.is_available():
        for _ in range(num_steps):
            engine.step()
        return 0
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(num_steps):
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in seen)


def busy_and_idle(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Microseconds in which a device works (busy), and in which it waits between its first and its last work (idle); of
    these, those in gaps that are longer than between two kernels of a graph (gaps). `num`: of works."""
    work = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in event
    )
    busy, gaps, end = 0.0, 0.0, work[0][0] if work else 0.0
    for start, stop in work:
        busy += max(0.0, stop - max(start, end))
        gaps += start - end if start - end > GRAPH_GAP_US else 0.0
        end = max(end, stop)
    return {"num": len(work), "busy": busy, "idle": end - work[0][0] - busy if work else 0.0, "gaps": gaps}
