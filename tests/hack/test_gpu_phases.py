# SPDX-License-Identifier: Apache-2.0
"""Parts of the GPU driver's phases: checks of tokens, traces, room for adapters, and engines that are left out."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def tiny(bench_modules):
    import torch
    from card import Card

    with torch.inference_mode():
        yield Card(torch.device("cpu"), is_tiny=True)


def test_a_tie_is_no_wrong_token(tiny, monkeypatch):
    """Rounding may select either of two equally likely tokens; the text behind it differs then."""
    from gpu_phases import greedy_check

    drive, runs = greedy_check.drive, []

    def turned_round(*args):
        found = drive(*args)
        runs.append(found)
        if len(runs) % 2:
            found["token_ids"][0] = [found["token_ids"][0][0], *((t + 1) % 300 for t in found["token_ids"][0][1:])]
        return found

    monkeypatch.setattr(greedy_check, "drive", turned_round)
    assert greedy_check.check_graphs(tiny, False) == (3, 7)
    monkeypatch.setattr(greedy_check, "MAX_TIE", 10.0)
    assert greedy_check.check_graphs(tiny, False) == (0, 7)


def test_wrong_tokens_of_an_adapter_are_found(tiny, tmp_path):
    """Its last token changed, or its tokens taken for another adapter's."""
    import random_adapters
    from gpu_phases import random_engine, vllm
    from gpu_phases.random_checkpoint import write_checkpoint
    from measure import WrongOutput

    write_checkpoint(tiny, random_engine.TINY, tmp_path / "model")
    folders = random_adapters.make_adapters(tmp_path / "model", tmp_path / "adapters", 2, 8)
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "model": str(tmp_path / "model")}
    with vllm.own_engine(tiny, random_engine.settings(tiny) | lora, folders) as (engine, run):
        right = vllm.warm_up(tiny, run)
        assert vllm.check(tiny, engine, right, folders) < 1e-3
        changed = [*right[:-1], [*right[-1][:-1], (right[-1][-1] + 1) % 300]]
        for wrong, which in ((changed, folders), (right, folders[::-1])):
            with pytest.raises(WrongOutput, match="deviations below the likeliest"):
                vllm.check(tiny, engine, wrong, which)


def test_without_vllm_one_line_says_why(bench_modules, tmp_path):
    import torch
    from card import Card
    from gpu_phases.peers import why_left_out

    python, card = tmp_path / "python", Card(torch.device("cuda"))  # no device is touched
    python.write_text("#!/bin/sh\necho 'Traceback' >&2\necho \"ImportError: no vllm\" >&2\nexit 1\n")
    python.chmod(0o755)
    assert why_left_out(card, str(python)) == f"vLLM left out: '{python}' cannot import it: ImportError: no vllm"
    assert "cannot be run: No such file" in why_left_out(card, str(tmp_path / "none"))
    assert why_left_out(card, "true") is None


def test_an_engine_starts_when_the_memory_is_free(bench_modules, monkeypatch):
    import card
    import torch

    total, free = 10 << 30, iter([1 << 30, 1 << 30, 9 << 30])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(card.time, "sleep", lambda _: None)
    monkeypatch.setattr(card.Card, "free_bytes", property(lambda _: next(free)))
    card.Card(torch.device("cuda")).wait_free()
    assert next(free, None) is None
    monkeypatch.setattr(card.Card, "free_bytes", property(lambda _: 1 << 30))
    monkeypatch.setattr(card, "FREE_TIMEOUT_S", 0.0)
    with pytest.raises(TimeoutError, match=r"1\.0 of 10\.0 GiB of the card are free after 0 s"):
        card.Card(torch.device("cuda")).wait_free()


def test_idle_time_is_what_no_kernel_covers(bench_modules):
    from gpu_phases.trace import busy_and_idle, kernel_rows

    events = [
        {"cat": "kernel", "name": "a", "ts": 10, "dur": 5},
        {"cat": "cpu_op", "ts": 0, "dur": 100},
        {"cat": "kernel", "name": "b", "ts": 12, "dur": 6},
        {"cat": "gpu_memcpy", "ts": 25, "dur": 5},
        {"cat": "kernel"},
    ]
    assert busy_and_idle(events) == {"num": 3, "busy": 13, "idle": 7, "gaps": 7}
    assert busy_and_idle([]) == {"num": 0, "busy": 0, "idle": 0, "gaps": 0}
    # Between kernels of a graph there are one or two microseconds.
    assert busy_and_idle([*events, {"cat": "kernel", "ts": 32, "dur": 1}])["gaps"] == 7
    assert [(row["what"], row["value"]) for row in kernel_rows(events, 2, "x")] == [
        ("kernel b, x", 3.0),
        ("kernel a, x", 2.5),
    ]


@pytest.fixture
def itl_of(bench_modules, monkeypatch):
    """One run of itl.py on a core that answers as told."""
    import core_traffic
    import itl

    def run(kind, said, far, num_loaded):
        def send(pod, asks, adapter_events):
            adapter_events += [itl.AdapterEvent("slot", "cold", 0.1)] * num_loaded
            return [
                core_traffic.CoreResponse(ask, 0.0, [said] * ask.num_tokens, [0.1 + i for i in range(2)])
                for ask in asks
            ]

        monkeypatch.setattr(itl, "send_requests", send)
        monkeypatch.setattr(itl, "logit_gap", lambda *_: far)
        plan = itl.ItlWorkload(1, 4.0, 4, 8, 2, 1, 50, logit_deviation=2.0)
        return itl._run(None, plan, itl.AdapterSets(["r"], ["c"], []), (0, kind, 3.0, ["c"]), {"c": [7]}, [])

    return run


def test_gaps_are_named_by_the_works_around_them(bench_modules):
    from gpu_phases.trace import gap_rows

    works = [("a", 0, 10), ("b", 12, 10), ("c", 40, 5), ("a", 100, 10), ("b", 112, 10), ("c", 140, 5)]
    events = [{"cat": "kernel", "name": name, "ts": float(ts), "dur": float(dur)} for name, ts, dur in works]
    rows = {row["what"]: (row["value"], row["calls"]) for row in gap_rows(events, 2, "x")}
    # A gap of 2 us between two kernels of a graph does not count.
    assert rows == {"gap between c and a, x": (27.5, 0.5), "gap between b and c, x": (18.0, 1.0)}


def test_time_between_tokens_needs_right_tokens_and_loads(itl_of):
    assert itl_of("with", 7, 0.0, 4)["with_p99_ms"] == pytest.approx(1000)
    assert itl_of("without", 7, 0.0, 0)["without_p50_ms"] == pytest.approx(1000)
    # Another token, but as likely: two deviations are one of these logits.
    assert itl_of("with", 8, 0.9, 4)
    from measure import WrongOutput

    with pytest.raises(WrongOutput, match=r"'c' said \[8\] and alone \[7\]: 0.55 deviations below"):
        itl_of("with", 8, 1.1, 4)
    with pytest.raises(WrongOutput, match="a run with loads loaded 3 adapters; its short requests are 4"):
        itl_of("with", 7, 0.0, 3)
    with pytest.raises(WrongOutput, match="a run without loads loaded 1 adapters"):
        itl_of("without", 7, 0.0, 1)


def test_room_for_adapters_is_looked_for(bench_modules, monkeypatch, tmp_path):
    """On the disk, or in memory, or for fewer of them."""
    import random_adapters
    from gpu_phases import itl as gpu_itl
    from gpu_phases.random_engine import LLAMA_8B

    assert random_adapters.num_bytes(LLAMA_8B, 16) == 83_886_080
    monkeypatch.setattr(gpu_itl.tempfile, "gettempdir", lambda: str(tmp_path))
    shm = Path("/dev/shm")

    def found(on_disk, in_memory):
        free = {tmp_path: on_disk, shm: in_memory}
        monkeypatch.setattr(gpu_itl.shutil, "disk_usage", lambda place: type("", (), {"free": 100 * free[place]}))
        with gpu_itl._room(100, 20) as (folder, num):
            return folder.parent, num

    assert found(28, 1000) == (tmp_path, 20)
    assert found(27, 1000) == (shm, 20)
    assert found(27, 12) == (tmp_path, 19)
    assert found(10, 12) == (shm, 4)
    with pytest.raises(OSError, match="no room for 9 files of 100 bytes; set TMPDIR"):
        found(8, 8)


def test_files_without_a_disk_are_not_said_to_be_read_from_one(bench_modules):
    import random_adapters

    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        Path(name, "adapter_model.safetensors").write_bytes(b"0" * 5000)
        assert random_adapters.evict_from_page_cache([Path(name)]) in ("memory", "unknown")
