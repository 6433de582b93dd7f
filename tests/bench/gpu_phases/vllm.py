# SPDX-License-Identifier: Apache-2.0
"""Adapters on the card against vLLM: the same checkpoint, PEFT folders and prompts for both.

Each engine is alone on the card. The speed of an engine counts only if its tokens are likely by this engine's logits
with the same adapters, and unlikely without. Runs are whole, prompts included, because `LLM.generate` returns no times.
On a CPU a second engine of this repository takes vLLM's place.
"""

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import random_adapters
from card import Card
from child import ChildProcess
from measure import MAX_GAP, WrongOutput, measure

from gpu_phases import random_engine as engines
from gpu_phases.greedy_check import gap
from gpu_phases.lora import NUM_ADAPTERS, NUM_ROUNDS, RANK
from gpu_phases.peers import why_left_out
from gpu_phases.process import Context
from gpu_phases.random_checkpoint import write_checkpoint
from gpu_phases.store import Row
from quire_engine.core.engine import Engine
from quire_spec.engine.config import EngineConfig

NUM_CHECKED, NUM_CHECKED_TOKENS = 4, 16

Run = Callable[[engines.Load], dict[str, Any]]
"""Puts a load on an engine, its requests on the adapters in turn; returns a reply as in measure.py."""


@dataclass(frozen=True, slots=True)
class Found:
    """The results of one engine."""

    token_ids: list[list[int]]
    """Outputs of the run that warms up."""
    rates: list[float]
    """Output tokens per second of each run that counts."""


def rows(context: Context) -> Iterator[Row]:
    """The rates of both engines and their ratio; one row with the reason if vLLM cannot be imported.

    Raises:
        WrongOutput: the tokens of one engine are unlikely by this engine's logits.
    """
    card = context.card
    if card.is_full and (why := why_left_out(card, context.vllm_python)):
        yield {"what": why, "value": "-", "unit": "", "left_out": True}
        return
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as name:
        model, num, rank = Path(name, "model"), *((NUM_ADAPTERS, RANK) if card.is_full else (2, 8))
        write_checkpoint(card, engines.LLAMA_8B if card.is_full else engines.TINY, model)
        folders = random_adapters.make_adapters(model, Path(name, "adapters"), num, rank)
        settings = engines.settings(card) | {"enable_lora": True, "max_loras": num, "max_lora_rank": rank}
        settings["model"] = str(model)
        other = "vLLM" if card.is_full else "a second engine of this repository"
        if card.is_full:
            theirs = vllm_found(context, settings, folders)
        else:
            theirs = _in_its_place(card, settings, folders)
        yield (theirs_row := _row(card, f"{other}, {num} adapters", theirs.rates))
        with own_engine(card, settings, folders) as (engine, run):
            gaps = {"quire": check(card, engine, warm_up(card, run), folders)}
            gaps["other"] = check(card, engine, theirs.token_ids, folders)
            rates = _rates(card, run)
        yield (ours_row := _row(card, f"{num} adapters", rates) | {"gaps": gaps})
        ratio = ours_row["value"] / theirs_row["value"]
        yield {"what": f"quire / {other}, {num} adapters", "key": "vllm_adapters", "value": ratio, "unit": "ratio"}


def _load(card: Card, run: object) -> engines.Load:
    """Mostly decoding; each run has prompts of its own, so that no prefix cache knows them."""
    num, prompt, output = (256, 128, 512) if card.is_full else (3, 12, 6)
    return engines.Load(f"adapters, run {run}", ((prompt, output),) * num)


def warm_up(card: Card, run: Run) -> list[list[int]]:
    """Compiles, and fills the slots; the tokens, to be checked."""
    found: list[list[int]] = run(_load(card, "warm up"))["token_ids"]
    return found


def _rates(card: Card, run: Run) -> list[float]:
    """Output tokens per second of each run that counts."""
    rates = []
    for i in range(NUM_ROUNDS if card.is_full else 1):
        load = _load(card, i)
        rates.append(measure(load.requests(_vocab_size(card)), None, run(load))["output_tokens_per_s"])
    return rates


def _in_its_place(card: Card, settings: dict[str, Any], folders: Sequence[Path]) -> Found:
    with own_engine(card, settings, folders) as (_, run):
        return Found(warm_up(card, run), _rates(card, run))


def vllm_found(context: Context, settings: dict[str, Any], folders: Sequence[Path]) -> Found:
    """Return vLLM's results; its process has ended.

    Raises:
        ChildFailed: it failed.
    """
    card, own = context.card, settings | {"skip_tokenizer_init": True}
    card.wait_free()
    with ChildProcess("vllm", "vllm_offline.py", own, context.folder, context.vllm_python) as child:

        def generate(load: engines.Load) -> dict[str, Any]:
            each = [str(folders[i % len(folders)]) for i in range(len(load.sizes))]
            requests = load.requests(_vocab_size(card))
            found: dict[str, Any] = child.call("run", requests=requests, offsets=None, adapters=each)
            return found

        found = Found(warm_up(card, generate), _rates(card, generate))
    card.wait_free()
    return found


@contextlib.contextmanager
def own_engine(card: Card, settings: dict[str, Any], folders: Sequence[Path]) -> Iterator[tuple[Engine, Run]]:
    """An engine with all adapters registered, and what runs loads on it; its memory is given back at the end."""
    engine = Engine.from_config(EngineConfig(device=card.device.type, **settings))
    for folder in folders:
        engine.add_adapter(str(folder), folder, engine.read_adapter(folder))
    try:
        yield engine, lambda load: engines.drive(engine, load, [str(folder) for folder in folders])
    finally:
        engines.close(engine)


def check(card: Card, engine: Engine, token_ids: Sequence[Sequence[int]], folders: Sequence[Path]) -> float:
    """The worst gap of tokens of the run that warmed up, by an engine's logits with their adapters.

    Raises:
        WrongOutput: it is more than roundings explain, or the tokens are as likely without an adapter.
    """
    requests, gaps = _load(card, "warm up").requests(_vocab_size(card)), []
    for i in range(min(NUM_CHECKED, len(requests))):
        output, folder = token_ids[i][:NUM_CHECKED_TOKENS], str(folders[i % len(folders)])
        gaps.append(gap(engine, requests[i], output, folder))
        if gaps[-1] > MAX_GAP:
            raise WrongOutput(
                f"request {i}: a token is {gaps[-1]:.2f} deviations below the likeliest; {MAX_GAP} at most"
            )
        if (base := gap(engine, requests[i], output, None)) <= MAX_GAP:
            raise WrongOutput(f"request {i}: without its adapter the gap is {base:.2f}; a lost one would not be missed")
    return max(gaps)


def _vocab_size(card: Card) -> int:
    found: int = (engines.LLAMA_8B if card.is_full else engines.TINY)["vocab_size"]
    return found


def _row(card: Card, name: str, rates: Sequence[float]) -> Row:
    sizes = _load(card, 0).sizes
    what = f"{name}: {len(sizes)} sequences, {sizes[0][0]} in, {sizes[0][1]} out, prompts included"
    return {"what": what, "value": statistics.median(rates), "unit": "tokens/s", "all": list(rates)}
