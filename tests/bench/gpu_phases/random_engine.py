# SPDX-License-Identifier: Apache-2.0
"""An engine with random weights made on the device, and the loads that are put on it.

All requests are greedy and ignore end-of-sequence tokens, so every engine generates the same number of tokens.
"""

import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import random_weights
import torch
from card import Card
from measure import kv_usage, measure, percentile
from token_arrivals import TokenArrivals
from workload import Request

from quire_engine.core.engine import Engine
from quire_engine.weights.checkpoint import Checkpoint
from quire_engine.worker.model_runner import DeviceModelRunner
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
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


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of one measurement."""

    what: str
    sizes: tuple[tuple[int, int], ...]
    """The number of tokens of each prompt and of each output."""
    rate: float | None = None
    """Arrivals a second; None: all at once."""

    def requests(self, vocab_size: int) -> list[Request]:
        """Return prompts of random tokens, the same for every engine."""
        draw = random.Random(self.what)
        return [Request(draw.choices(range(vocab_size), k=prompt), output) for prompt, output in self.sizes]

    def offsets(self) -> list[float] | None:
        """Return when each request arrives: a Poisson process."""
        if self.rate is None:
            return None
        draw = random.Random(f"arrivals {self.what}")
        return list(accumulate((draw.expovariate(self.rate) for _ in self.sizes[1:]), initial=0.0))


def sharegpt_like(num: int) -> tuple[tuple[int, int], ...]:
    """Return the tokens of prompts and outputs, distributed as in ShareGPT's conversations."""
    draw = random.Random(5)
    return tuple((_log_normal(draw, 220, 1.0, 2048), _log_normal(draw, 200, 0.8, 1024)) for _ in range(num))


def _log_normal(draw: random.Random, median: int, sigma: float, most: int) -> int:
    return max(4, min(most, round(draw.lognormvariate(0.0, sigma) * median)))


def make_engine(card: Card, **settings: Any) -> Engine:
    """Create an engine with random weights."""
    model = LLAMA_8B if card.is_full else TINY
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(model | settings.pop("model_config", {})))
        shape = ModelConfig.load(folder)
        config = EngineConfig(model="random", device=card.device.type, **settings)
        with random_weights.patch_weight_loading():
            runner = DeviceModelRunner(config, shape, folder)
    engine = Engine(config, Checkpoint(folder, shape, frozenset(), "random"), runner, runner.memory)
    # As in core/process.py: garbage collections in the middle of a step do not traverse the model.
    gc.collect()
    gc.freeze()
    return engine


def settings(card: Card) -> dict[str, Any]:
    """Return the settings of the measured engine."""
    if card.is_full:
        return {"dtype": "bfloat16", "max_model_len": 8192, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    tiny = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 8}
    return tiny | {"async_scheduling": True}


def drive(engine: Engine, load: Load, adapters: Sequence[str | None] = ()) -> dict[str, Any]:
    """Put a load on an idle engine, its requests on the adapters in turn; return a reply as in measure.py."""
    return feed(engine, load.requests(engine.shape.vocab_size), load.offsets(), adapters)


def feed(
    engine: Engine, requests: Sequence[Request], arrivals: Sequence[float] | None, adapters: Sequence[str | None] = ()
) -> dict[str, Any]:
    """Do the same with requests that arrive at their times; None: all at once."""
    offsets = arrivals or [0.0] * len(requests)
    params = [{"temperature": 0.0, "max_tokens": request.num_output_tokens, "ignore_eos": True} for request in requests]
    record, kv, num_added, steps = TokenArrivals(), [], 0, []
    while num_added < len(requests) or engine.has_work:
        while num_added < len(requests) and offsets[num_added] <= record.now():
            adapter = adapters[num_added % len(adapters)] if adapters else None
            engine.add(
                SequenceRequest(
                    num_added,
                    requests[num_added].prompt_token_ids,
                    SamplingParams.from_mapping(params[num_added]),
                    adapter,
                )
            )
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
    """Free the memory of the device."""
    del engine._runner, engine._step_executor
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def numbers(engine: Engine, load: Load) -> dict[str, Any]:
    """Return throughput, latencies and unused memory of one load."""
    reply, requests = drive(engine, load), load.requests(engine.shape.vocab_size)
    found = measure(requests, load.offsets(), reply)
    samples = kv_usage(requests, reply)
    block_size = engine.config.block_size
    held, used = sum(s["num_blocks"] for s in samples) * block_size, sum(s["num_tokens"] for s in samples)
    return {"what": load.what, **found, "kv_waste": 1 - used / held if held else None}


def decode_rate(
    engine: Engine, num_seqs: int, prompt: int, output: int, adapters: Sequence[str | None] = ()
) -> dict[str, Any]:
    """Return the output tokens per second while all sequences decode."""
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


def graph_bytes(engine: Engine) -> int:
    """Return the device memory of the captured graphs; 0 without graphs."""
    graphs: Any = engine._runner._graphs  # type: ignore[attr-defined]
    return 0 if graphs is None else int(graphs.num_bytes)
