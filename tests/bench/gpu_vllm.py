# SPDX-License-Identifier: Apache-2.0
"""Adapters on the card against vLLM: the same checkpoint, PEFT folders and prompts for both.

Each engine is alone on the card in its turn, vLLM in a process of its own that has ended before this engine starts.
Its speed counts only if its tokens are likely by this engine's logits with the same adapters, and unlikely without.
Runs are whole, prompts included: vLLM's fastest way, `LLM.generate`, tells no times. On a CPU a second engine of ours
stands in for vLLM, which takes minutes to start there.
"""

import contextlib
import gc
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_engine as engines
import gpu_lora as lora
import random_adapters
import torch
from card import Card
from child import ChildFailed, ChildProcess
from measure import MAX_GAP, WrongOutput, measure
from safetensors.torch import save_file

from quire_engine.core.engine import Engine
from quire_spec.engine.config import EngineConfig

BAR, AIM = 1.2, 1.5
"""What this engine's tokens/s must be of vLLM's, and should be."""
OWN, VLLM, STAND_IN = "adapters", "vLLM, adapters", "this engine in vLLM's place, adapters"
NUM_CHECKED, NUM_CHECKED_TOKENS = 4, 16

Run = Callable[[engines.Load], dict[str, Any]]
"""Puts a load on an engine, requests on the adapters in turn; see measure.py for what comes back."""


@dataclass(frozen=True, slots=True)
class Found:
    """Of one engine."""

    token_ids: list[list[int]]
    """Of the run that warms up."""
    rates: list[float]
    """Output tokens a second of each run that counts."""


def left_out(python: str) -> str | None:
    """Why that interpreter has no vLLM to compare with, in one line; None: it has."""
    try:
        done = subprocess.run([python, "-c", "import vllm"], capture_output=True, text=True)
    except OSError as error:
        return f"vLLM left out: {python!r} cannot be run: {error.strerror}; give --vllm-python"
    if done.returncode == 0:
        return None
    why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return f"vLLM left out: {python!r} cannot import it: {why}"


def compare(card: Card, python: str) -> dict[str, Any]:
    """Rows, ratio and gaps; or `left_out`, where vLLM cannot be imported or fails.

    Raises:
        WrongOutput: what one of them generates is unlikely by this engine's logits.
    """
    if card.is_gpu and (why := left_out(python)):
        return {"left_out": why}
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as name:
        model, num, rank = Path(name, "model"), *((lora.NUM_ADAPTERS, lora.RANK) if card.is_gpu else (2, 8))
        write_checkpoint(card, engines.LLAMA_8B if card.is_gpu else engines.TINY, model)
        folders = random_adapters.make_adapters(model, Path(name, "adapters"), num, rank)
        settings = engines.settings(card) | {"enable_lora": True, "max_loras": num, "max_lora_rank": rank}
        settings["model"] = str(model)
        try:
            if card.is_gpu:
                others = vllm_found(card, python, settings, folders)
            else:
                others = _in_its_place(card, settings, folders)
        except ChildFailed as error:
            print(f"  {error}", flush=True)
            return {"left_out": f"vLLM left out: it failed: {str(error).strip().splitlines()[-1]}"}
        with own_engine(card, settings, folders) as (engine, run):
            ours = warm_up(card, run)
            gaps = {"quire": check(card, engine, ours, folders), "vllm": check(card, engine, others.token_ids, folders)}
            rates = _rates(card, run)
    other = VLLM if card.is_gpu else STAND_IN
    rows = [_row(card, OWN, rates), _row(card, other, others.rates)]
    return {"gaps": gaps, "rows": rows, "ratios": lora.ratios(rows, ((OWN, other, BAR, AIM),))}


def write_checkpoint(card: Card, shape: dict[str, Any], folder: Path) -> None:
    """Random weights of a Llama, a file for each layer. Norms are 1, and every linear keeps the deviation of its
    inputs where it is square: so the deviation of the logits is 1, and outputs wander as checkpoint.py's do."""
    hidden, vocab = shape["hidden_size"], shape["vocab_size"]
    dtype = getattr(torch, shape["torch_dtype"])
    torch.manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return (torch.randn(size, dtype=dtype, device=card.device) * hidden**-0.5).cpu()

    norm, where = torch.ones(hidden, dtype=dtype), {}
    folder.mkdir()
    for layer in range(-1, shape["num_hidden_layers"]):
        if layer < 0:
            tensors = {"model.embed_tokens.weight": drawn(vocab, hidden), "lm_head.weight": drawn(vocab, hidden)}
            tensors["model.norm.weight"] = norm
        else:
            linears = random_adapters.linear_shapes(shape).items()
            tensors = {f"model.layers.{layer}.{path}.weight": drawn(d_out, d_in) for path, (d_in, d_out) in linears}
            for name in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"model.layers.{layer}.{name}.weight"] = norm.clone()
        file = f"model-{layer + 1:05}.safetensors"
        save_file(tensors, folder / file)
        where |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps(shape))


def _load(card: Card, run: object) -> engines.Load:
    """Mostly decoding; each run has prompts of its own, so that no prefix cache knows them."""
    num, prompt, output = (256, 128, 512) if card.is_gpu else (3, 12, 6)
    return engines.Load(f"adapters, run {run}", ((prompt, output),) * num)


def warm_up(card: Card, run: Run) -> list[list[int]]:
    """Compiles, and fills the slots; the tokens, to be checked."""
    found: list[list[int]] = run(_load(card, "warm up"))["token_ids"]
    return found


def _rates(card: Card, run: Run) -> list[float]:
    """Output tokens a second of each run that counts."""
    rates = []
    for i in range(lora.NUM_ROUNDS if card.is_gpu else 1):
        load = _load(card, i)
        rates.append(measure(load.requests(_vocab_size(card)), None, run(load))["output_tokens_per_s"])
    return rates


def _in_its_place(card: Card, settings: dict[str, Any], folders: Sequence[Path]) -> Found:
    with own_engine(card, settings, folders) as (_, run):
        return Found(warm_up(card, run), _rates(card, run))


def vllm_found(card: Card, python: str, settings: dict[str, Any], folders: Sequence[Path]) -> Found:
    """What vLLM generates, and how fast; its process has ended, and given the card's memory back.

    Raises:
        ChildFailed: it failed.
    """
    gc.collect()
    free = card.free_bytes
    own = settings | {"skip_tokenizer_init": True}
    with (
        tempfile.TemporaryDirectory() as logs,
        ChildProcess("vllm", "vllm_offline.py", own, Path(logs), python) as child,
    ):

        def generate(load: engines.Load) -> dict[str, Any]:
            each = [str(folders[i % len(folders)]) for i in range(len(load.sizes))]
            found: dict[str, Any] = child.call(
                "run", requests=load.requests(_vocab_size(card)), offsets=None, adapters=each
            )
            return found

        found = Found(warm_up(card, generate), _rates(card, generate))
    card.wait_free(free)
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
        gaps.append(engines.gap(engine, requests[i], output, folder))
        if gaps[-1] > MAX_GAP:
            raise WrongOutput(
                f"request {i}: a token is {gaps[-1]:.2f} deviations below the likeliest; {MAX_GAP} at most"
            )
        if (base := engines.gap(engine, requests[i], output, None)) <= MAX_GAP:
            raise WrongOutput(f"request {i}: without its adapter the gap is {base:.2f}; a lost one would not be missed")
    return max(gaps)


def _vocab_size(card: Card) -> int:
    found: int = (engines.LLAMA_8B if card.is_gpu else engines.TINY)["vocab_size"]
    return found


def _row(card: Card, name: str, rates: Sequence[float]) -> dict[str, Any]:
    sizes = _load(card, 0).sizes
    what = f"{len(sizes)} sequences, {sizes[0][0]} in, {sizes[0][1]} out, prompts included"
    return {"row": name, "what": what, "output_tokens_per_s": statistics.median(rates), "all": list(rates)}
