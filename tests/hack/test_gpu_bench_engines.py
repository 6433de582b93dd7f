# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark's engines: peers that run alone, adapters, and loads beside requests."""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCH = Path(__file__).parents[1] / "bench"


def test_an_engine_starts_when_the_memory_of_the_one_before_is_free(bench_modules, monkeypatch):
    import card
    import torch

    free = iter([1 << 30, 1 << 30, 9 << 30])
    monkeypatch.setattr(card.Card, "free_bytes", property(lambda _: next(free)))
    monkeypatch.setattr(card.time, "sleep", lambda _: None)
    card.Card(torch.device("cpu")).wait_free(10 << 30)
    assert next(free, None) is None
    monkeypatch.setattr(card.Card, "free_bytes", property(lambda _: 1 << 30))
    monkeypatch.setattr(card, "FREE_TIMEOUT_S", 0.0)
    with pytest.raises(
        TimeoutError, match=r"1\.0 GiB of the card are free after 0 s, 10\.0 were; this process holds 0\.0"
    ):
        card.Card(torch.device("cpu")).wait_free(10 << 30)


def test_each_peer_is_alone_and_one_that_fails_leaves_the_others(bench_modules, monkeypatch):
    import card
    import gpu_peers
    import torch
    from child import ChildFailed

    open_, waited = [], []

    class Child:
        """Makes a token in a second, and fails as vLLM."""

        def __init__(self, name, script, settings, folder, python=None, timeout_s=None):
            assert (BENCH / script).is_file()
            self.name = name

        def __enter__(self):
            assert not open_
            assert len(waited) == self.num_started
            open_.append(self.name)
            return self

        def __exit__(self, *_):
            open_.clear()

        @property
        def num_started(self):
            return {"quire": 1, "vLLM": 2, "transformers": 3}[self.name]

        def call(self, command, requests, offsets):
            if self.name == "vLLM":
                raise ChildFailed("vLLM failed at 'run':\nTraceback\nRuntimeError: no")
            tokens = [[1] * num for _, num in requests]
            return {"seconds": self.num_started, "token_ids": tokens, "events": None}

    monkeypatch.setattr(gpu_peers, "ChildProcess", Child)
    monkeypatch.setattr(gpu_peers, "_cannot", lambda *_: None)
    monkeypatch.setattr(card.Card, "wait_free", lambda _, num_bytes: waited.append(num_bytes))
    rows = list(gpu_peers.rows(card.Card(torch.device("cpu")), False, sys.executable, 5))
    assert waited == [5, 5, 5]
    assert [(row["engine"], row.get("what"), row.get("left_out")) for row in rows] == [
        ("quire", "12 in, 6 out", None),
        ("quire", "a mix", None),
        ("vLLM", None, "vLLM left out: RuntimeError: no"),
        ("transformers", "12 in, 6 out", None),
        ("transformers", "a mix", None),
    ]
    assert [(r["to"], r["what"], r["ratio"], r["bar"]) for r in gpu_peers.ratios(rows)] == [
        ("transformers", "12 in, 6 out", 3.0, 3.0),
        ("transformers", "a mix", 3.0, 3.0),
    ]


def test_transformers_gets_loads_that_it_can_be_waited_for(bench_modules, tmp_path):
    """And its warm-up and plans are of those."""
    import gpu_peers
    import torch
    from card import Card

    card = Card(torch.device("cuda"))  # none is touched
    found = {peer.name: peer for peer in gpu_peers.peers(card, gpu_peers.loads(card, False), "python", tmp_path)}
    whats = {name: [load.what for load in peer.loads] for name, peer in found.items()}
    assert whats["quire"][-1] == "1000 in, 1000 out, 256 requests"
    assert whats["quire"] == whats["vLLM"]
    assert whats["transformers"] == whats["quire"][:-1]
    assert found["transformers"].settings["num_requests"] == 512


def test_without_vllm_one_line_says_so(bench_modules, tmp_path):
    import gpu_report
    import gpu_vllm
    import torch
    from card import Card

    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'Traceback' >&2\necho \"ImportError: no vllm\" >&2\nexit 1\n")
    python.chmod(0o755)
    # It is asked before anything is made, so that no GPU is touched.
    found = gpu_vllm.compare(Card(torch.device("cuda")), str(python))
    line = f"vLLM left out: '{python}' cannot import it: ImportError: no vllm"
    assert found == {"left_out": line}
    assert gpu_report.markdown({"about": {"card": "a card", "command": "gpu.py"}, "vllm": found}).endswith(
        f"\n{line}\n"
    )
    assert "cannot be run: No such file" in gpu_vllm.left_out(str(tmp_path / "none"))
    assert gpu_vllm.left_out("true") is None


def test_wrong_tokens_of_an_adapter_are_found(bench_modules, tmp_path):
    """Its last token changed, or its tokens taken for another adapter's."""
    import gpu_engine
    import gpu_vllm
    import random_adapters
    import torch
    from card import Card
    from measure import WrongOutput

    card = Card(torch.device("cpu"))
    gpu_vllm.write_checkpoint(card, gpu_engine.TINY, tmp_path / "model")
    folders = random_adapters.make_adapters(tmp_path / "model", tmp_path / "adapters", 2, 8)
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "model": str(tmp_path / "model")}
    with torch.inference_mode(), gpu_vllm.own_engine(card, gpu_engine.settings(card) | lora, folders) as (engine, run):
        right = gpu_vllm.warm_up(card, run)
        assert gpu_vllm.check(card, engine, right, folders) < 1e-3
        changed = [*right[:-1], [*right[-1][:-1], (right[-1][-1] + 1) % 300]]
        for wrong, which in ((changed, folders), (right, folders[::-1])):
            with pytest.raises(WrongOutput, match="deviations below the likeliest"):
                gpu_vllm.check(card, engine, wrong, which)


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


def test_rounds_of_time_between_tokens_are_kept_as_they_come(bench, monkeypatch):
    """Each is written when it is over, and none is begun that would not end in time."""
    import gpu_bench
    import gpu_itl
    from measure import WrongOutput

    def phase(run, wrong):
        def rounds(*_):
            for i in range(1, 6):
                run._began -= 100
                yield {"runs": [{}] * i, "rounds": 5, "seconds": 50.0, "ratio": 1.0 + i / 10}
                written.append(json.loads(run._options.out.read_text())["itl"]["ratio"])
                if wrong:
                    raise WrongOutput("no")

        monkeypatch.setattr(gpu_itl, "measure", rounds)
        run._checks = {"adapters": {"other_tokens": 0, "tokens": 7}}
        run._card = SimpleNamespace(wait_free=lambda _: None)
        gpu_bench.Bench._itl(run)

    written: list[float] = []
    code, found = bench({"itl": lambda run: phase(run, False)}, budget_s=350.0)
    assert (code, found["cut_short"], found["itl"]["ratio"]) == (0, ["itl"], 1.3)
    assert written == [1.1, 1.2]
    code, found = bench({"itl": lambda run: phase(run, False)})
    assert (code, "cut_short" in found, found["itl"]["ratio"]) == (0, False, 1.5)
    code, found = bench({"itl": lambda run: phase(run, True)})
    assert (code, found["itl"]) == (1, {"check": {"other_tokens": 0, "tokens": 7}})


def test_room_for_adapters_is_looked_for(bench_modules, monkeypatch, tmp_path):
    """On the disk, or in memory, or for fewer of them."""
    import gpu_engine
    import gpu_itl
    import random_adapters

    assert random_adapters.num_bytes(gpu_engine.LLAMA_8B, 16) == 83_886_080
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
