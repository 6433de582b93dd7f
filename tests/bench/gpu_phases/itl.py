# SPDX-License-Identifier: Apache-2.0
"""The effect of adapter loads on running requests: a real core process with random weights, requests over its socket,
and adapters in PEFT's format on the local disk. tests/bench/itl.py is the measurement."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import random_adapters
from card import Card
from itl import AdapterSets, ItlWorkload, measure_itl, register_adapters
from support.engine_processes import EngineProcesses

from gpu_phases.process import Context
from gpu_phases.random_engine import LLAMA_8B, TINY, settings
from gpu_phases.store import Row

START_TIMEOUT_S = 120.0
"""Time limit of the start of the core, which compiles kernels and captures graphs."""
NUM_SPARE = 8
"""Number of adapters for which a disk must have room in addition to the written ones."""


def rows(context: Context) -> Iterator[Row]:
    """The ratio after each round, from all rounds so far.

    Raises:
        WrongOutput: the output of an adapter's requests is wrong, or nothing was loaded.
    """
    card = context.card
    card.wait_free()
    shape, rank = (LLAMA_8B, 16) if card.is_full else (TINY, 8)
    num_resident, num_cold, num_slots = (16, 100, 32) if card.is_full else (2, 6, 4)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-itl-")))
        (folder / "config.json").write_text(json.dumps(shape))
        where, num_files = stack.enter_context(_room(random_adapters.num_bytes(shape, rank), num_cold + num_resident))
        files = random_adapters.make_adapters(folder, where, num_files, rank, card.device.type)
        config = settings(card) | {"model": str(folder), "device": card.device.type}
        config |= {"enable_lora": True, "max_loras": num_slots, "max_cpu_loras": num_slots, "max_lora_rank": rank}
        config |= {} if card.is_full else {"kv_cache_memory_bytes": 1 << 20}
        core = (str(Path(__file__).parents[1] / "random_core.py"),)
        pod = stack.enter_context(EngineProcesses(folder / "run", None, core=core, **config))
        # Its folder is removed: the log of the phase says what the core said, also if the phase fails.
        stack.callback(lambda: print(pod.log("core"), flush=True))
        pod.start("core", timeout_s=START_TIMEOUT_S)
        resident, cold = [f"resident {i}" for i in range(num_resident)], [f"cold {i}" for i in range(num_cold)]
        register_adapters(pod, files[-num_resident:], resident, pinned=True)
        register_adapters(pod, files[:num_cold], cold)
        sets = AdapterSets(resident, cold, files[:num_cold])
        for figures in measure_itl(pod, _plan(card, shape["vocab_size"], num_cold), sets, print):
            details = {name: value for name, value in figures.items() if name != "runs"}
            what = f"ITL p99 with loads / without, {len(figures['runs'])} rounds, adapters on {where.parent}"
            yield {"what": what, "key": "itl", "value": figures["p99_ratio"]["median"], "unit": "ratio", **details}


def _plan(card: Card, vocab_size: int, loads: int) -> ItlWorkload:
    if not card.is_full:
        return ItlWorkload(1 if card.is_gpu else 2, 0.5, loads, 12, 6, 6, vocab_size, 1.0)
    return ItlWorkload(3, 25.0, loads, 256, 128, 3 * settings(card)["max_num_seqs"], vocab_size, 1.0)


@contextlib.contextmanager
def _room(num_bytes: int, wanted: int) -> Iterator[tuple[Path, int]]:
    """Make a temporary folder on the disk if it has room for the wanted number of adapters, otherwise on the roomiest
    place; return it and the number that fits."""
    places = [Path(tempfile.gettempdir()), Path("/dev/shm")]
    room = {place: _num_fitting(place, num_bytes) for place in places if place.is_dir()}
    best = next((place for place, num in room.items() if num >= wanted), max(room, key=lambda place: room[place]))
    if room[best] < 1:
        tried = ", ".join(map(str, room))
        raise OSError(f"adapters: {tried}: no room for {1 + NUM_SPARE} files of {num_bytes} bytes; set TMPDIR")
    with tempfile.TemporaryDirectory(prefix="quire-adapters-", dir=best) as name:
        yield Path(name), min(room[best], wanted)


def _num_fitting(place: Path, num_bytes: int) -> int:
    return max(0, shutil.disk_usage(place).free // num_bytes - NUM_SPARE)
