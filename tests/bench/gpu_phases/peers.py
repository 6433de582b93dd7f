# SPDX-License-Identifier: Apache-2.0
"""The same loads on this engine, on transformers' continuous batching and on vLLM, each in a process of its own.

Each runs alone on the card. Weights are random, and each engine makes its own, so tokens are counted and not compared.
"""

import json
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from card import Card
from child import ChildProcess
from measure import measure

from gpu_phases.process import Context
from gpu_phases.random_engine import LLAMA_8B, TINY, Load, settings, sharegpt_like
from gpu_phases.store import Row

TIMEOUT_S = 240.0
"""Time limit of a load, and of a start with the warm-up."""
SHORT = [
    Load("1000 in, 200 out, 256 requests", ((1000, 200),) * 256),
    Load("a mix like ShareGPT's, 512 requests", sharegpt_like(512)),
]
"""Loads that transformers completes in time. Without a library of flash attention it multiplies each query by the keys
of all sequences: a step of 256 sequences of 1,500 tokens takes 52 TFLOP and 560 GB, a third of a second."""
LONG = [*SHORT, Load("1000 in, 1000 out, 256 requests", ((1000, 1000),) * 256)]
TINY_LOADS = [Load("12 in, 6 out", ((12, 6),) * 3), Load("a mix", ((9, 4), (20, 2), (3, 7)))]
QUIRE = "quire"


def transformers_rows(context: Context) -> Iterator[Row]:
    """This engine and transformers' continuous batching, and their ratios."""
    card = context.card
    shape, some = (LLAMA_8B, SHORT) if card.is_full else (TINY, TINY_LOADS)
    sizes = [size for load in some for size in load.sizes]
    other: dict[str, Any] = {"shape": shape, "dtype": shape["torch_dtype"], "device": card.device.type}
    other |= {"longest": [max(prompt for prompt, _ in sizes), max(output for _, output in sizes)]}
    other |= {"num_requests": max(len(load.sizes) for load in some)}
    # By default it takes most of a CPU's memory, page by page.
    other |= {"batching": {} if card.is_full else {"num_blocks": 8, "max_batch_tokens": 32}}
    own = {}
    for row in _own_rows(context, some):
        own[row["load"]] = row["value"]
        yield row
    for row in _measured(context, "transformers", "continuous_batches.py", other, some):
        yield row
        yield _ratio(own[row["load"]], row, "transformers")


def vllm_rows(context: Context) -> Iterator[Row]:
    """This engine and vLLM, and their ratios; one row with the reason if vLLM cannot be imported."""
    card = context.card
    if (why := why_left_out(card, context.vllm_python)) is not None:
        yield {"what": why, "value": "-", "unit": "", "left_out": True}
        return
    own = {row["load"]: row["value"] for row in context.rows_of("transformers") if row.get("engine") == QUIRE}
    for row in _own_rows(context, [load for load in LONG if load.what not in own]):
        own[row["load"]] = row["value"]
        yield row
    (context.folder / "vllm").mkdir(exist_ok=True)
    (context.folder / "vllm" / "config.json").write_text(json.dumps(LLAMA_8B))
    fields = settings(card) | {
        "model": str(context.folder / "vllm"),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
    }
    for row in _measured(context, "vLLM", "vllm_offline.py", fields, LONG, context.vllm_python):
        yield row
        yield _ratio(own[row["load"]], row, "vllm")


def why_left_out(card: Card, python: str) -> str | None:
    """Return why vLLM cannot run in that interpreter, in one line; None if it can."""
    if not card.is_full:
        return "vLLM left out: it takes minutes to start on a CPU"
    try:
        done = subprocess.run([python, "-c", "import vllm"], capture_output=True, text=True)
    except OSError as error:
        return f"vLLM left out: {python!r} cannot be run: {error.strerror}; give --vllm-python"
    why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return f"vLLM left out: {python!r} cannot import it: {why}" if done.returncode else None


def _own_rows(context: Context, loads: Sequence[Load]) -> Iterator[Row]:
    own = {"device": context.card.device.type, "tiny": context.card.is_tiny, "engine": settings(context.card)}
    if loads:
        yield from _measured(context, QUIRE, "random_offline.py", own, loads)


def _measured(
    context: Context, name: str, script: str, fields: dict[str, Any], loads: Sequence[Load], python: str | None = None
) -> Iterator[Row]:
    context.card.wait_free()
    options = {} if python is None else {"python": python}
    vocab_size = (LLAMA_8B if context.card.is_full else TINY)["vocab_size"]
    with ChildProcess(name, script, fields, context.folder, timeout_s=TIMEOUT_S, **options) as child:
        # Compiles. The prompts differ from the measured ones, and have their sizes.
        warm = Load("warm up", tuple((prompt, min(output, 16)) for prompt, output in loads[0].sizes[:64]))
        child.call("run", requests=warm.requests(vocab_size), offsets=None)
        for load in loads:
            requests = load.requests(vocab_size)
            found = measure(requests, None, child.call("run", requests=requests, offsets=None))
            row = {"what": f"{name}: {load.what}", "value": found["output_tokens_per_s"], "unit": "tokens/s"}
            yield row | {"engine": name, "load": load.what}


def _ratio(own: float, row: Row, key: str) -> Row:
    return {"what": f"quire / {row['what']}", "key": key, "value": own / row["value"], "unit": "ratio"}
