# SPDX-License-Identifier: Apache-2.0
"""The same loads on this engine, on vLLM and on transformers' continuous batching, each in a process of its own, alone
on the card: the next one starts when the memory of the one before is free again.

Weights are random, each engine's its own, so tokens are counted and not compared. Whoever cannot be imported, fails, or
takes too long is left out with the reason; the others are measured.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_engine as engines
from card import Card
from child import ChildFailed, ChildProcess
from gpu_vllm import left_out
from measure import WrongOutput, measure

QUIRE, TRANSFORMERS, VLLM = "quire", "transformers", "vLLM"
BARS: dict[str, tuple[float | None, float | None]] = {TRANSFORMERS: (3.0, 6.0), VLLM: (None, None)}
"""What this engine's tokens/s must be of another's, and should be; None: nothing is promised."""
TIMEOUT_S = 300.0
"""For a load, and for a start with the warm-up."""
MOST_MASKED_TOKENS = 200_000
"""Of the outputs of a load."""


@dataclass(frozen=True, slots=True)
class Peer:
    """How one of them is started."""

    name: str
    script: str
    settings: dict[str, Any]
    loads: Sequence[engines.Load]
    python: str | None = None
    """Another interpreter than this one."""


def loads(card: Card, quick: bool) -> list[engines.Load]:
    """Of short outputs, a mix, and saturated; see `_quick_enough`."""
    if not card.is_gpu:
        return [engines.Load("12 in, 6 out", ((12, 6),) * 3), engines.Load("a mix", ((9, 4), (20, 2), (3, 7)))]
    if quick:
        return [engines.Load("1000 in, 128 out, 256 requests", ((1000, 128),) * 256)]
    return [
        engines.Load("1000 in, 200 out, 256 requests", ((1000, 200),) * 256),
        engines.Load("a mix like ShareGPT's, 512 requests", engines.sharegpt_like(512)),
        engines.Load("1000 in, 1000 out, 256 requests", ((1000, 1000),) * 256),
    ]


def _quick_enough(some: Sequence[engines.Load]) -> list[engines.Load]:
    """Those that transformers can be waited for. Without a library of flash attention it multiplies each query with the
    keys of all sequences, copied for each query head, and masks the others': a step of 256 sequences of 1,500 tokens is
    52 TFLOP and 560 GB, a third of a second, and a thousand of them more than TIMEOUT_S."""
    return [load for load in some if sum(output for _, output in load.sizes) < MOST_MASKED_TOKENS]


def rows(card: Card, quick: bool, vllm_python: str, free_bytes: int) -> Iterator[dict[str, Any]]:
    """Of each engine and load; `free_bytes`: of the card, before anything was put there."""
    with tempfile.TemporaryDirectory(prefix="quire-peers-") as name:
        for peer in peers(card, loads(card, quick), vllm_python, Path(name)):
            try:
                if peer.python is not None and (why := _cannot(card, peer.python)):
                    raise ChildFailed(why)
                card.wait_free(free_bytes)
                yield from _measured(card, peer, Path(name))
            except (ChildFailed, TimeoutError, WrongOutput) as error:
                why = str(error).strip().splitlines()[-1]
                yield {"engine": peer.name, "left_out": why if peer.name in why else f"{peer.name} left out: {why}"}


def peers(card: Card, some: Sequence[engines.Load], vllm_python: str, folder: Path) -> Iterator[Peer]:
    """This engine first, so that a run that is cut short has it; what takes longest last. `folder`: for vLLM's
    config.json."""
    shape = engines.LLAMA_8B if card.is_gpu else engines.TINY
    own = engines.settings(card)
    yield Peer(QUIRE, "random_offline.py", {"device": card.device.type, "engine": own}, some)
    (folder / "config.json").write_text(json.dumps(shape))
    yield Peer(
        VLLM,
        "vllm_offline.py",
        own | {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True},
        some,
        vllm_python,
    )
    some = _quick_enough(some)
    sizes = [size for load in some for size in load.sizes]
    settings = {"shape": shape, "dtype": shape["torch_dtype"], "device": card.device.type}
    settings |= {"longest": [max(prompt for prompt, _ in sizes), max(output for _, output in sizes)]}
    settings |= {"num_requests": max(len(load.sizes) for load in some)}
    # By itself it takes most of a CPU's memory, page by page.
    settings |= {"batching": {} if card.is_gpu else {"num_blocks": 8, "max_batch_tokens": 32}}
    yield Peer(TRANSFORMERS, "continuous_batches.py", settings, some)


def _cannot(card: Card, python: str) -> str | None:
    return left_out(python) if card.is_gpu else "vLLM left out: it takes minutes to start on a CPU"


def _measured(card: Card, peer: Peer, folder: Path) -> Iterator[dict[str, Any]]:
    python = {} if peer.python is None else {"python": peer.python}
    vocab_size = (engines.LLAMA_8B if card.is_gpu else engines.TINY)["vocab_size"]
    with ChildProcess(peer.name, peer.script, peer.settings, folder, timeout_s=TIMEOUT_S, **python) as child:
        # Compiles. Prompts are other ones than those that are measured, sizes are theirs.
        warm = engines.Load("warm up", tuple((prompt, min(output, 16)) for prompt, output in peer.loads[0].sizes[:64]))
        child.call("run", requests=warm.requests(vocab_size), offsets=None)
        for load in peer.loads:
            requests = load.requests(vocab_size)
            found = measure(requests, None, child.call("run", requests=requests, offsets=None))
            yield {"engine": peer.name, "what": load.what, **found}


def ratios(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """This engine's tokens/s over another's, of each load that both ran."""
    rates = {(row["engine"], row["what"]): row["output_tokens_per_s"] for row in found if "what" in row}
    return [
        {"of": QUIRE, "to": name, "what": what, "ratio": rates[QUIRE, what] / rate, "bar": bar, "aim": aim}
        for name, (bar, aim) in BARS.items()
        for (engine, what), rate in rates.items()
        if engine == name and (QUIRE, what) in rates
    ]
