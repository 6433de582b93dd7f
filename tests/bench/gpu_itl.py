# SPDX-License-Identifier: Apache-2.0
"""What loading adapters costs those that run on the card: a real core process of random weights, asked over its own
socket, and adapters as PEFT writes them on the local disk. itl.py is the measurement."""

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_engine as engines
import random_adapters
from card import Card

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

from itl import AdapterSets, ItlWorkload, measure_itl, register_adapters  # noqa: E402
from support.engine_processes import EngineProcesses  # noqa: E402

BAR, AIM = 1.10, 1.03
"""What p99 with loads may be of p99 without, and should be."""
START_TIMEOUT_S = 240.0
"""Until the core serves: it compiles kernels and captures graphs first."""
NUM_SPARE = 8
"""So many more adapters must fit on whatever they are written to."""


def measure(card: Card, quick: bool) -> Iterator[dict[str, Any]]:
    """The figures, after each round those of all so far; see itl.py.

    Raises:
        WrongOutput: an adapter's requests got something wrong, or nothing was loaded.
    """
    shape, rank = (engines.LLAMA_8B, 16) if card.is_gpu else (engines.TINY, 8)
    num_resident, num_cold, num_slots = (16, 100, 32) if card.is_gpu else (2, 6, 4)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-itl-")))
        (folder / "config.json").write_text(json.dumps(shape))
        where, num_files = stack.enter_context(_room(random_adapters.num_bytes(shape, rank), num_cold + num_resident))
        files = random_adapters.make_adapters(folder, where, num_files, rank, card.device.type)
        found = {
            "adapters": num_cold,
            "files": min(num_files, num_cold),
            "file_bytes": random_adapters.num_bytes(shape, rank),
            "on": str(where.parent),
            "resident": num_resident,
            "slots": num_slots,
        }
        print(f"  {found}", flush=True)
        config = engines.settings(card) | {"model": str(folder), "device": card.device.type}
        config |= {"enable_lora": True, "max_loras": num_slots, "max_cpu_loras": num_slots, "max_lora_rank": rank}
        config |= {} if card.is_gpu else {"kv_cache_memory_bytes": 1 << 20}
        pod = stack.enter_context(
            EngineProcesses(folder / "run", None, core=(str(Path(__file__).with_name("random_core.py")),), **config)
        )
        pod.start("core", timeout_s=START_TIMEOUT_S)
        resident, cold = [f"resident {i}" for i in range(num_resident)], [f"cold {i}" for i in range(num_cold)]
        register_adapters(pod, files[-num_resident:], resident, pinned=True)
        register_adapters(pod, files[:num_cold], cold)
        plan = _plan(card, quick, shape["vocab_size"], num_cold)
        for figures in measure_itl(pod, plan, AdapterSets(resident, cold, files[:num_cold]), _say):
            yield found | figures | {"ratio": figures["p99_ratio"]["median"], "bar": BAR, "aim": AIM}


def _plan(card: Card, quick: bool, vocab_size: int, loads: int) -> ItlWorkload:
    if not card.is_gpu:
        return ItlWorkload(2, 0.5, loads, 12, 6, 12, vocab_size, 1.0)
    runs, seconds = (2, 25.0) if quick else (5, 25.0)
    return ItlWorkload(runs, seconds, loads, 256, 128, 3 * engines.settings(card)["max_num_seqs"], vocab_size, 1.0)


@contextlib.contextmanager
def _room(num_bytes: int, wanted: int) -> Iterator[tuple[Path, int]]:
    """A temporary folder for adapters, on the disk if it has room for as many as are wanted, otherwise where most have
    it; and for how many there is room."""
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


def _say(what: str) -> None:
    print(f"  {what}", flush=True)
